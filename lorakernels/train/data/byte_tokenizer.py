# SPDX-License-Identifier: Apache-2.0
"""A tokenizer whose token ids are the bytes of the UTF-8 text. It saves as ordinary tokenizer files."""

from __future__ import annotations

from typing import Any

from lorakernels.train.errors import require

SPECIALS = ("<pad>", "<bos>", "<eos>")
VOCABULARY = 264  # 256 bytes and the specials, rounded up to a multiple of 8


def byte_symbols() -> list[str]:
    """The character that stands for each byte in byte-level tokenizers, by GPT-2's rule.

    A printable character stands for its own byte. The other bytes get the characters from U+0100 on.
    """
    printable = {
        *range(ord("!"), ord("~") + 1),
        *range(ord("¡"), ord("¬") + 1),
        *range(ord("®"), ord("ÿ") + 1),
    }
    spare = iter(range(256, 512))
    return [chr(byte) if byte in printable else chr(next(spare)) for byte in range(256)]


def byte_tokenizer() -> Any:
    """A tokenizer in which byte b is token b, followed by <pad>, <bos> and <eos>."""
    tokenizers = require("tokenizers")
    transformers = require("transformers")
    byte_level = require("tokenizers.pre_tokenizers").ByteLevel(
        add_prefix_space=False, use_regex=False
    )
    vocabulary = {symbol: byte for byte, symbol in enumerate(byte_symbols())}
    backend = tokenizers.Tokenizer(require("tokenizers.models").BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = byte_level
    backend.decoder = require("tokenizers.decoders").ByteLevel()
    backend.add_special_tokens(list(SPECIALS))
    pad, bos, eos = SPECIALS
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token=pad,
        bos_token=bos,
        eos_token=eos,
        clean_up_tokenization_spaces=False,
    )
