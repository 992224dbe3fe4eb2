# SPDX-License-Identifier: Apache-2.0
"""The sm_90 code of Triton's kernels between a layer's GEMMs; needs no GPU.

Each starts early (by_triton.sm90) and spills nothing. It loads and stores 16 bytes at a time, converts to FP8 by
instructions, two numbers each, and reduces to the amax once.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import triton.language as tl

from lorakernels.kernels import tune_layer as tune
from lorakernels.kernels.triton import block_diagonal, cross_entropy, rms_norm, rope_qkv, swiglu
from lorakernels.kernels.triton.quantize import quantized
from lorakernels.numerics.gate_up import PACKED_COLUMNS
from lorakernels.ops import Scaling
from lorakernels.ops import cross_entropy as losses
from tests.kernels.by_triton import sm90, sm90_code, spills
from tests.ops.contract import E4M3, E5M2

LOAD, STORE = "LDG.E.128", "STG.E.128"
TO_E4M3, TO_E5M2 = (f"F2FP.SATFINITE.{fp8}.F32.PACK_AB_MERGE_C" for fp8 in ("E4M3", "E5M2"))
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION")]


class Code(NamedTuple):
    """A kernel, what it is compiled with, and how many numbers a program moves or converts with an instruction."""

    kernel: Any
    types: dict[str, str]
    constants: dict[str, object]
    warps: int
    at_least: dict[str, int] | None = None
    exactly: dict[str, int] | None = None


def typed(**kinds: str) -> dict[str, str]:
    """{parameter: its type} of "name name …" by type; "p_" before a type makes it a pointer."""
    return {n: k.replace("p_", "*") for k, names in kinds.items() for n in names.split()}


def target(fp8: torch.dtype) -> dict[str, object]:
    scaling = Scaling(torch.ones(2, 2), 0, True)
    return {**quantized((1, 1), torch.empty(0), scaling, fp8).constants, "NATIVE": True}


def blocks(fp8: torch.dtype) -> dict[str, object]:
    constants = quantized((1, 1), torch.empty(0), None, fp8, False).constants
    return {**constants, "NATIVE": True}


def norm(k: int, keep: bool, measure: bool, in_blocks: bool = False) -> Code:
    config = tune.norm_config(k)
    types = typed(
        p_bf16="normed x weight", p_u8="x8", p_i32="partials", p_fp32="scale_inv rstd state", fp32="eps",
        i32="M K amax_at kept_at measured",
    )  # fmt: skip
    constants = {
        **(blocks(E4M3) if in_blocks else target(E4M3)),
        "MEASURE": measure,
        "KEEP": keep,
        "BLOCK": k,
        "PREFETCH": config.prefetch,
    }
    return Code(rms_norm._rms_norm_quantize_kernel, types, constants, config.num_warps)


def norm_backward(k: int) -> Code:
    config = tune.norm_backward_config(k)
    types = typed(p_bf16="dx dnormed x weight dresidual", p_fp32="rstd", i32="M K")
    constants = {"HAS_RESIDUAL": True, "BLOCK": k, "PREFETCH": config.prefetch}
    kernel = rms_norm._rms_norm_backward_kernel
    return Code(kernel, types, constants, config.num_warps, at_least={LOAD: 4 * k})


def rope(half: int) -> Code:
    config = tune.rope_config(half, 64)
    constants = {"TURNED": 72, "HALF": half, "BLOCK": half, "HEADS": config.heads}
    types = typed(p_bf16="qkv cos sin", i32="stride T")
    stored = {STORE: config.heads * 2 * half}
    return Code(rope_qkv._rope_kernel, types, constants, config.num_warps, exactly=stored)


def rope_backward(dim: int) -> Code:
    half = dim // 2
    config = tune.rope_backward_config(half, 64)
    types = typed(
        p_bf16="dqkv dq dk dv cos sin", p_u8="d8", p_fp32="multiplier scale_inv",
        i32="M T T_angles q_batch q_head q_token k_batch k_head k_token v_batch v_head v_token",
    )  # fmt: skip
    made = blocks(E4M3)
    constants = {
        name: made[name] for name in ("IN_BLOCKS", "POWER_OF_TWO", "E5M2", "FP8_MAX", "NATIVE")
    }
    constants |= {"Q_HEADS": 64, "KV_HEADS": 8, "HALF": half, "BLOCK": half, "HEADS": config.heads}
    return Code(rope_qkv._rope_backward_kernel, types, constants, config.num_warps)


def activation(
    grad: bool,
    as_bytes: bool,
    config: tune.TileConfig,
    pack: bool = False,
    in_blocks: bool = False,
) -> Code:
    constants = {
        **(blocks if in_blocks else target)(E5M2 if grad else E4M3),
        "GRAD": grad,
        "BYTES": as_bytes,
        "MEASURE": False,
    }
    constants |= {"PACK": pack, "KEEP": True, "DTYPE": tl.bfloat16, "BLOCK": config.block}
    constants["PARTS"] = tune.parts_of_blocks(config, 16 if as_bytes else 8) if in_blocks else 1
    types = typed(
        p_bf16="out dact", p_u8="out8 packed", p_i32="partials",
        p_fp32="scale_inv state gate_up_scale_inv multiplier packed_scale_inv", i32="M F amax_at kept_at measured",
    )  # fmt: skip
    types["gate_up"] = "*u8" if as_bytes else "*bf16"
    loaded = {} if as_bytes or grad else {LOAD: 2 * config.block}
    kernel, constants = swiglu._swiglu_kernel, {**constants, "PACKED": PACKED_COLUMNS}
    return Code(kernel, types, constants, config.num_warps, exactly=loaded)


def stacked(split: bool, compact: bool, adapters: int = 1, columns: int = 64) -> Code:
    types = typed(p_fp32="out out2 b0 b1 b2 b3 factors", i32="n1 n2 n3 n4 r1 r2 r3 r4 compact_rank")
    constants = {
        "COUNT": 3,
        "COLUMNS": columns,
        "TILE": block_diagonal.tile_of(adapters, columns),
        "SPLIT": split,
        "COMPACT": compact,
    }
    return Code(block_diagonal._block_diagonal_kernel, types, constants, 4)


def compiled(code: Code, folder: Path) -> Counter[str]:
    found = sm90(code.kernel, code.types, code.constants, code.warps, folder)
    assert not spills(found)
    numbers = 8 * 32 * code.warps  # of 16 bits, in 16 bytes a thread
    assert all(found[name] * numbers >= count for name, count in (code.at_least or {}).items())
    assert all(found[name] * numbers == count for name, count in (code.exactly or {}).items())
    return found


def count(found: Counter[str], *prefixes: str) -> int:
    return sum(n for name, n in found.items() if name.startswith(prefixes))


CODES = {
    **{f"rms_norm_backward {k}": norm_backward(k) for k in (2048, 4096, 8192, 16384)},
    **{f"rope {half}": rope(half) for half in (32, 64, 128)},
    **{f"block_diagonal split {s} compact {c}": stacked(s, c) for s in (False, True) for c in (False, True)},
    **{f"block_diagonal of {k}, split {s}": stacked(s, False, 8, k) for s in (False, True) for k in (32, 64, 128, 256)},
}  # fmt: skip


@pytest.mark.parametrize("what", CODES)
def test_it_moves_16_bytes_and_spills_nothing(what: str, tmp_path: Path) -> None:
    compiled(CODES[what], tmp_path)


@pytest.mark.parametrize("k", [2048, 4096, 8192, 16384])
@pytest.mark.parametrize("keep", [True, False])
def test_the_norm(k: int, keep: bool, tmp_path: Path) -> None:
    """x's loads and the weight's; no detour over shared memory."""
    code = norm(k, keep, False)
    found = compiled(code._replace(at_least={LOAD: 2 * k}), tmp_path)
    assert found[TO_E4M3] * 2 * 32 * code.warps == k
    assert count(found, "REDG") == 1 and not count(found, "STS.128", "STS.64")


def test_a_norm_that_measures_stores_one_number_a_program(tmp_path: Path) -> None:
    assert count(compiled(norm(2048, False, True), tmp_path), "STG", "REDG") == 1


@pytest.mark.parametrize("as_bytes", [False, True], ids=["plain", "e4m3"])
def test_swiglu(as_bytes: bool, tmp_path: Path) -> None:
    config = tune.SWIGLU_OF_BYTES if as_bytes else tune.SWIGLU
    found = compiled(activation(False, as_bytes, config), tmp_path)
    assert found[TO_E4M3] * 2 * 32 * config.num_warps == config.block and count(found, "REDG") == 1
    assert not count(found, "F2F."), "rounded to bf16 one by one"


def test_swiglu_that_packs(tmp_path: Path) -> None:
    """gate_up is read once; a warp finds an amax by itself."""
    config = tune.SWIGLU_PACK
    found = compiled(activation(False, False, config, pack=True), tmp_path)
    assert count(found, "STS", "LDS") <= 6, "only the scales and the amax of all"
    assert found[TO_E4M3] * 2 * 32 * config.num_warps == 3 * config.block


@pytest.mark.parametrize("as_bytes", [False, True], ids=["plain", "e4m3"])
@pytest.mark.parametrize("config", [tune.SWIGLU_GRAD, tune.SWIGLU_GRAD_KEPT], ids=["d8", "kept"])
def test_swiglu_s_gradient(as_bytes: bool, config: tune.TileConfig, tmp_path: Path) -> None:
    found = compiled(activation(True, as_bytes, config), tmp_path)
    assert found[TO_E5M2] * 2 * 32 * config.num_warps == 2 * config.block
    assert count(found, "REDG") == 1


@pytest.mark.parametrize("k", [2048, 4096, 8192, 16384])
def test_a_norm_in_blocks(k: int, tmp_path: Path) -> None:
    """A warp finds the amax of its blocks by itself: shared memory is for the row's sum and the scales alone."""
    code = norm(k, True, False, in_blocks=True)
    found = compiled(code._replace(at_least={LOAD: 2 * k}), tmp_path)
    assert found[TO_E4M3] * 2 * 32 * code.warps == k
    assert not count(found, "REDG") and count(found, "STS.128") <= 1 and count(found, "BAR") <= 5


