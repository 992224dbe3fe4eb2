# SPDX-License-Identifier: Apache-2.0
# Of a tensor its address is taken, and values are taken by position (csrc/bindings/values.h). Sizes count elements.
from collections.abc import Callable, Sequence
from typing import Any, Literal

from lorakernels.values import (
    Address,
    Dropout,
    GroupedWeight,
    ProductSizes,
    RankSizes,
    Scale,
    Scaled,
    Sizes,
    Tiles,
    Up,
    Weight,
    Where,
)

# How many int32 elements `partials` of quantize_grad has; they need not be initialized (csrc/ops/amax/params.h).
AMAX_PARTIALS: int

class _QuantizeLoraDownLimits:
    rank: int  # the highest
    cols_multiple: int  # of K, and of first_col

class _QuantizeGradLimits:
    rank: int
    drawn_rank: int  # the highest with `dropped`
    cols_multiple: int  # of N, and of first_col
    block_cols_multiple: int  # of N, where blocks have scales
    projections: int  # the most side by side
    projection_multiple: int  # of the columns of each projection but the last

class _LoraGradALimits:
    rank: int
    cols_multiple: int  # of K, and of first_col
    fp8_cols_multiple: int  # of K, where x is FP8

class _Fp8GemmLimits:
    cols_multiple: int  # of the output's columns, of stride and of first_col
    untransposed_cols_multiple: (
        int  # of the output's columns, where fp8_grad_input takes the weight untransposed
    )
    depth_multiple: int
    group_rows: int  # at whose multiples a group begins

class _Limits:
    quantize_lora_down: _QuantizeLoraDownLimits
    quantize_grad: _QuantizeGradLimits
    lora_grad_a: _LoraGradALimits
    fp8_gemm: _Fp8GemmLimits

limits: _Limits  # what the kernels take; also in a build without CUDA

def build_info() -> dict[str, Any]: ...
def cuda_runtime_info() -> dict[str, Any]: ...
def philox4x32_10(counter: Sequence[int], key: Sequence[int]) -> list[int]: ...
def dropout_threshold(p: float) -> int: ...
def dropout_survivor_scale(threshold: int) -> float: ...
def dropout_keep(row: int, col: int, seed: int, offset: int, site: int, threshold: int) -> bool: ...
def dropout_mask_host(out: Address, sizes: Sizes, dropout: Dropout) -> None: ...
def torch_slots_host(out: int, count: int, seed: int, offset: int) -> None: ...
def dropped_bits(dropped: Address, sizes: Sizes, dropout: Dropout, where: Where) -> None: ...
def dropout_mask(out: Address, sizes: Sizes, dropout: Dropout, where: Where) -> None: ...
def bias_grad_chunks(rows: int, cols: int, multiprocessors: int, first_col: int = 0) -> int: ...

# dtypes: of x, residual and out, and of the bias; out may be x or residual
def bias_dropout_add(
    out: Address,
    x: Address,
    bias: Address,
    residual: Address,
    sizes: Sizes,
    dtypes: tuple[str, str],
    dropout: Dropout | None,
    where: Where,
) -> None: ...

# dtypes: of dout and dx, and of dbias; partial: fp32 [bias_grad_chunks, cols] where there is a dbias
def bias_dropout_add_backward(
    dx: Address,
    dbias: Address,
    partial: Address,
    dout: Address,
    sizes: Sizes,
    dtypes: tuple[str, str],
    dropout: Dropout | None,
    where: Where,
) -> None: ...
def quantize_lora_down_workspace(rows: int, cols: int, rank: int, device: int) -> int: ...

# projections: (columns, rank or 0) of each that stands side by side in dy; none: one of all columns
def quantize_grad_workspace(
    rows: int,
    cols: int,
    rank: int,
    has_dB: bool,
    multiprocessors: int,
    projections: Sequence[tuple[int, int]] = (),
) -> int: ...

# out: dy8, scale_inv, ds, dB, workspace. sizes: rows, cols, rank and the projections. types: of dy, s and ds; of B and
# dB; of dy8; dy8's largest value; and whether blocks' scales are powers of two, None without such scales. mask: drawn
# into dropout.dropped, with that many columns
def quantize_grad(
    out: tuple[Address, Address, Address, Address, Address],
    dy: Address,
    up: Up | None,
    scale: Scale,
    sizes: tuple[int, int, int, Sequence[tuple[int, int]]],
    types: tuple[str, str, Literal["e4m3fn", "e5m2"], float, bool | None],
    mask: tuple[Dropout, int] | None,
    where: Where,
) -> None: ...

# Whether its kernel for these sizes takes power_of_two
def quantize_lora_down_finds_blocks(rows: int, cols: int, rank: int, device: int) -> bool: ...

