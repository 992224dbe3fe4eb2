# SPDX-License-Identifier: Apache-2.0
"""Triton kernels without a GPU: a test file run under the interpreter, and a kernel compiled for sm_90."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

ROOT = Path(__file__).parents[2]


def interpret(file: str, output: Path) -> Any:
    """What `file` saves to the path that it is given when it runs as a program, under Triton's interpreter.

    The interpreter must be chosen before triton is first imported. It cuts off where it rounds to bf16: take fp16.
    """
    version = tuple(int(part) for part in triton.__version__.split(".")[:2])
    if version < (3, 7) and tuple(map(int, numpy.__version__.split(".")[:2])) >= (2, 4):
        pytest.skip("Triton's interpreter before 3.7 takes no loop bounds with NumPy 2.4 or later")
    search = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    environment = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": search}
    command = [sys.executable, file, str(output)]
    result = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    return torch.load(output, weights_only=False)  # written by the process above


def sm90(
    kernel: Any, types: dict[str, str], constants: dict[str, object], warps: int, folder: Path
) -> Counter[str]:
    """How often each opcode stands in the code for Hopper.

    Pointers and the integers named F, K, V or stride are multiples of 16.

    Started early (OVERLAP), a kernel lets the next one start and waits before it touches memory; one that measures in
    this order: the one behind it, which quantizes, does not wait.
    """
    code = sm90_code(kernel, types, {**constants, "OVERLAP": True}, warps, folder)
    waits, lets = code.index("ACQBULK"), code.index("PREEXIT")
    if constants.get("MEASURE") or not constants.get("QUANTIZE"):
        assert waits < first_access(code)
    assert waits < lets < first_access(code) or not constants.get("MEASURE")
    return Counter(code)


def first_access(code: list[str]) -> int:
    """Where global memory is first read or written."""
    return next(i for i, name in enumerate(code) if name.startswith(("LDG", "STG", "RED", "ATOM")))


def sm90_code(
    kernel: Any, types: dict[str, str], constants: dict[str, object], warps: int, folder: Path
) -> list[str]:
    """The opcodes as they stand in the code."""
    names = kernel.arg_names
    kinds = {**types, **dict.fromkeys(constants, "constexpr")}
    aligned = [n for n in names if kinds[n].startswith("*") or n in ("F", "K", "V", "stride")]
    source = ASTSource(
        fn=kernel,
        signature={n: kinds[n] for n in names},
        constexprs={(names.index(n),): value for n, value in constants.items()},
        attrs={(names.index(n),): [["tt.divisibility", 16]] for n in aligned},
    )
    result = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": warps})
    cubin = folder / "kernel.cubin"
    cubin.write_bytes(result.asm["cubin"])
    nvdisasm = Path(triton.__file__).parent / "backends/nvidia/bin/nvdisasm"
    sass = subprocess.run([nvdisasm, "-c", cubin], capture_output=True, text=True, check=True)
    return re.findall(r"^\s+/\*[0-9a-f]+\*/\s+(?:@!?U?P\d+ )?([A-Z][\w.]*)", sass.stdout, re.M)


def spills(opcodes: Counter[str]) -> bool:
    return any(name.startswith(("LDL", "STL")) for name in opcodes)
