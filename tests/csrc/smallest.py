# SPDX-License-Identifier: Apache-2.0
"""Small calls that launch every kernel of csrc between them, in all its branches. `make sanitize` runs each group:

    compute-sanitizer --tool racecheck python -m tests.csrc.smallest products

They are the small cases of the contracts, every tile of every product over the adapter's ranks and forms, and the
forms of the other ops that no small case takes. Operands are made on the CPU and nothing is compared,
so that the tools watch few kernels of PyTorch. Tests elsewhere compare the same calls with float64.
"""

from __future__ import annotations

import itertools
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from typing import Any, NamedTuple
from unittest import mock

import torch
from lorakernels.graphs import CudaBackend
from torch import Tensor
from torch.utils._pytree import tree_map_only

from lorakernels import ops
from lorakernels.autograd.attention.longest_document import check_longest
from lorakernels.device import multiprocessors_of
from lorakernels.kernels import tune
from lorakernels.numerics.dropout import drawn_mask, dropped_bits
from lorakernels.ops.register import Op
from lorakernels.values import Dropout, Weight
from tests.memsets import memset
from tests.ops.cases import CONTRACTS
from tests.ops.cases import grouped_grad_input as group_grads
from tests.ops.cases import grouped_linear_lora as group_linears
from tests.ops.cases.fp8_grad_input import Grad
from tests.ops.cases.fp8_linear_lora import Linear
from tests.ops.cases.lora_grad_a import made as dA_of
from tests.ops.cases.quantize_grad import made as grad_of
from tests.ops.cases.quantize_grad import with_mask
from tests.ops.cases.quantize_lora_down import made as down_of
from tests.ops.contract import BF16, E4M3, E5M2, FP16, Arguments, Made, tensors

MOST = 60_000  # elements of a contract's case that is taken
GROUPS = {
    "products": ("fp8_linear_lora",),
    "gradients": ("fp8_grad_input",),
    "blocks": (),
    "groups": ("grouped_linear_lora", "grouped_grad_input"),
    "quantize_grad": ("quantize_grad",),
    "quantize_lora_down": ("quantize_lora_down",),
    "lora_grad_a": ("lora_grad_a",),
    "others": (
        "amax_and_scale_update",
        "bias_dropout_add",
        "bias_dropout_add_",
        "bias_dropout_add_backward",
        "transpose_fp8",
    ),
}
RANKS = (0, 8, 64, 128)
# Two blocks walk over four tiles, of which three hang over an edge; the ring of stages is filled more than once.
WALKING, DEPTH, MORE_ROWS, MORE_COLS = 2, 656, 77, 80


class Call(NamedTuple):
    """An op, and how its arguments are made of M rows. A product may have its own way and tile, for few blocks."""

    what: str
    op: Op[..., Any, object]
    make: Callable[[Made], Arguments]
    rows: int
    how: str = ""
    tile: tuple[int, int] | None = None


def calls_of(group: str) -> Iterator[Call]:
    for name in GROUPS[group]:
        contract = CONTRACTS[name]
        for what, case in {**contract.cases, **contract.shapes}.items():
            if sum(t.numel() for t in tensors(case.arguments("meta"))) <= MOST:
                yield Call(f"{name}: {what}", contract.op, case.make, case.rows)
    if group in MORE:
        yield from MORE[group]()


def products() -> Iterator[Call]:
    """With bias, residual and column scales, and without; both dtypes."""
    for split, rank in ((split, rank) for split in (True, False) for rank in RANKS):
        form = {"split": split, "by_row": rank == 8, "residual": rank in (8, 128)}
        how = "split" if split else "fast"
        for tile in tune.CSRC_TILES[how]:
            yield _linear(ops.fp8_linear_lora, partial(Linear, **form), how, tile, rank)


def gradients() -> Iterator[Call]:
    for split, rank in ((split, rank) for split in (True, False) for rank in RANKS):
        how, form = "turned" if split else "turned fast", partial(Grad, split=split)
        for tile in tune.CSRC_TILES[how]:
            yield from _gradients(ops.fp8_grad_input, form, how, tile, rank)


def blocks() -> Iterator[Call]:
    for rank in RANKS:
        form, grad = partial(Linear, residual=rank in (8, 128)), partial(Grad, in_blocks=True)
        for tile in tune.CSRC_TILES["blocks"]:
            yield _linear(ops.fp8_linear_lora, partial(form, in_blocks=True), "blocks", tile, rank)
            yield from _gradients(ops.fp8_grad_input, grad, "blocks", tile, rank)


