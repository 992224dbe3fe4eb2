# SPDX-License-Identifier: Apache-2.0
"""y = x Wᵀ + bias + scaling · s Bᵀ + residual: a frozen linear layer with its adapter's second half.

On Hopper csrc/ops/fp8_gemm runs, and on other GPUs with TMA kernels/triton/fp8_linear_lora.py. Both add every term to
the product's fp32 sums in registers and round y once. Terms that are added one by one each read and write all
of y: 4MN bytes in bf16, and a rounding.

What neither kernel takes is multiplied by cuBLASLt: `torch._scaled_mm` with fast accumulation, as in Transformer
Engine's forward. Without FP8 tensor cores both operands are dequantized to y's dtype; sizes that cuBLASLt does not take
are multiplied in fp32. A plain base is one product in x's dtype. The other terms come after these products, so that y
is rounded up to four times.

A base may have a scale for each 128 × 128 block, as DeepSeek-V3's report has it in section 3.3, and x one for each
1 × 128:

    y[m, n] = Σ_b xs[b, m] · ws[⌊n/128⌋, b] · Σ_{k in block b} x8[m, k] w8[n, k]  +  …

xs and ws, fp32, are the scale_inv. They multiply partial sums of 128 products in fp32, so that the tensor cores' short
sums end there. csrc's kernel takes one adapter of any rank, and PyTorch adds the term of several after it. cuBLASLt
takes some sizes, and the rest is dequantized.

Of J adapters in one batch (numerics/segments.py), each has its own M / J rows.

B may hold the B_i of several projections on its diagonal, as ops/block_diagonal.py makes it. `side` then says where
they are, and csrc's kernel skips most products with the zeros next to them. A non-finite s may leave no
trace in the columns of other projections.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from lorakernels.device import capability_of, extension, multiprocessors_of
from lorakernels.kernels import tune
from lorakernels.kernels.arguments import name, where
from lorakernels.numerics.blocks import in_blocks
from lorakernels.numerics.fp8 import E4M3
from lorakernels.numerics.products import dequantized, dequantized_linear, dequantized_weight
from lorakernels.numerics.segments import (
    adapters_of,
    add_rows_times,
    rows_times,
)
from lorakernels.ops import checks
from lorakernels.ops.hardware import (
    BLOCKS,
    FLOATS,
    FP8_GEMM_MULTIPLE,
    NO_BLOCKS,
    PLAIN,
    SEVERAL,
    TMA_CAPABILITY,
    LayerOnGPU,
    gemm_by_cublaslt,
    gemm_by_kernel,
    gemm_in_blocks,
    gemm_without_ours,
    why_not_aligned,
    why_not_batched_gemm,
    why_not_cublaslt,
    why_not_cublaslt_blocks,
    why_not_dequantized,
    why_not_gaps,
    why_not_wgmma_gemm,
)
from lorakernels.ops.register import Implementation, Op, define, empty
from lorakernels.values import ProductSizes, Scaled, SideBySide, Tiles, Up, Weight

MAX_BLOCKS = 4  # on B's diagonal, for csrc
TRITON_SPLIT = "Triton's split accumulation takes 1.5 times as long"


class Linear(NamedTuple):
    """x [M, K] and the weight [N, K] are e4m3, or both plain. bias is [N], residual [M, N], `out_dtype` y's.

    The weight's scale_inv is [1], [N] for a scale of each row, or [⌈N/128⌉, ⌈K/128⌉] with x's [⌈K/128⌉, M]. `up` has s
    [M, R] and lora_B [N, R], or [J, N, R] of J adapters in one batch. `split` asks the FP8 tensor cores to add partial
    sums in fp32; in blocks they always do. `side` says where lora_B has the B_i of several projections on its diagonal.
    """

    x: Scaled
    weight: Weight
    bias: Tensor | None
    up: Up | None
    out_dtype: torch.dtype
    split: bool = False
    residual: Tensor | None = None
    side: SideBySide | None = None


def reference(a: Linear) -> Tensor:
    """y [M, N] in `out_dtype`. Sums are fp32's here, whatever `split` asks for.

    Raises:
        ValueError: a scale_inv, the residual, the bias, lora_B or `side` does not fit.
    """
    check(a)
    acc, up = dequantized(a.x) @ dequantized_weight(a.weight).t(), a.up
    if up is not None and up.s is not None:
        acc += up.scaling * rows_times(up.s.float(), up.lora_B.to(up.s.dtype).float().mT)
    if a.bias is not None:
        acc += a.bias.float()
    if a.residual is not None:
        acc += a.residual.float()
    return acc.to(a.out_dtype)


def fake(a: Linear) -> Tensor:
    return empty(a.x.data, a.x.data.shape[0], a.weight.data.shape[0], dtype=a.out_dtype)


def check(a: Linear) -> None:
    """ValueError unless scales fit, and residual is [M, N], bias [N], and lora_B [N, R] for an s [M, R].

    `side`, if given, must have lora_B's N and R together.
    """
    x, weight = a.x, a.weight
    (rows, depth), cols = x.data.shape, weight.data.shape[0]
    if in_blocks(x) or in_blocks(weight):
        if weight.data.shape[1] != depth:
            raise ValueError(f"weight must be [N, {depth}], found {list(weight.data.shape)}")
        checks.scales_of_blocks("x", x, weight)
    elif weight.scale_inv is not None and weight.scale_inv.shape not in ((1,), (cols,)):
        raise ValueError(
            f"weight_scale_inv must be [1] or [{cols}], found {list(weight.scale_inv.shape)}"
        )
    checks.terms((rows, cols), a.bias, a.up, a.residual, a.side)


def why_not_csrc_kernel(a: Linear) -> str | None:
    """None if csrc's kernel takes these operands; otherwise the reason why not."""
    x, weight, up, out_dtype, residual = a.x, a.weight, a.up, a.out_dtype, a.residual
    if x.scale_inv is None or weight.scale_inv is None:
        return PLAIN
    if in_blocks(weight) and (why_not := _why_not_blocks(a)):
        return why_not
    if why_not := why_not_wgmma_gemm(capability_of(x.data.device), *weight.data.shape):
        return why_not
    if out_dtype not in (torch.bfloat16, torch.float16):
        return f"out_dtype is {out_dtype}, not bfloat16 or float16"
    if x.data.shape[0] == 0 or x.data.shape[1] == 0:
        return f"x is empty, {tuple(x.data.shape)}"
    if why_not := why_not_aligned(x=x.data, weight=weight.data, residual=residual):
        return why_not
    if residual is not None and residual.dtype != out_dtype:
        return f"residual is {residual.dtype}, out_dtype {out_dtype}"
    if up is not None and up.s is not None and up.s.dtype != out_dtype:
        return f"s is {up.s.dtype}, out_dtype {out_dtype}"
    if up is not None and (adapters := adapters_of(up.lora_B)):
        if a.split:
            return "several adapters in one batch are computed without split accumulation"
        if why_not := why_not_batched_gemm(x.data.shape[0], adapters, out_dtype):
            return why_not
    return _why_not_floats(bias=a.bias, **_factors(up))


