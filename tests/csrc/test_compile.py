# SPDX-License-Identifier: Apache-2.0
"""What ptxas said about the kernels for Hopper as they are installed, or says now; needs nvcc, no GPU."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CSRC = ROOT / "csrc"
# kernel name: most registers per thread it may use. amax_and_scale_update: 1024 threads a block allow 64; the others:
# 4 blocks of 256 threads to a multiprocessor, bias_dropout_add's forms for misaligned tensors 2.
REGISTERS = {
    "amax_if_unset_kernel": 64,
    "quantize_lora_down_kernel": 255,  # one block of 256 threads from rank 33 on
    "quantize_lora_down_boxes_kernel": 128,  # two blocks of 256 threads
    "quantize_lora_down_panels_kernel": 168,  # two blocks of 256 threads, or one of 384; HIGHEST_RANK_REGISTERS
    "arrange_A_kernel": 64,
    "finish_kernel": 64,
    "lora_grad_a_kernel": 255,  # one block of 256 threads at 64 ranks, else two
    "sum_row_slices_kernel": 64,
    "transpose_fp8_kernel": 64,
    "fp8_gemm_kernel": 168,  # one block of 384 threads (or 512: 128); setmaxnreg shares them out anew
    "fp8_block_gemm_kernel": 168,  # as fp8_gemm_kernel
    "quantize_grad_kernel": 255,  # one block of 256 threads, or of 384 that draw: DRAWING_REGISTERS
    "sum_shares_kernel": 64,
    "amax_and_scale_update_kernel": 64,
    "dropout_mask_kernel": 64,
    "dropped_bits_kernel": 128,
    "bias_dropout_add_kernel": 128,
    "bias_dropout_add_backward_kernel": 128,
    "bias_grad_kernel": 64,
}
DRAWING_REGISTERS = 168  # quantize_grad_kernel<…, kDraws = true>
HIGHEST_RANK_REGISTERS = (
    255  # quantize_lora_down_panels_kernel<…, 256, …>: one block of 256 threads
)
SPILLED_BYTES = {  # written and read once a tile, outside of the loops; lora_grad_a: 4 bytes a step, drawing at rank 32
    "fp8_gemm_kernel": 64,
    "fp8_block_gemm_kernel": 48,
    "lora_grad_a_kernel": 8,
}
# what the kernel is written for: products of FP8 and of 16-bit operands by warpgroups, and the tensor copy engine
INSTRUCTIONS = {
    "fp8_gemm_kernel": {"QGMMA", "HGMMA", "UTMALDG", "UTMASTG", "STSM"},
    "sm90_grouped_grad_input.cu": {"QGMMA", "HGMMA", "UTMALDG", "UTMASTG", "LDSM"},
    "fp8_block_gemm_kernel": {"QGMMA", "HGMMA", "UTMALDG", "UTMASTG", "STSM"},
    "sm90_grad_input_untransposed.cu": {"QGMMA", "HGMMA", "UTMALDG", "UTMASTG", "LDSM"},
    "sm90_block_grad_input.cu": {"QGMMA", "HGMMA", "UTMALDG", "UTMASTG", "LDSM"},
    "quantize_grad_kernel": {"HGMMA", "UTMALDG"},
    "quantize_lora_down_kernel": {"HMMA", "LDGSTS"},
    "quantize_lora_down_boxes_kernel": {"HMMA", "UTMALDG"},
    "quantize_lora_down_panels_kernel": {"HGMMA", "UTMALDG"},
}


def tool(name: str) -> str | None:
    """Of the CUDA toolkit, which is looked for as setup.py does, or of Triton's wheel."""
    homes = filter(None, map(os.environ.get, ("CUDA_HOME", "CUDA_PATH")))
    found = [shutil.which(name, path=str(Path(home, "bin"))) for home in homes]
    found.append(shutil.which(name))
    spec = importlib.util.find_spec("triton")
    if spec and spec.origin:
        folder = Path(spec.origin).parent / "backends/nvidia/bin"
        found.append(shutil.which(name, path=str(folder)))
    return next(filter(None, found), None)


def bound_of(kernel: str, entry: str) -> int:
    """Of an instance, by its mangled name; its last template argument is a bool where these two have one."""
    true = "Lb1EEEv" in entry.partition("'")[0]
    if true and kernel == "quantize_grad_kernel":
        return DRAWING_REGISTERS
    if kernel == "quantize_lora_down_panels_kernel" and "Li256E" in entry:
        return HIGHEST_RANK_REGISTERS
    return 64 if true and kernel.startswith("bias_dropout_add") else REGISTERS[kernel]