def _linear(op: Op[..., Any, Any], form: Any, how: str, tile: tuple[int, int], rank: int) -> Call:
    half = {"out": FP16, "b": FP16, "bias": None} if rank == 64 else {}
    make = form(tile[1] + MORE_COLS, DEPTH, rank, **half)
    return Call(f"{how} {tile} r{rank}", op, make, tile[0] + MORE_ROWS, how, tile)


def _gradients(
    op: Op[..., Any, Any], form: Any, how: str, tile: tuple[int, int], rank: int
) -> Iterator[Call]:
    """The mask drawn, given and none."""
    for mask in ("none", "drawn", "given")[: 3 if rank else 1]:
        half = {"dtype": FP16, "a": FP16} if rank == 64 and mask != "given" else {}
        fp8, p = (E4M3, 0.0) if mask == "none" else (E5M2, 0.3)
        make = form(tile[1] + MORE_COLS, DEPTH, rank, p=p, fp8=fp8, **half)
        make = partial(_with_bits, make) if mask == "given" else make
        what = f"{how} {tile} r{rank}, mask {mask}"
        yield Call(what, op, make, tile[0] + MORE_ROWS, how, tile)


def _with_bits(make: Callable[[Made], Arguments], made: Made) -> Arguments:
    arguments = make(made)
    (mask,) = (each for each in arguments if isinstance(each, Dropout))
    masked = next((each for each in arguments if isinstance(each, Weight)), arguments[1])  # or x
    bits = dropped_bits(drawn_mask(mask, made.rows, masked.data.shape[1]))
    return tuple(mask._replace(dropped=bits) if each is mask else each for each in arguments)


def groups() -> Iterator[Call]:
    """Of a mixture's experts, and of adapters that share a weight; in 128 × 256 tiles, too."""
    grouped, several = ops.grouped_linear_lora, ops.fp8_linear_lora
    for rank in RANKS:
        yield Call(f"wide r{rank}", grouped, group_linears.Linear(640, DEPTH, rank), 384, "experts")
        make = group_grads.Grad(208, 640, rank, split=rank != 64)
        yield Call(f"gradient r{rank}", ops.grouped_grad_input, make, 384, "experts")
        for tile in [t for t in tune.CSRC_TILES["fast"] if t[0] > tune.LOW] if rank else ():
            adapters = Linear(tile[1] + MORE_COLS, DEPTH, rank, residual=rank == 8, adapters=2)
            yield Call(f"adapters r{rank}, {tile}", several, adapters, 512, "fast", tile)
        if rank:
            of_several = Grad(208, 640, rank, p=0.0, split=rank != 64, adapters=2)
            yield Call(f"adapters' gradient r{rank}", ops.fp8_grad_input, of_several, 512)


def strips() -> Iterator[Call]:
    """Strips of one tile, and of four, of which the last hangs over; those need a panel for each multiprocessor.

    Rows of dy8 begin at multiples of 8 bytes, and of 16, which blocks with scales need. Without a scale the second
    kernel makes dy8.
    """
    sizes = (205, 392), (128 * multiprocessors_of(0) - 5, 392), (128 * multiprocessors_of(0), 400)
    for rank, (rows, cols) in itertools.product((*RANKS, 32), sizes):
        make = partial(grad_of, cols, rank)
        yield Call(f"{rows} × {cols}, r{rank}", ops.quantize_grad, make, rows)
        unset = partial(make, kind="unset")
        yield Call(f"{rows} × {cols}, r{rank}, no scale", ops.quantize_grad, unset, rows)
        if 0 < rank <= 64:
            drawing = partial(with_mask, make, 264)
            yield Call(f"{rows} × {cols}, r{rank}, mask", ops.quantize_grad, drawing, rows)
        if cols == 400:
            blocks = partial(grad_of, cols, rank, power=rank > 16)
            yield Call(f"{rows} × {cols}, r{rank}, blocks", ops.quantize_grad, blocks, rows)


def downs() -> Iterator[Call]:
    """Columns that TMA takes and that it does not, with slices that end inside of a step; rank 32 in panels.

    Sums of up to seven slices are added at once, of nine in two turns.
    """
    op = ops.quantize_lora_down
    for rank, p, cols in itertools.product((*RANKS, 32), (0.0, 0.3), (1096, 1104)):
        if rank or not p:
            make = partial(down_of, cols, rank, p, "kept", BF16)
            yield Call(f"{cols} columns, r{rank}, p {p}", op, make, 205)
        if cols % 16 == 0 and rank <= 16 and (rank or not p):
            blocks = partial(down_of, cols, rank, p, "none", BF16, power=p > 0)
            yield Call(f"{cols} columns, r{rank}, p {p}, blocks", op, blocks, 205)
    for p in (0.0, 0.3):
        yield Call(f"panels r32, p {p}", op, partial(down_of, 1104, 32, p, "kept", FP16), 7700)
    for rank, cols in ((16, 9 * 1024 + 16), (32, 9 * 512 + 16), (64, 9 * 256 + 16)):
        yield Call(f"nine slices r{rank}", op, partial(down_of, cols, rank, 0.3, "kept", BF16), 37)