def _why_not_blocks(a: Linear) -> str | None:
    if a.up is not None and adapters_of(a.up.lora_B):
        return SEVERAL
    return why_not_gaps(x=a.x.scale_inv, weight=a.weight.scale_inv)


def why_not_csrc_base(a: Linear) -> str | None:
    """None if csrc's kernel multiplies these blocks without the adapters; otherwise the reason why not."""
    return why_not_csrc_kernel(_base(a)) if in_blocks(a.weight) else NO_BLOCKS


def _base(a: Linear) -> Linear:
    return a._replace(up=None, side=None)


def why_not_triton_kernel(a: Linear) -> str | None:
    """None if Triton's kernel takes these operands; otherwise the reason why not."""
    x, weight, out_dtype, residual = a.x, a.weight, a.out_dtype, a.residual
    if x.scale_inv is None or weight.scale_inv is None:
        return PLAIN
    if in_blocks(weight):
        return BLOCKS
    capability, rows = capability_of(x.data.device), x.data.shape[0]
    if why_not := _why_not_triton_sizes(capability, rows, *weight.data.shape):
        return why_not
    if why_not := why_not_aligned(x=x.data, weight=weight.data):
        return why_not
    if a.split:
        return TRITON_SPLIT
    if out_dtype not in (torch.bfloat16, torch.float16):
        return f"out_dtype is {out_dtype}, not bfloat16 or float16"
    if why_not := _why_not_triton_factors(a.up):
        return why_not
    if residual is not None and (residual.dtype != out_dtype or residual.data_ptr() % 16):
        return f"residual must be {out_dtype} and 16-byte aligned, found {residual.dtype}"
    return _why_not_floats(bias=a.bias, **_factors(a.up), residual=residual)


def _why_not_triton_sizes(capability: tuple[int, int], rows: int, n: int, k: int) -> str | None:
    if capability < TMA_CAPABILITY:
        return f"compute capability {capability} has no TMA"
    return why_not_cublaslt(capability, rows, n, k) or ("K = 0" if k == 0 else None)


def _why_not_triton_factors(up: Up | None) -> str | None:
    if up is None or up.s is None:
        return None
    if adapters_of(up.lora_B):
        return SEVERAL
    if up.s.dtype not in (torch.bfloat16, torch.float16):
        return f"s is {up.s.dtype}, not bfloat16 or float16"
    if up.s.shape[1] > tune.MAX_RANK:
        return f"rank {up.s.shape[1]} is above {tune.MAX_RANK}"
    if up.scaling and not 2.0**-64 <= abs(up.scaling) <= 2.0**64:
        return f"scaling = {up.scaling}: the accumulator divided by it may leave fp32's range"
    return None


