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

from tests.csrc.sass import LOCAL, Function, functions

pytestmark = pytest.mark.slow

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
    "longest_document_kernel": 64,
    "lora_grad_a_kernel": 255,  # one block of 256 threads at 64 ranks, else two
    "sum_row_slices_kernel": 64,
    "transpose_fp8_kernel": 64,
    "fp8_gemm_kernel": 168,  # one block of 384 threads (or 512: 128); setmaxnreg shares them out anew
    "fp8_block_gemm_kernel": 168,  # as fp8_gemm_kernel
    "quantize_grad_kernel": 128,  # one block of 512 threads; GRAD_REGISTERS
    "sum_shares_kernel": 64,
    "amax_and_scale_update_kernel": 64,
    "dropout_mask_kernel": 64,
    "dropped_bits_kernel": 128,
    "bias_dropout_add_kernel": 128,
    "bias_dropout_add_backward_kernel": 128,
    "bias_grad_kernel": 64,
    "memset_kernel": 32,  # 8 blocks of 256 threads
}
# quantize_grad_kernel<…, rank, …, kDraws, kApart>: one block of 256 threads, of 640, and of 384
GRAD_REGISTERS = {("128", "0", "0"): 255, ("16", "1", "1"): 96, ("64", "1", "0"): 168}
# quantize_lora_down_panels_kernel<…, 256, …>: one block of 256 threads
HIGHEST_RANK_REGISTERS = 255
LOW_TILE_REGISTERS = 255  # fp8_gemm_kernel<…, Shape::kLow, …>: one block of 256 threads
SPILLED_BYTES = {  # of a thread; all branches
    "fp8_gemm_kernel": 64,
    "fp8_block_gemm_kernel": 24,
    "quantize_grad_kernel": 12,
}
# The same by branch, as loads and stores in the code: (where a kernel multiplies, what of a kernel's warps helps).
# fp8_gemm's helpers draw a mask with 40 to 56 registers, while others multiply. Its largest tiles spill addresses a few
# times a tile, outside of the loop over depth. quantize_grad's warps that draw at rank 64 have 56 registers.
SPILLS = {
    "fp8_gemm_kernel": (7, 23),
    "fp8_block_gemm_kernel": (0, 12),
    "quantize_grad_kernel": (0, 6),
}
TAKES, GIVES = "USETMAXREG.TRY_ALLOC", "USETMAXREG.DEALLOC"
# what the kernel is written for: products of FP8 and of 16-bit operands by warpgroups, and the tensor copy engine
INSTRUCTIONS = {
    "fp8_gemm_kernel": {"QGMMA", "HGMMA", "UTMALDG", "UTMASTG", "STSM"},
    "sm90_grouped_grad_input.cu": {"QGMMA", "HGMMA", "UTMALDG", "UTMASTG", "LDSM"},
    "fp8_block_gemm_kernel": {"QGMMA", "HGMMA", "UTMALDG", "UTMASTG", "STSM"},
    "sm90_grad_input.cu": {"QGMMA", "HGMMA", "UTMALDG", "UTMASTG", "LDSM"},
    "quantize_grad_kernel": {"HGMMA", "UTMALDG"},
    "lora_grad_a_kernel": {"HMMA", "LDGSTS", "UCGABAR_ARV"},  # the last: a cluster's barrier
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
    if kernel == "quantize_grad_kernel":
        form = re.search(r"Li(\d+)ELi\d+ELb([01])ELb([01])EEEv", entry).groups()
        return GRAD_REGISTERS.get(form, REGISTERS[kernel])
    if kernel == "quantize_lora_down_panels_kernel" and "Li256E" in entry:
        return HIGHEST_RANK_REGISTERS
    if kernel == "fp8_gemm_kernel" and "ShapeE0E" in entry:
        return LOW_TILE_REGISTERS
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
    names = [
        f"_ZN20quantize_grad_kernelI6__halfLi{rank}ELi4ELb{draws}ELb{apart}EEEv14CUtensorMap"
        for rank, draws, apart in (
            (0, 0, 1),
            (16, 0, 1),
            (16, 1, 1),
            (64, 1, 1),
            (64, 1, 0),
            (128, 0, 0),
        )
    ]
    bounds = [bound_of("quantize_grad_kernel", f"{name}' for 'sm_90a'") for name in names]
    assert bounds == [128, 128, 96, 128, 168, 255]
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
        assert registers_of(entry) <= bound_of(name, entry), entry
        for number in re.findall(r"(\d+) bytes (?:stack frame|spill)", entry):
            assert int(number) <= SPILLED_BYTES.get(name, 0), entry
    if nvdisasm := tool("nvdisasm"):
        listing = subprocess.run([nvdisasm, cubin], capture_output=True, text=True, check=True)
        launched = {entry.partition("'")[0]: entry for entry in entries}
        code = {f: registers_of(launched[f.name]) for f in functions(listing.stdout)}
        assert len(code) == len(entries)
        assert_code(source, code)


def registers_of(entry: str) -> int:
    return int(re.search(r"Used (\d+) registers", entry)[1])


def assert_code(source: Path, code: dict[Function, int]) -> None:
    """Of functions, each with the registers that a thread is launched with."""
    own = INSTRUCTIONS.get(source.name)
    found: dict[str, set[str]] = {}
    for function, registers in code.items():
        kernel = next(name for name in kernels_in(source) if name in function.name)
        found.setdefault(kernel, set()).update(function.names)
        multiplying, helping = spills(function)
        most_multiplying, most_helping = SPILLS.get(kernel, (0, 0))
        assert len(multiplying) <= most_multiplying and len(helping) <= most_helping, function
        assert not in_inner_loops(function, multiplying) or "STSM" not in function.names, function
        assert waits_for_registers(function, registers) <= 0, function
    for kernel, names in found.items():
        lacks = (own or INSTRUCTIONS.get(kernel, set())) - names
        assert not lacks, f"{kernel} lacks {lacks}"


def spills(function: Function) -> tuple[set[int], set[int]]:
    """Loads and stores of spilled registers: in the branch that takes registers, and in the one that gives them."""
    local = set(function.places(*LOCAL))
    takes, gives = function.places(TAKES), function.places(GIVES)
    if not takes:
        return local, set()
    helping = local & set().union(*(function.reached(place, takes) for place in gives))
    return local - helping, helping


def in_inner_loops(function: Function, places: set[int]) -> bool:
    """Whether one is in a tile's loop over depth.

    Such a loop has FP8 products (QGMMA), and not a tile's end, where all threads write sums to shared memory (STSM).
    """
    ends, products = function.places("STSM"), function.places("QGMMA")
    inner = [
        loop
        for loop in function.loops()
        if any(i in loop for i in products) and not any(i in loop for i in ends)
    ]
    return any(place in loop for place in places for loop in inner)


def waits_for_registers(function: Function, at_launch: int) -> int:
    """How many registers, one thread of each warpgroup together, are asked for beyond what the block has.

    One warpgroup gives registers, and the others take them; in quantize_grad two take, and the others give. Where what
    is given is too little, they wait for ever.
    """
    takes, gives = function.places(TAKES), function.places(GIVES)
    if not takes and not gives:
        return 0
    taken, given = (
        {int(re.search(r"0x(\w+)", function.code[i].arguments)[1], 16) for i in places}
        for places in (takes, gives)
    )
    count = function.threads // 128
    takers = 2 if "quantize_grad_kernel" in function.name else count - 1
    return (count - takers) * max(given) + takers * max(taken) - count * at_launch


LISTING = """
	.section	.nv.info.fp8_gemm_kernel,"",@"SHT_CUDA_INFO"
	//----- nvinfo : EIATTR_MAX_THREADS
	.align		4
.L_1:
        /*0000*/ 	.byte	0x04, 0x05
        /*0004*/ 	.word	0x00000180
        /*0008*/ 	.word	0x00000001
	.section	.text.fp8_gemm_kernel,"ax",@progbits
        /*0000*/                   @P0 BRA `(.L_x_9) ;
        /*0010*/                   USETMAXREG.TRY_ALLOC.CTAPOOL UP0, 0xe0 ;
.L_x_1:
        /*0020*/                   STL [R1], R2 ;
.L_x_2:
        /*0030*/                   QGMMA.64x128x32 R24, gdesc[UR8] ;
        /*0040*/                   @P1 BRA `(.L_x_2) ;
        /*0050*/                   STSM.16.M88.4 [R2], R4 ;
        /*0060*/                   @P2 BRA `(.L_x_1) ;
        /*0070*/                   EXIT ;
.L_x_9:
        /*0080*/                   USETMAXREG.DEALLOC.CTAPOOL 0x38 ;
        /*0090*/                   LDL R2, [R1] ;
        /*00a0*/                   EXIT ;
"""


def test_what_a_listing_says_of_spills_and_registers() -> None:
    [function] = functions(LISTING)
    assert function.threads == 384 and {"QGMMA", "STSM", "STL"} <= function.names
    multiplying, helping = spills(function)
    assert (len(multiplying), len(helping)) == (1, 1)
    assert not in_inner_loops(function, multiplying)
    assert waits_for_registers(function, 168) == 0
    assert waits_for_registers(function, 160) == 3 * 8
    [of_two] = functions(LISTING.replace("fp8_gemm", "quantize_grad").replace("0180", "0200"))
    assert waits_for_registers(of_two, 128) == 2 * (0xE0 + 0x38) - 4 * 128
    moved = LISTING.replace(".L_x_2:\n", "").replace(".L_x_1:\n", ".L_x_1:\n.L_x_2:\n")
    [inner] = functions(moved)
    assert in_inner_loops(inner, spills(inner)[0])
