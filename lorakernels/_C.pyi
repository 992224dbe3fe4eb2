# SPDX-License-Identifier: Apache-2.0
# Addresses are integers (`Tensor.data_ptr()`), sizes count elements, a stream is `torch.cuda.Stream.cuda_stream`.
from collections.abc import Callable, Sequence
from typing import Any, Literal

# How many int32 elements `partials` of quantize_grad has; they need not be initialized (csrc/ops/amax/params.h).
AMAX_PARTIALS: int

class _QuantizeLoraDownLimits:
    rank: int  # the highest
    cols_multiple: int  # of K, and of first_col

class _QuantizeGradLimits:
    rank: int
    drawn_rank: int  # the highest with `dropped`
    cols_multiple: int  # of N, and of first_col
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
def dropout_mask_host(
    out: int,
    rows: int,
    cols: int,
    seed: int,
    offset: int,
    site: int,
    threshold: int,
    first_row: int = 0,
    first_col: int = 0,
) -> None: ...
def torch_slots_host(out: int, count: int, seed: int, offset: int) -> None: ...
def dropped_bits(
    dropped: int,
    rows: int,
    cols: int,
    slot: int,
    site: int,
    threshold: int,
    first_row: int,
    first_col: int,
    stream: int,
    device: int,
) -> None: ...
def dropout_mask(
    out: int,
    rows: int,
    cols: int,
    slot: int,
    site: int,
    threshold: int,
    stream: int = 0,
    device: int = -1,
    first_row: int = 0,
    first_col: int = 0,
) -> None: ...
def bias_grad_chunks(rows: int, cols: int, multiprocessors: int, first_col: int = 0) -> int: ...
def bias_dropout_add(
    out: int,
    x: int,
    bias: int,
    residual: int,
    rows: int,
    cols: int,
    dtype: str,
    bias_dtype: str,
    slot: int,
    site: int,
    threshold: int,
    first_row: int,
    first_col: int,
    stream: int,
    device: int,
) -> None: ...
def bias_dropout_add_backward(
    dx: int,
    dbias: int,
    partial: int,
    dout: int,
    rows: int,
    cols: int,
    dtype: str,
    bias_dtype: str,
    slot: int,
    site: int,
    threshold: int,
    first_row: int,
    first_col: int,
    stream: int,
    device: int,
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
def quantize_grad(
    dy8: int,
    scale_inv: int,
    amax: int,
    ds: int,
    dB: int,
    workspace: int,
    dy: int,
    B: int,
    s: int,
    kept: int,
    partials: int,
    rows: int,
    cols: int,
    rank: int,
    scaling: float,
    dtype: str,
    b_dtype: str,
    format: Literal["e4m3fn", "e5m2"],
    fp8_max: float,
    dropped: int,
    dropped_cols: int,
    slot: int,
    site: int,
    threshold: int,
    first_row: int,
    first_col: int,
    stream: int,
    device: int,
    projections: Sequence[tuple[int, int]] = (),
) -> None: ...
def quantize_lora_down(
    x8: int,
    scale_inv: int,
    amax: int,
    s: int,
    workspace: int,
    x: int,
    lora_A: int,
    kept: int,
    rows: int,
    cols: int,
    rank: int,
    dtype: str,
    a_dtype: str,
    slot: int,
    site: int,
    threshold: int,
    first_row: int,
    first_col: int,
    stream: int,
    device: int,
) -> None: ...
def fp8_linear_lora(
    y: int,
    x8: int,
    weight: int,
    x_scale_inv: int,
    weight_scale_inv: int,
    by_column: bool,
    s: int,
    B: int,
    bias: int,
    residual: int,
    rows: int,
    cols: int,
    depth: int,
    rank: int,
    stride: int,
    scaling: float,
    dtype: str,
    b_dtype: str,
    bias_dtype: str,
    splits: bool,
    tile: tuple[int, int],
    multiprocessors: int,
    stream: int,
    device: int,
) -> None: ...
def fp8_grad_input(
    dx: int,
    dy8: int,
    weight: int,
    transposed: bool,
    dy_scale_inv: int,
    weight_scale_inv: int,
    ds: int,
    A: int,
    rows: int,
    cols: int,
    depth: int,
    rank: int,
    stride: int,
    factor: float,
    slot: int,
    site: int,
    threshold: int,
    first_row: int,
    first_col: int,
    dropped: int,
    dtype: str,
    a_dtype: str,
    format: Literal["e4m3fn", "e5m2"],
    splits: bool,
    tile: tuple[int, int],
    multiprocessors: int,
    stream: int,
    device: int,
) -> None: ...
def lora_grad_a_partial(rows: int, cols: int, rank: int, multiprocessors: int) -> int: ...
def lora_grad_a(
    dA: int,
    partial: int,
    ds: int,
    x: int,
    scale_inv: int,
    rows: int,
    cols: int,
    rank: int,
    ds_pitch: int,
    dtype: str,
    out_dtype: str,
    slot: int,
    site: int,
    threshold: int,
    first_row: int,
    first_col: int,
    dropped: int,
    stream: int,
    device: int,
) -> None: ...
def transpose_fp8(out: int, in_: int, rows: int, cols: int, stream: int, device: int) -> None: ...
def fp8_encode(src: int, out: int, n: int, format: Literal["e4m3fn", "e5m2"]) -> None: ...
def fp8_decode(src: int, out: int, n: int, format: Literal["e4m3fn", "e5m2"]) -> None: ...
def amax_and_scale_update_host(
    forward: int,
    backward: int,
    current: int,
    n: int,
    history_len: int,
    fp8_max_forward: float,
    fp8_max_backward: float,
    margin: int,
    amax_compute_algo: Literal["max", "most_recent"],
    gated: bool = False,
) -> None: ...
def amax_and_scale_update(
    forward: int,
    backward: int,
    current: int,
    n: int,
    history_len: int,
    fp8_max_forward: float,
    fp8_max_backward: float,
    margin: int,
    amax_compute_algo: Literal["max", "most_recent"],
    gated: bool = False,
    stream: int = 0,
    device: int = -1,
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
        self, addresses: tuple[int, ...], sites: tuple[int, ...], stream: int, device: int, /
    ) -> bool:
        """Launches all in order, on `device` (-1: the current one).

        False: an address of an aligned base is no multiple of 16, and nothing was launched.
        addresses: one for each base. ValueError: too few or too many, or 0 for a base that a launch uses.
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