def _why_not_floats(**tensors: Tensor | None) -> str | None:
    for label, tensor in tensors.items():
        if tensor is not None and not tensor.is_contiguous():
            return f"{label} must be contiguous, found strides {tensor.stride()}"
        if tensor is not None and tensor.dtype not in FLOATS:
            return f"{label} is {tensor.dtype}"
    return None


def _factors(up: Up | None) -> dict[str, Tensor | None]:
    return {} if up is None else {"s": up.s, "lora_B": up.lora_B}


def why_not_cublaslt_gemm(a: Linear) -> str | None:
    """None if `torch._scaled_mm` multiplies x and W; otherwise the reason why not."""
    x, weight = a.x, a.weight
    if x.scale_inv is None or weight.scale_inv is None:
        return PLAIN
    capability, rows, (n, k) = capability_of(x.data.device), x.data.shape[0], weight.data.shape
    if in_blocks(weight):
        return why_not_cublaslt_blocks(capability, (rows, n, k), a.out_dtype)
    return why_not_cublaslt(capability, rows, n, k)


def why_not_dequantized_gemm(a: Linear) -> str | None:
    """None if x and W are FP8 and multiplied in `out_dtype`; otherwise the reason why not."""
    if a.x.scale_inv is None or a.weight.scale_inv is None:
        return PLAIN
    if in_blocks(a.weight):
        return None
    return why_not_dequantized(capability_of(a.x.data.device), a.out_dtype)


def by_csrc(a: Linear) -> Tensor:
    """One kernel of csrc, for any rank: wgmma and TMA, one rounding."""
    y = fake(a)
    launch_csrc(y, a)
    return y


def by_csrc_and_torch(a: Linear) -> Tensor:
    """One kernel of csrc, then PyTorch's for the adapters' term, which it adds in fp32."""
    return with_terms(by_csrc(_base(a)), a._replace(bias=None, residual=None))


def launch_csrc(y: Tensor, a: Linear) -> None:
    """Write y [M, N]. `why_not_csrc_kernel` has nothing against the operands."""
    x, weight, bias, up, _, split, residual, side = a
    assert weight.scale_inv is not None
    (rows, cols), depth = y.shape, x.data.shape[1]
    factors = padded_factors(up, y.dtype)
    rank = 0 if up is None or factors is None else up.lora_B.shape[-1]
    adapters = 0 if factors is None else adapters_of(factors.lora_B)
    b_dtype = y.dtype if factors is None else factors.lora_B.dtype
    dtypes = map(name, (y.dtype, b_dtype, y.dtype if bias is None else bias.dtype))
    blocks = in_blocks(weight)
    by_column = not blocks and weight.scale_inv.numel() > 1
    multiprocessors = multiprocessors_of(y.get_device())
    how = "blocks" if blocks else "split" if split else "fast"
    tile = tune.csrc_tile(rows, cols, how, multiprocessors)[0]
    segment_rows = rows // adapters if adapters else 0
    run = extension().fp8_block_linear if blocks else extension().fp8_linear_lora
    run(
        (y, bias, residual),
        x,
        weight,
        factors,
        ProductSizes(rows, cols, depth, rank, segment_rows, _blocks(side)),
        (*dtypes, by_column),
        Tiles(split, *tile, multiprocessors),
        where(y),
    )


def _blocks(side: SideBySide | None) -> list[tuple[int, int]]:
    """(N_i, R_i) as csrc takes them; none of more projections than it takes."""
    if side is None or len(side.rows) > MAX_BLOCKS:
        return []
    return [*zip(side.rows, side.ranks, strict=True)]


def padded_factors(up: Up | None, dtype: torch.dtype) -> Up | None:
    """s and B as csrc reads them, B in `dtype` or fp32; None without a term to add."""
    if up is None or up.s is None or up.lora_B.shape[-1] == 0:
        return None
    lora_B = up.lora_B
    if lora_B.dtype not in (dtype, torch.float32):
        lora_B = lora_B.to(dtype)
    return Up(_padded(lora_B), _padded(up.s), up.scaling)


def _padded(factor: Tensor) -> Tensor:
    """With rows of a multiple of 16 bytes, zeros behind the rank, 16-byte aligned."""
    rank = factor.shape[-1]
    if rank % 8:
        return F.pad(factor, (0, -rank % 8))
    return factor.clone() if factor.data_ptr() % 16 else factor