# out: x8, scale_inv, s, workspace. types: dtypes of x and s, and of A; and whether blocks' scales are powers of two,
# None without such scales
def quantize_lora_down(
    out: tuple[Address, Address, Address, Address],
    x: Address,
    lora_A: Address,
    scale: Scale,
    sizes: RankSizes,
    types: tuple[str, str, bool | None],
    dropout: Dropout | None,
    where: Where,
) -> None: ...

# out: y, bias, residual. types: of y, residual and s; of B; of the bias; and whether each row of the weight has a scale
# of its own. Rows of s and B are as long as the rank, rounded up to a multiple of 8.
def fp8_linear_lora(
    out: tuple[Address, Address, Address],
    x: Scaled,
    weight: Weight,
    up: Up | None,
    sizes: ProductSizes,
    types: tuple[str, str, str, bool],
    tiles: Tiles,
    where: Where,
) -> None: ...

# out: dx, ds and A. types: of dx and ds; of A; of dy. Rows of ds are as long as the rank, rounded up to a multiple of
# 8. The weight is multiplied as it lies.
def fp8_grad_input(
    out: tuple[Address, Address, Address],
    dy: Scaled,
    weight: Weight,
    dropout: Dropout | None,
    sizes: ProductSizes,
    types: tuple[str, str, Literal["e4m3fn", "e5m2"]],
    tiles: Tiles,
    where: Where,
) -> None: ...

# The same, with scale_inv [⌈K/128⌉, M] of x and dy, and a weight's of 128 × 128; by_column False.
def fp8_block_linear(
    out: tuple[Address, Address, Address],
    x: Scaled,
    weight: Weight,
    up: Up | None,
    sizes: ProductSizes,
    types: tuple[str, str, str, bool],
    tiles: Tiles,
    where: Where,
) -> None: ...

# The same as fp8_grad_input, with weight.data transposed, [K, N], and scale_inv as fp8_block_linear has them.
def fp8_block_grad_input(
    out: tuple[Address, Address, Address],
    dy: Scaled,
    weight: Weight,
    dropout: Dropout | None,
    sizes: ProductSizes,
    types: tuple[str, str, Literal["e4m3fn", "e5m2"]],
    tiles: Tiles,
    where: Where,
) -> None: ...

# types: of y and s, and of B. Matrices of groups lie one after the other, and so do x's scale_inv.
def grouped_linear_lora(
    y: Address,
    x: Scaled,
    weight: GroupedWeight,
    up: Up | None,
    sizes: ProductSizes,
    types: tuple[str, str],
    tiles: Tiles,
    where: Where,
) -> None: ...

# as fp8_grad_input; the weights are multiplied as they lie
def grouped_grad_input(
    out: tuple[Address, Address, Address],
    dy: Scaled,
    weight: GroupedWeight,
    sizes: ProductSizes,
    types: tuple[str, str, Literal["e4m3fn", "e5m2"]],
    tiles: Tiles,
    where: Where,
) -> None: ...
def lora_grad_a_partial(rows: int, cols: int, rank: int, multiprocessors: int) -> int: ...

# out: dA, and fp32 scratch of lora_grad_a_partial elements. ds: its address, and elements from row to row. dtypes: of
# ds (and of x without a scale_inv), and of dA. x: its bytes, scale_inv, and whether that has one for each 1 × 128
def lora_grad_a(
    out: tuple[Address, Address],
    ds: tuple[Address, int],
    x: tuple[Address, Address, bool],
    sizes: RankSizes,
    dtypes: tuple[str, str],
    dropout: Dropout | None,
    where: Where,
) -> None: ...

# A device assertion; starts: int32 [documents + 1].
def check_longest_document(starts: Address, documents: int, longest: int, where: Where) -> None: ...
def transpose_fp8(out: Address, in_: Address, sizes: Sizes, where: Where) -> None: ...
def fp8_encode(src: int, out: int, n: int, format: Literal["e4m3fn", "e5m2"]) -> None: ...
def fp8_decode(src: int, out: int, n: int, format: Literal["e4m3fn", "e5m2"]) -> None: ...

# states: forward, backward, current, n, history_len; recipe: the largest values forward and backward, margin, algorithm
def amax_and_scale_update_host(
    states: tuple[Address, Address, Address, int, int],
    recipe: tuple[float, float, int, Literal["max", "most_recent"]],
    gated: bool,
) -> None: ...
def amax_and_scale_update(
    states: tuple[Address, Address, Address, int, int],
    recipe: tuple[float, float, int, Literal["max", "most_recent"]],
    gated: bool,
    where: Where,
) -> None: ...

