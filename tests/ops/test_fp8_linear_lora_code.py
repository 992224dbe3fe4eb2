# SPDX-License-Identifier: Apache-2.0
"""fp8_linear_lora in Triton: the configuration a shape gets, and the code that becomes for sm_90; needs no GPU."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from lorakernels.kernels import tune
from lorakernels.kernels.triton import fp8_linear_lora as kernel

pytestmark = pytest.mark.slow

HOPPER = (9, 0)


@pytest.mark.parametrize(
    ("problem", "block"),
    [
        (tune.Problem(8192, 8192, 8192, 16), (128, 256)),
        (tune.Problem(1024, 4096, 4096, 16), (128, 128)),
        (tune.Problem(100, 8192, 8192, 16), (64, 64)),
        (tune.Problem(64, 57344, 8192, 16), (64, 64)),
        (tune.Problem(1, 8192, 8192, 8), (64, 64)),
    ],
    ids=str,
)
def test_configurations_by_shape(problem, block):
    config = tune.choose(problem, HOPPER, 132)
    assert (config.block_m, config.block_n) == block
    assert tune.is_valid(config, problem, HOPPER)


def test_an_unknown_gpu_gets_the_default_that_fits_it():
    config = tune.choose(tune.Problem(8192, 8192, 8192, 16), (12, 7), 100)
    assert config == tune.DEFAULT[0]
    assert tune.shared_memory(config) <= tune.SMALLEST_SHARED_MEMORY
    assert not tune.is_valid(tune.TILES[HOPPER][0], tune.Problem(99, 9, 9, 0), (12, 7))


def test_the_choice_is_printed_once_when_asked(monkeypatch, capsys):
    monkeypatch.setenv("LORAKERNELS_PRINT_CONFIGS", "1")
    problem = tune.Problem(12345, 16, 16, 5)
    for _ in range(2):
        tune.choose(problem, HOPPER, 132)
    assert capsys.readouterr().err.count("m=12345") == 1


def compiled(rank: int, config: tune.KernelConfig, b: str, epilogue: bool = False):
    """For sm_90, no GPU needed."""
    constants = {
        "RANK": rank,
        "STEP": tune.rank_step(rank),
        "HAS_BIAS": True,
        "HAS_RESIDUAL": epilogue,
        "SCALE_PER_ROW": epilogue,
        "S_DTYPE": tl.bfloat16,
        "B_DTYPE": {"i32": tl.float32, "i16": tl.bfloat16}[b],
        "DOT_DTYPE": tl.bfloat16,
        "BLOCK_M": config.block_m,
        "BLOCK_N": config.block_n,
        "BLOCK_K": config.block_k,
        "GROUP": config.group,
    }
    types = {
        "y_tiles": f"tensordesc<bf16[{config.block_m}, {config.block_n // 2}]>",
        "x_tiles": f"tensordesc<fp8e4nv[{config.block_m}, {config.block_k}]>",
        "w_tiles": f"tensordesc<fp8e4nv[{config.block_n}, {config.block_k}]>",
        "residual_tiles": f"tensordesc<bf16[{config.block_m}, {config.block_n // 2}]>",
        "s_bits": "*i16",
        "b_bits": f"*{b}",
        "bias": "*bf16",
        "x_scale_inv": "*fp32",
        "w_scale_inv": "*fp32",
        "scaling": "fp32",
        **dict.fromkeys("MNK", "i32"),
        **dict.fromkeys(constants, "constexpr"),
    }
    names = kernel._fp8_linear_lora_kernel.arg_names
    aligned = [n for n in names if types[n].startswith("*") or n in ("N", "K")]
    source = ASTSource(
        fn=kernel._fp8_linear_lora_kernel,
        signature={n: types[n] for n in names},
        constexprs={(names.index(n),): value for n, value in constants.items()},
        attrs={(names.index(n),): [["tt.divisibility", 16]] for n in aligned},
    )
    options = {"num_warps": config.num_warps, "num_stages": config.num_stages}
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)


@pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION")
@pytest.mark.parametrize("epilogue", [False, True], ids=["", "scale by row, residual"])
@pytest.mark.parametrize(
    ("rank", "config", "b"),
    [
        (0, tune.TILES[HOPPER][0], "i32"),
        (16, tune.TILES[HOPPER][0], "i32"),
        (64, tune.TILES[HOPPER][0], "i32"),
        (64, tune.TILES[HOPPER][0], "i16"),
        (128, tune.TILES[HOPPER][0], "i32"),
        (256, tune.TILES[HOPPER][0], "i32"),
        (16, tune.TILES[HOPPER][1], "i32"),
        (16, tune.TILES[HOPPER][2], "i32"),
    ],
    ids=lambda v: f"{v.block_m}x{v.block_n}" if isinstance(v, tune.KernelConfig) else str(v),
)
def test_hopper_s_code(rank, config, b, epilogue, tmp_path):
    """FP8 wgmma, issued back to back; bf16 wgmma for LoRA; TMA both ways; nothing spilled; it fits."""
    result = compiled(rank, config, b, epilogue)
    cubin = tmp_path / "kernel.cubin"
    cubin.write_bytes(result.asm["cubin"])
    nvdisasm = Path(triton.__file__).parent / "backends/nvidia/bin/nvdisasm"
    sass = subprocess.run([nvdisasm, "-c", cubin], capture_output=True, text=True, check=True)
    opcodes = re.findall(r"\b(QGMMA|HGMMA|UTMALDG|UTMASTG|STL|LDL)\b", sass.stdout)
    assert {"QGMMA", "UTMALDG", "UTMASTG"} <= set(opcodes)
    assert ("HGMMA" in opcodes) == (rank > 0)
    if rank < 256 or not epilogue:  # there, bias, residual and scales leave a few registers too few
        assert not {"STL", "LDL"} & set(opcodes)
    # gsb0 ends a group of wgmmas: one per step, or ptxas has serialized them (C7515)
    fp8 = re.findall(r"QGMMA.*", sass.stdout)
    assert sum("gsb0" in line for line in fp8) * (config.block_k // 32) <= len(fp8)
    assert result.metadata.shared <= tune.shared_memory(config)