@pytest.mark.parametrize("as_bytes", [False, True], ids=["plain", "e4m3"])
@pytest.mark.parametrize("grad", [False, True], ids=["act", "gradient"])
def test_swiglu_in_blocks(as_bytes: bool, grad: bool, tmp_path: Path) -> None:
    """A warp finds its blocks' amaxes by itself, and a thread one scale and its inverse of each of its tensors."""
    config = tune.swiglu_grad_config(True, True) if grad else tune.swiglu_config(as_bytes, True)
    found = compiled(activation(grad, as_bytes, config, in_blocks=True), tmp_path)
    assert (
        found[TO_E5M2 if grad else TO_E4M3] * 2 * 32 * config.num_warps == (1 + grad) * config.block
    )
    assert not count(found, "REDG", "BAR", "STS", "LDS"), "exchanged over shared memory"
    assert count(found, "FCHK") == 2 * (1 + grad), "quotients"


@pytest.mark.parametrize("dim", [64, 128, 256])
def test_rope_s_gradient_in_blocks(dim: int, tmp_path: Path) -> None:
    code = rope_backward(dim)
    found = Counter(sm90_code(code.kernel, code.types, code.constants, code.warps, tmp_path))
    assert not spills(found) and found[TO_E4M3]
    assert not count(found, "F2F."), "rounded to bf16 one by one"


