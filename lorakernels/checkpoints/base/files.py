# SPDX-License-Identifier: Apache-2.0
"""BaseFiles: a base's directory for those that let transformers read it."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Any

from lorakernels.checkpoints.base.file_names import check_all_used
from lorakernels.checkpoints.base.format import check_whole_blocks, format_of, undeclare
from lorakernels.checkpoints.base.shards import Directory


class BaseFiles:
    """The directory of a base. Only configs and headers are read, no values.

    Attributes:
        fp8: whether weights are in block FP8. Otherwise all are plain.

    Raises:
        FileNotFoundError: there are no safetensors, or one is missing.
        ValueError: a file is broken, or the format of the weights is not read by lorakernels.
    """

    def __init__(self, folder: str | Path) -> None:
        files = Directory(folder)
        self._tensors = files.tensors
        self._format = format_of(self._tensors, {}, files.path)
        self.fp8 = self._format.fp8

    def declare(self, config: Any) -> None:
        """Make `from_pretrained(config=config)` read the weights as what they are, wherever a config says so.

        Raises:
            ValueError: transformers would dequantize a weight wrongly.
        """
        undeclare(config)
        if self.fp8:
            check_whole_blocks(self._tensors, self._format.block)
            declared = {"quant_method": "fp8", "weight_block_size": list(self._format.block)}
            config.quantization_config = self._format.quantization_config or declared

    def left_out(self, model: Any, config: Any, unexpected: Collection[str]) -> list[str]:
        """`check_all_used` of the directory's tensors."""
        return check_all_used(model, config, self._tensors, unexpected)