class LaunchList:
    """Launches that are recorded once and run many times, with other addresses each time (csrc/host/launch_list.h).

    While a thread records, what it gives the functions here that launch is checked as ever, and appended instead of
    launched. An address is symbolic meanwhile, `(index + 1) << 48 | offset` with an index below 65535, or 0 for a
    tensor that is not there. A site is an index below 64. The streams and devices given meanwhile do not count.
    """

    def __init__(self) -> None: ...
    def begin(self) -> None:
        """Lets this thread record into the list. RuntimeError: it records already, or the list was recorded before."""

    def end(self) -> None:
        """Stops recording; to be called after an error, too. RuntimeError: this thread does not record into it."""

    def place(self, places: Sequence[tuple[int, int]], aligned: Sequence[bool]) -> None:
        """Says where memory is, once, after `end`.

        places: for each recorded index its base and its offset there in bytes. Its address in a run is
        `addresses[base] + offset`, to which what was recorded beside the index is added.
        aligned: for each of at most 64 bases, whether `run` refuses an address that is no multiple of 16. Alignment was
        checked while recording, by offsets alone: give offsets that keep it.
        """

    def run(
        self, addresses: tuple[Any, ...], sites: tuple[int, ...], stream: int, device: int, /
    ) -> bool:
        """Launches all in order, on `device` (-1: the current one).

        False: an address of an aligned base is no multiple of 16, and nothing was launched.
        addresses: one for each base, as a number or as a tensor, which is asked for its `data_ptr()`. ValueError: too
        few or too many, or 0 for a base that a launch uses. TypeError: something else is among them.
        sites: the dropout streams, below 2^32. ValueError: fewer than were recorded.
        """

    def calls(
        self, addresses: tuple[int, ...], sites: tuple[int, ...]
    ) -> list[tuple[str, list[int]]]:
        """What `run` would launch: the op's name, its addresses and then its sites. Alignment does not count."""

    def __len__(self) -> int: ...

def record_kernel(
    function: int,
    grid: tuple[int, int, int],
    threads: int,
    shared_bytes: int,
    early: bool,
    parameters: Sequence[tuple[str, int | float]],
) -> None:
    """Appends the launch of a CUfunction to the list that this thread records into; an empty grid appends nothing.

    shared_bytes: dynamic; the function may take them already. early: programmatic stream serialization.
    parameters: all that the function takes, at most 64: ("*", symbolic address), or a number behind Triton's name of
    its type: i8 to i64, u8 to u64, fp32 or fp64. ValueError: another type, or a number that it cannot hold.
    RuntimeError: this thread records into no list.
    """

class Graph:
    """A captured CUDA graph, and its executable form once instantiated (csrc/graphs/graph.h)."""

    def replace_memsets(
        self, most_bytes: int
    ) -> int: ...  # by kernels that write the same; how many
    def instantiate(self) -> None: ...
    def upload(self, stream: int) -> None: ...
    def launch(self, stream: int) -> None: ...
    def launcher(self) -> Callable[[int], None]: ...  # the same, faster to call
    def update(self, other: Graph) -> str: ...  # why not; empty on success
    def census(self) -> list[tuple[str, str, int]]: ...  # type, kernel name or direction, count
    def programmatic_edges(self) -> int: ...
    def write_dot(self, path: str) -> None: ...
    def destroy(self) -> None: ...

def graph_begin_capture(stream: int, mode: Literal["thread_local", "relaxed"]) -> None: ...
def graph_end_capture(stream: int) -> Graph: ...
def graph_abort_capture(stream: int) -> bool: ...

class Watch:
    """What a replay relies on in Python, compared before each launch (csrc/graphs/watch.cpp)."""

    def add_dict(self, dict: dict[str, Any], keys: Sequence[str] | None = None) -> None: ...
    def add_address(self, data_ptr: Any, expected: int) -> None: ...
    def add_attribute(self, owner: object, name: str, expected: object) -> None: ...
    def check(self) -> int: ...  # -1, or the number of what changed

def flatten(value: Any, tensor_type: type) -> tuple[list[Any], list[Any]]: ...
def matcher(
    spec: list[Any],
    tensor_type: type,
    given: list[tuple[int, Any]],
    same: list[tuple[int, int]],
    like: list[tuple[int, Any]],
    autocast: tuple[Any, ...],
    watch: Watch,
) -> Callable[[tuple[Any, ...], dict[str, Any]], list[Any] | None]: ...

class Matcher:
    """What a function that `matcher` makes is bound to."""

class GradSlots:
    """Where parameters' gradients are (csrc/graphs/grad_slots.h)."""

    def __init__(self, targets: list[Any]) -> None: ...
    def state(self) -> int: ...  # 0: all installed, 1: all None and nobody's, 2: anything else
    def install(self) -> None: ...