def grads_of_a() -> Iterator[Call]:
    """x in 16 bits, in FP8 and in FP8 blocks; the mask drawn, given and none.

    At rank 64 two slices of the rows are a cluster, and one slice is a block. A kernel adds up four and ten.
    """
    forms = {"x": (False, False), "x8": (True, False), "x8 in blocks": (True, True)}
    for (what, (fp8, in_blocks)), rank in itertools.product(forms.items(), (*RANKS[1:], 32)):
        for mask in ("none", "drawn", "given"):
            p = 0.0 if mask == "none" else 0.3
            make: Any = partial(dA_of, 400, rank, fp8, p, BF16, BF16, blocks=in_blocks)
            make = partial(_with_bits, make) if mask == "given" else make
            yield Call(f"{what} r{rank}, mask {mask}", ops.lora_grad_a, make, 205)
        make = partial(dA_of, 400, rank, fp8, 0.3, BF16, BF16, blocks=in_blocks)
        for slices in (1, 2, 10):
            yield Call(f"{what} r{rank}, slices {slices}", ops.lora_grad_a, make, 64 * slices - 7)


MORE: dict[str, Callable[[], Iterator[Call]]] = {
    "products": products,
    "gradients": gradients,
    "blocks": blocks,
    "groups": groups,
    "lora_grad_a": grads_of_a,
    "quantize_grad": strips,
    "quantize_lora_down": downs,
}


def placed(tensor: Tensor, device: str) -> Tensor:
    """On `device`, with the same strides and alignment."""
    memory = torch.empty(0, dtype=tensor.dtype, device=device)
    storage = tensor.untyped_storage()
    if device != "cpu":
        storage = storage.cuda()
    place = (tensor.storage_offset(), tensor.size(), tensor.stride())
    return memory.set_(storage, *place)  # type: ignore[call-overload]


def run(call: Call, device: str = "cuda") -> str:
    """Launch it; the name of the implementation, "" where that is not csrc's alone and nothing ran."""
    torch.default_generator.manual_seed(0)  # a GPU's may be a stand-in's
    made = call.make(Made("cpu", call.rows))
    arguments = tree_map_only(Tensor, partial(placed, device=device), made)
    with ExitStack() as stack:
        for owner, name, value in forced(call):
            stack.enter_context(mock.patch.object(owner, name, value))
        taken = call.op.takes(*arguments)
        if taken.name not in ("csrc", "csrc, mask apart"):
            return ""
        taken.run(call.op.arguments(*arguments))
    return taken.name


def forced(call: Call) -> Iterator[tuple[Any, str, Callable[..., object]]]:
    """What stands for a product's choices: (module, name, value)."""
    if call.how:
        for name in (
            "fp8_linear_lora",
            "fp8_grad_input",
            "grouped_linear_lora",
            "grouped_grad_input",
        ):
            yield sys.modules[f"lorakernels.ops.{name}"], "multiprocessors_of", lambda _: WALKING
    if call.tile is None:
        return
    yield tune, "csrc_tile", lambda *_: (call.tile, 1.0)


def launch(group: str) -> int:
    """Its calls one by one, and how many. Any error of a kernel is raised where it is waited for."""
    ran = 0
    for call in calls_of(group):
        ran += bool(run(call))
        torch.cuda.synchronize()
    if group == "others":  # what no op launches
        drawn_mask(Made("cuda", 1).dropout(), 13, 27)
        check_longest(torch.arange(0, 2709, 9, dtype=torch.int32).cuda(), 9)  # 300 documents
        torch.cuda.synchronize()
        replay_memsets()
    return ran


def replay_memsets() -> None:
    """What stands in graphs for memsets: of a few bytes, and of several blocks that begin and end anywhere."""
    backend, x = CudaBackend(torch.device("cuda")), torch.empty(20_000, dtype=torch.uint8).cuda()
    with backend.session(), backend.capture() as captured:
        memset(x.data_ptr() + 19_999, 1, 1, 1)
        memset(x.data_ptr() + 2, 2, 2, 3)
        memset(x.data_ptr() + 12, 4, 3, 4900)
    captured.graph.launch(backend.stream())
    torch.cuda.synchronize()
    captured.graph.destroy()
    backend.release()


def main() -> int:
    [group] = sys.argv[1:]
    began = time.monotonic()
    ran = launch(group)
    print(f"{group}: {ran} calls, {time.monotonic() - began:.0f} s", flush=True)
    return 0 if ran else 1


if __name__ == "__main__":
    sys.exit(main())