def installed(source: Path, folder: Path) -> tuple[str, Path] | None:
    """(ptxas' report, the cubin) that setup.py left in build/, if it is of this source and these headers."""
    objects = ROOT / "build" / str(sys.implementation.cache_tag)
    built = objects / f"{source.relative_to(CSRC)}.o"
    report, extract = built.with_name(f"{built.name}.log"), tool("cuobjdump")
    if extract is None or not report.exists() or not built.exists():
        return None
    newest = max(path.stat().st_mtime for path in (source, *CSRC.rglob("*.h")))
    log = report.read_text()
    if built.stat().st_mtime < newest or report.stat().st_mtime < newest or "'sm_90a'" not in log:
        return None
    subprocess.run([extract, "-xelf", "sm_90a", str(built)], cwd=folder, check=True)
    (cubin,) = folder.glob("*.cubin")
    return log, cubin


def compiled(source: Path, folder: Path) -> tuple[str, Path]:
    """(ptxas' report, the cubin), made here."""
    cubin = folder / "out.cubin"
    nvcc = tool("nvcc")
    if nvcc is None:
        pytest.skip("no report of this source in build/, no nvcc in CUDA_HOME, CUDA_PATH or PATH")
    command = [nvcc, "-std=c++17", "-O3", "-gencode=arch=compute_90a,code=sm_90a"]
    command += ["--ptxas-options=-v", "-I", str(CSRC), "-cubin", str(source), "-o", str(cubin)]
    return subprocess.run(command, capture_output=True, text=True, check=True).stderr, cubin


def kernels_in(source: Path) -> list[str]:
    """Of the file and of its op's headers that it includes."""
    text = source.read_text()
    for header in re.findall(r'#include "(ops/\w+/\w+\.h)"', text):
        text += (CSRC / header).read_text()
    text = re.sub(r"//.*", "", text)
    bounds = r"__launch_bounds__\((?:[^()]|\([^()]*\))*\)\s*"
    return re.findall(rf"__global__\s+void\s+(?:{bounds})?(\w+)", text)


SOURCES = [source for source in sorted(CSRC.rglob("*.cu")) if kernels_in(source)]


def test_every_kernel_has_a_bound() -> None:
    found = {name for source in SOURCES for name in kernels_in(source)}
    assert found == set(REGISTERS)


@pytest.mark.parametrize("variable", ["CUDA_HOME", "CUDA_PATH", "PATH"])
def test_nvcc_is_found_where_setup_finds_it(
    variable: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("CUDA_HOME", "CUDA_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PATH", "")
    assert tool("nvcc") is None
    nvcc = tmp_path / "bin" / "nvcc"
    nvcc.parent.mkdir()
    nvcc.touch(mode=0o755)
    monkeypatch.setenv(variable, str(nvcc.parent if variable == "PATH" else tmp_path))
    assert tool("nvcc") == str(nvcc)


def test_a_block_with_more_threads_has_a_bound_of_its_own() -> None:
    names = [f"_ZN20quantize_grad_kernelI6__halfLi64ELi4ELb{i}EEEv14CUtensorMap" for i in (0, 1)]
    bounds = [bound_of("quantize_grad_kernel", f"{name}' for 'sm_90a'") for name in names]
    assert bounds == [255, 168]
    names = [
        f"_ZN32quantize_lora_down_panels_kernelI6__halfLi{r}ELb1EEEv14CUtensorMap"
        for r in (192, 256)
    ]
    assert [bound_of("quantize_lora_down_panels_kernel", name) for name in names] == [168, 255]


@pytest.mark.parametrize("source", SOURCES, ids=lambda p: p.name)
def test_registers_and_spills_on_sm90a(source: Path, tmp_path: Path) -> None:
    log, cubin = installed(source, tmp_path) or compiled(source, tmp_path)
    assert not re.search(r"C75\d\d", log), "ptxas serializes wgmma:\n" + log
    entries = re.split(r"Compiling entry function '", log)[1:]
    entries = [entry for entry in entries if "for 'sm_90a'" in entry.partition("\n")[0]]
    names = [next(kernel for kernel in REGISTERS if kernel in entry) for entry in entries]
    assert set(names) == set(kernels_in(source)), log
    for name, entry in zip(names, entries, strict=True):
        assert int(re.search(r"Used (\d+) registers", entry)[1]) <= bound_of(name, entry), entry
        for number in re.findall(r"(\d+) bytes (?:stack frame|spill)", entry):
            assert int(number) <= SPILLED_BYTES.get(name, 0), entry
    own = INSTRUCTIONS.get(source.name)
    wanted = {name: own or INSTRUCTIONS[name] for name in {*names} if own or name in INSTRUCTIONS}
    if wanted and (nvdisasm := tool("nvdisasm")):
        listing = subprocess.run(
            [nvdisasm, "-c", cubin], capture_output=True, text=True, check=True
        )
        for name, instructions in wanted.items():
            found = instructions_of(name, listing.stdout)
            assert instructions <= found, f"{name} lacks {instructions - found}"


def instructions_of(kernel: str, listing: str) -> set[str]:
    """Of all functions of that name in nvdisasm's listing: the instructions, without what follows a dot."""
    functions = re.split(r"^\.text\.", listing, flags=re.MULTILINE)[1:]
    code = "".join(each for each in functions if kernel in each.partition("\n")[0])
    return set(
        re.findall(r"^\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z]\w+)", code, re.MULTILINE)
    )