def test_rope_s_gradient_of_a_head_of_two_numbers(tmp_path: Path) -> None:
    """A program has one of each half: Triton refuses an instruction that converts two."""
    code = rope_backward(2)
    heads = {"Q_HEADS": 1, "KV_HEADS": 1, "HEADS": 1, "IN_BLOCKS": False}
    code = code._replace(constants={**code.constants, **heads}, warps=1)
    assert sm90_code(code.kernel, code.types, code.constants, code.warps, tmp_path)


@pytest.mark.parametrize("gradient", ["none", "bf16", "e5m2"])
def test_cross_entropy(gradient: str, tmp_path: Path) -> None:
    """Rows whose length is a multiple of 8: what a vocabulary padded for tensor cores has."""
    e5m2 = gradient == "e5m2"
    constants = {"GRADIENT": gradient != "none", "HAS_FACTOR": not e5m2, "E5M2": e5m2}
    constants |= {"NATIVE": True, "BLOCK": losses.BLOCK}
    types = typed(p_fp32="losses factor", p_bf16="logits", p_i64="labels", i32="ignore_index V")
    types |= typed(**{"p_u8" if e5m2 else "p_bf16": "gradient"})
    kernel = cross_entropy._cross_entropy_kernel
    found = Counter(sm90_code(kernel, types, constants, losses.WARPS, tmp_path))
    assert not spills(found) and found[LOAD] and bool(found[STORE]) == (gradient != "none")
    assert bool(found[TO_E5M2]) == e5m2