def by_triton(a: Linear) -> Tensor:
    """One kernel of Triton, for ranks up to `tune.MAX_RANK`, with fast accumulation."""
    from lorakernels.kernels.triton.fp8_linear_lora import launch

    x, up = a.x, a.up
    (m, k), n, device = x.data.shape, a.weight.data.shape[0], x.data.device
    y = x.data.new_empty((m, n), dtype=a.out_dtype)
    rank = 0 if up is None or up.s is None else up.s.shape[1]
    problem = tune.Problem(m, n, k, rank)
    multiprocessors = multiprocessors_of(x.data.get_device())
    config = tune.choose(problem, capability_of(device), multiprocessors)
    programs = tune.programs(config, problem, multiprocessors)
    with torch.cuda.device(device):
        launch(y, x, a.weight, a.bias, up, config, programs, a.residual)
    return y


def by_cublaslt(a: Linear) -> Tensor:
    """`torch._scaled_mm`, then one PyTorch kernel for each other term."""
    x, weight, out_dtype = a.x, a.weight, a.out_dtype
    assert x.scale_inv is not None and weight.scale_inv is not None
    scales, fast, by_column = (x.scale_inv, weight.scale_inv), not a.split, False
    if in_blocks(weight):
        scales, fast = (x.scale_inv.t(), weight.scale_inv.t()), False
    elif by_column := weight.scale_inv.numel() > 1:
        scales = x.scale_inv, torch.ones_like(x.scale_inv)
    y = torch._scaled_mm(
        x.data.view(E4M3),
        weight.data.view(E4M3).t(),
        scale_a=scales[0],
        scale_b=scales[1],
        out_dtype=torch.float32 if by_column else out_dtype,
        use_fast_accum=fast,
    )
    if by_column:
        y = (y * weight.scale_inv).to(out_dtype)
    return with_terms(y, a)


def by_dequantized(a: Linear) -> Tensor:
    """A product in `out_dtype`, then one PyTorch kernel for each other term."""
    return with_terms(dequantized_linear(a.x, a.weight, a.out_dtype), a)


def by_torch(a: Linear) -> Tensor:
    """A product in fp32, or in x's dtype for a plain base, then one PyTorch kernel for each other term."""
    x, weight = a.x, a.weight
    if x.scale_inv is None or weight.scale_inv is None:
        y = x.data @ weight.data.to(x.data.dtype).t()
    else:
        y = reference(Linear(x, weight, None, None, a.out_dtype))
    return with_terms(y, a)


def with_terms(y: Tensor, a: Linear) -> Tensor:
    """y with the other terms added in place, the adapter's in fp32 inside `addmm`."""
    up, dtype = a.up, a.out_dtype
    if a.bias is not None:
        y += a.bias
    if up is not None and up.s is not None:
        add_rows_times(y, up.s.to(dtype), up.lora_B.to(dtype).mT, up.scaling)
    if a.residual is not None:
        y += a.residual
    return y


def chosen(place: LayerOnGPU) -> tuple[str, str]:
    if place.blocks:
        return gemm_in_blocks(place, "one kernel")
    if without_ours := gemm_without_ours(place):
        return without_ours
    n, k = place.sizes or (FP8_GEMM_MULTIPLE,) * 2
    if not why_not_wgmma_gemm(place.capability, n, k):
        return gemm_by_kernel(place, "csrc", "any rank")
    split = TRITON_SPLIT if place.split else None
    if why_not := _why_not_triton_sizes(place.capability, 1, n, k) or split:
        return gemm_by_cublaslt(place, why_not)
    return gemm_by_kernel(place, "triton", f"rank ≤ {tune.MAX_RANK}")


fp8_linear_lora = define(
    Op(
        "fp8_linear_lora",
        Linear,
        reference,
        fake,
        check,
        (
            Implementation("csrc", by_csrc, why_not_csrc_kernel),
            Implementation("csrc, torch", by_csrc_and_torch, why_not_csrc_base),
            Implementation("triton", by_triton, why_not_triton_kernel),
            Implementation("cublaslt", by_cublaslt, why_not_cublaslt_gemm),
            Implementation("dequantized", by_dequantized, why_not_dequantized_gemm),
            Implementation("torch", by_torch),
        ),
        chosen,
    ),
    "(Tensor x, Tensor? x_scale_inv, Tensor weight, Tensor? weight_scale_inv, Tensor? bias, Tensor? s, Tensor? lora_B,"
    " float scaling, ScalarType out_dtype, bool split=False, Tensor? residual=None, SymInt[]? rows=None,"
    " SymInt[]? ranks=None) -> Tensor",
)


def fp8_linear_lora_into(y: Tensor, a: Linear) -> None:
    """`fp8_linear_lora` into y [M, N], which is contiguous. What csrc does not compute is copied there."""
    if not y.is_cuda or why_not_csrc_kernel(a) or why_not_aligned(x=y):
        y.copy_(fp8_linear_lora(*a))
        return
    check(a)
    launch_csrc(y, a)
