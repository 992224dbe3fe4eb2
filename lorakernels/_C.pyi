# SPDX-License-Identifier: Apache-2.0
# Addresses are integers (`Tensor.data_ptr()`), sizes count elements, a stream is `torch.cuda.Stream.cuda_stream`.
from collections.abc import Sequence
from typing import Any, Literal

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
def dropout_mask(
    out: int,
    rows: int,
    cols: int,
    slot: int,
    site: int,
    threshold: int,
    stream: int = 0,
    device: int = -1,
) -> None: ...
def fp8_encode(src: int, out: int, n: int, format: Literal["e4m3fn", "e5m2"]) -> None: ...
def fp8_decode(src: int, out: int, n: int, format: Literal["e4m3fn", "e5m2"]) -> None: ...
def amax_and_scale_update_host(
    state: int,
    n: int,
    history_len: int,
    fp8_max: float,
    margin: int,
    amax_compute_algo: Literal["max", "most_recent"],
    gate: int = 0,
    n_gate: int = 0,
) -> None: ...
def amax_and_scale_update(
    state: int,
    n: int,
    history_len: int,
    fp8_max: float,
    margin: int,
    amax_compute_algo: Literal["max", "most_recent"],
    gate: int = 0,
    n_gate: int = 0,
    stream: int = 0,
    device: int = -1,
) -> None: ...
