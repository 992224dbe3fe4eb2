# SPDX-License-Identifier: Apache-2.0
"""What ptxas says about the kernels for Hopper; needs nvcc, no GPU."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

CSRC = Path(__file__).parents[2] / "csrc"
# kernel name: most registers per thread it may use. amax_and_scale_update: 1024 threads a block allow 64; the others:
# 4 blocks of 256 threads to a multiprocessor, bias_dropout_add's forms for misaligned tensors 2.
REGISTERS = {
    "amax_if_unset_kernel": 64,
    "quantize_lora_down_kernel": 255,  # one block of 256 threads from rank 33 on
    "sum_slices_kernel": 64,
    "quantize_grad_kernel": 255,  # one block of 256 threads
    "sum_shares_kernel": 64,
    "amax_and_scale_update_kernel": 64,
    "dropout_mask_kernel": 64,
    "bias_dropout_add_kernel": 128,
    "bias_dropout_add_backward_kernel": 128,
    "bias_grad_kernel": 64,
}
NVCC = shutil.which("nvcc")


def kernels_in(source: Path) -> list[str]:
    text = re.sub(r"//.*", "", source.read_text())
    return re.findall(r"__global__\s+void\s+(?:__launch_bounds__\([^)]*\)\s*)?(\w+)", text)


SOURCES = [source for source in sorted(CSRC.glob("*.cu")) if kernels_in(source)]


def test_every_kernel_has_a_bound() -> None:
    found = {name for source in SOURCES for name in kernels_in(source)}
    assert found == set(REGISTERS)


@pytest.mark.skipif(NVCC is None, reason="no nvcc on PATH")
@pytest.mark.parametrize("source", SOURCES, ids=lambda p: p.name)
def test_registers_and_spills_on_sm90a(source: Path, tmp_path: Path) -> None:
    command = [NVCC, "-std=c++17", "-O3", "-gencode=arch=compute_90a,code=sm_90a"]
    command += ["--ptxas-options=-v", "-cubin", str(source), "-o", str(tmp_path / "out.cubin")]
    log = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    entries = re.split(r"Compiling entry function '", log)[1:]
    names = [next(kernel for kernel in REGISTERS if kernel in entry) for entry in entries]
    assert set(names) == set(kernels_in(source)), log
    for name, entry in zip(names, entries, strict=True):
        vector = name.startswith("bias_dropout_add") and "Lb1EEEv" in entry
        bound = 64 if vector else REGISTERS[name]
        assert int(re.search(r"Used (\d+) registers", entry)[1]) <= bound, entry
        assert "0 bytes spill stores, 0 bytes spill loads" in entry
        assert "0 bytes stack frame" in entry
