# SPDX-License-Identifier: Apache-2.0
"""`_C.LaunchList`: what is recorded, where a run finds its memory, and what is refused."""

from __future__ import annotations

import ast
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lorakernels import _C
from lorakernels.device import why_not_csrc
from tests.kernels.bindings import call, names_of
from tests.kernels.recording import recording, symbolic

STUBS = Path(_C.__file__).with_name("_C.pyi")
DROPOUT = {"site": 0, "p": 0.1, "row0": 3, "col0": 8, "chunks": (1, 2, 5)}
GEMM = {
    "rows": 64,
    "cols": 256,
    "depth": 128,
    "rank": 8,
    "splits": True,
    "tile_rows": 128,
    "tile_cols": 128,
    "multiprocessors": 132,
    "segment_rows": 0,
    "blocks": [],
}
SEGMENTS = {"rows": 256, "segment_rows": 128, "splits": False}
GRAD_INPUT = GEMM | DROPOUT | {"a_dtype": "bfloat16", "format": "e5m2"}
GROUPED = GEMM | {"rows": 128, "groups": 2}
LINEAR = GEMM | {"scaling": 2.0, "b_dtype": "bfloat16", "bias_dtype": "bfloat16"}
SHAPE = {"rows": 64, "cols": 256}
RANK = SHAPE | {"rank": 8}
GRAD_A = RANK | DROPOUT | {"ds_pitch": 8, "out_dtype": "bfloat16"}
DRAWN = DROPOUT | {"dropped": None}  # there is no mask to read
BIAS = SHAPE | DRAWN | {"bias_dtype": "float32"}
UPDATE = {"n": 3, "history_len": 4, "fp8_max_forward": 448.0, "fp8_max_backward": 57344.0}
# case: (function, all of its arguments but addresses, dtype, stream and device)
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "amax_and_scale_update": (
        "amax_and_scale_update",
        UPDATE | {"margin": 0, "amax_compute_algo": "max", "gated": True},
    ),
    "bias_dropout_add": ("bias_dropout_add", BIAS),
    "bias_dropout_add_backward": ("bias_dropout_add_backward", BIAS),
    # no document is longer, whatever the memory holds that a test gives it
    "check_longest_document": ("check_longest_document", {"documents": 3, "longest": 2**33}),
    "dropout_mask": ("dropout_mask", SHAPE | DRAWN),
    "dropped_bits": ("dropped_bits", SHAPE | DRAWN),
    "fp8_block_grad_input": ("fp8_block_grad_input", GRAD_INPUT),
    "fp8_block_linear": ("fp8_block_linear", LINEAR | {"by_column": False}),
    "fp8_grad_input": ("fp8_grad_input", GRAD_INPUT),
    "fp8_linear_lora": ("fp8_linear_lora", LINEAR | {"by_column": True}),
    "fp8_linear_lora_of_blocks": (
        "fp8_linear_lora",
        LINEAR | {"by_column": True, "blocks": [(200, 8), (56, 0)]},
    ),
    "fp8_linear_lora_of_segments": ("fp8_linear_lora", LINEAR | SEGMENTS | {"by_column": True}),
    "fp8_grad_input_of_segments": ("fp8_grad_input", GRAD_INPUT | SEGMENTS),
    "grouped_grad_input": (
        "grouped_grad_input",
        GROUPED | {"a_dtype": "bfloat16", "format": "e5m2"},
    ),
    "grouped_linear_lora": (
        "grouped_linear_lora",
        GROUPED | {"splits": False, "scaling": 2.0, "b_dtype": "bfloat16"},
    ),
    "lora_grad_a": ("lora_grad_a", GRAD_A | {"in_blocks": False}),
    "lora_grad_a_of_blocks": ("lora_grad_a", GRAD_A | {"in_blocks": True}),
    "quantize_grad": (
        "quantize_grad",
        RANK
        | DROPOUT
        | {"scaling": 2.0, "b_dtype": "bfloat16", "format": "e5m2", "fp8_max": 57344.0}
        | {"power_of_two": None}
        | {"dropped_cols": 128, "projections": ((128, 8), (128, 0))},
    ),
    "quantize_lora_down": (
        "quantize_lora_down",
        RANK | DRAWN | {"a_dtype": "bfloat16", "partials": None, "power_of_two": None},
    ),
    "transpose_fp8": ("transpose_fp8", SHAPE),
}
FIRST = 4  # the index of the first address in these tests


def launching() -> set[str]:
    """Each function of the stubs that launches."""
    functions = [f for f in ast.parse(STUBS.read_text()).body if isinstance(f, ast.FunctionDef)]
    return {f.name for f in functions if "where" in [a.arg for a in f.args.args]}


def pointers(case: str) -> list[str]:
    """The names of a case's addresses."""
    name, given = CASES[case]
    return [n for n in names_of(name) if n not in {*given, "dtype", "stream", "device"}]


def submit(case: str, address: Callable[[int], int], **changes: int) -> list[int]:
    """Calls a case with `address` of 0, 1, … for its pointers; returns these addresses."""
    name, given = CASES[case]
    values = given | {"dtype": "bfloat16", "stream": 12345, "device": 7} | changes
    addresses = {pointer: address(i) for i, pointer in enumerate(pointers(case))}
    call(name, values | addresses)
    return list(addresses.values())


def one_transpose(out: int, in_: int) -> None:
    _C.transpose_fp8(out, in_, (16, 16), (0, -1))


def bits(out: int, slot: int, site: int) -> None:
    _C.dropped_bits(out, (8, 8), (slot, 1e-3, site, 0, 0, None, ()), (0, -1))


def test_every_function_that_launches_has_a_case() -> None:
    assert {name for name, _ in CASES.values()} == launching()


@pytest.mark.parametrize("case", CASES)
def test_every_address_is_relocated(case: str) -> None:
    with recording() as launches:
        recorded = submit(case, lambda i: symbolic(FIRST + i, 32 * i))
    count = len(recorded)
    places = [(0, 0)] * FIRST + [(i, 1 << 20) for i in range(count)]
    launches.place(places, [True] * count)
    bases = [(0x7F00 + i) << 32 for i in range(count)]
    ((name, values),) = launches.calls(tuple(bases), (99,))
    sites = [99] if "site" in CASES[case][1] else []
    assert name == CASES[case][0]
    addresses = [base + (1 << 20) + 32 * i for i, base in enumerate(bases)]
    found = values[: len(values) - len(sites)]
    assert sorted(filter(None, found)) == addresses  # the GEMMs share what only one of them takes
    assert values[len(found) :] == sites


@pytest.mark.parametrize("case", CASES)
def test_null_stays_null(case: str) -> None:
    """Except what the bindings themselves ask for."""
    needed = {"slot", "partial", "current", "backward", "group_of"}
    names = pointers(case)
    with recording() as launches:
        recorded = submit(case, lambda i: symbolic(0, 4096 * i) if names[i] in needed else 0)
    launches.place([(0, 0)], [True])
    ((_, values),) = launches.calls((1 << 40,), (1,))
    addresses = [value for value in values if value > 1]
    assert len(addresses) == len(recorded) - recorded.count(0)


def test_launches_keep_their_order_and_their_sites() -> None:
    with recording() as launches:
        bits(symbolic(0), symbolic(1), 1)
        one_transpose(symbolic(2), symbolic(0))
        _C.dropout_mask(symbolic(0), (8, 8), (symbolic(1), 0.5, 0, 0, 0, None, ()), (0, -1))
    launches.place([(0, 0), (1, 64), (0, 1024)], [True, False])
    assert len(launches) == 3
    for base, sites in ((1 << 30, (5, 2**32 - 1)), (1 << 31, (0, 1))):
        assert launches.calls((base, 4096), sites) == [
            ("dropped_bits", [base, 4096 + 64, sites[1]]),
            ("transpose_fp8", [base + 1024, base]),
            ("dropout_mask", [base, 4096 + 64, sites[0]]),
        ]


def test_what_draws_nothing_needs_no_site() -> None:
    with recording() as launches:
        both, dtypes = (symbolic(0), symbolic(0), None, None), ("bfloat16", "bfloat16")
        _C.bias_dropout_add(*both, (8, 8), dtypes, None, (0, -1))
    launches.place([(0, 0)], [True])
    assert launches.calls((16,), ()) == [("bias_dropout_add", [16, 16, 0, 0, 0])]


def test_nothing_is_launched_while_recording_and_launched_at_once_otherwise() -> None:
    with recording() as launches:
        one_transpose(symbolic(0), symbolic(1))
    assert len(launches) == 1
    if not _C.build_info()["cuda"]:
        with pytest.raises(RuntimeError, match=r"transpose_fp8: .* without CUDA"):
            one_transpose(16, 16)
    assert len(launches) == 1


def test_a_thread_does_not_record_for_another() -> None:
    seen = []

    def record_in_a_thread() -> None:
        with recording() as own:
            one_transpose(symbolic(0), symbolic(1))
        seen.append(len(own))

    with recording() as launches:
        thread = threading.Thread(target=record_in_a_thread)
        thread.start()
        thread.join()
        assert len(launches) == 0
    assert seen == [1]


def test_checks_are_made_while_recording_and_leave_no_recorder() -> None:
    with recording() as launches:
        one_transpose(symbolic(0), symbolic(1))
        with pytest.raises(ValueError, match="rows must not be negative, got -1"):
            _C.transpose_fp8(symbolic(0), symbolic(1), (-1, 16), (0, -1))
        with pytest.raises(ValueError, match="must be symbolic, got 4096"):
            one_transpose(symbolic(0), 4096)
        with pytest.raises(ValueError, match="index below 64, got 64"):
            bits(symbolic(0), symbolic(1), 64)
    assert len(launches) == 1
    with pytest.raises(RuntimeError, match="does not record"):
        launches.end()
    with recording() as other:
        pass
    assert len(other) == 0


def test_a_list_records_once_and_a_thread_into_one_list() -> None:
    with recording() as launches:
        with pytest.raises(RuntimeError, match="records into a list already"):
            _C.LaunchList().begin()
        with pytest.raises(RuntimeError, match="records into a list already"):
            launches.begin()
        with pytest.raises(RuntimeError, match="place: must be called once, after end"):
            launches.place([], [])
    with pytest.raises(RuntimeError, match="has been recorded already"):
        launches.begin()
    with pytest.raises(RuntimeError, match=r"place\(\) must have been called"):
        launches.run((), (), 0, -1)
    launches.place([], [])
    with pytest.raises(RuntimeError, match="place: must be called once, after end"):
        launches.place([], [])


def test_a_list_that_nobody_holds_still_records() -> None:
    refused = []

    def lose_a_list() -> None:
        _C.LaunchList().begin()
        try:
            _C.LaunchList().begin()
        except RuntimeError as error:
            refused.append(str(error))
        one_transpose(symbolic(0), symbolic(1))

    thread = threading.Thread(target=lose_a_list)
    thread.start()
    thread.join()
    assert refused == ["LaunchList.begin: this thread records into a list already"]


@pytest.mark.parametrize(
    ("places", "aligned", "message"),
    [
        ([(0, 0)], [True], "found 1, but index 1 was recorded"),
        ([(0, 0), (1, 0)], [True], r"below len\(aligned\) = 1 .*got \(1, 0\)"),
        ([(0, 0), (0, 1 << 48)], [True], r"offset below 2\^48"),
        ([(0, 0), (0, (1 << 48) - 1)], [True], r"places\[1\] ends beyond 2\^48"),
        ([(0, 0), (0, 0)], [True] * 65, "at most 64 bases, got 65"),
    ],
    ids=["index", "base", "offset", "end", "bases"],
)
def test_places_that_are_refused_change_nothing(
    places: list[tuple[int, int]], aligned: list[bool], message: str
) -> None:
    with recording() as launches:
        one_transpose(symbolic(0), symbolic(1, 16))
    with pytest.raises(ValueError, match=message):
        launches.place(places, aligned)
    launches.place([(0, 0), (1, 0)], [True, True])
    assert launches.calls((32, 64), ()) == [("transpose_fp8", [32, 64 + 16])]


def placed() -> _C.LaunchList:
    """Two bases that are used, of which the first is aligned, and one that is not."""
    with recording() as launches:
        bits(symbolic(0), symbolic(1), 2)
    launches.place([(0, 0), (1, 0)], [True, False, True])
    return launches


@pytest.mark.parametrize(
    ("addresses", "sites", "message"),
    [
        ((16, 16), (0, 0, 0), "addresses must have 3 entries, got 2"),
        ((16, 16, 0, 0), (0, 0, 0), "addresses must have 3 entries, got 4"),
        ((16, 0, 0), (0, 0, 0), r"addresses\[1\] is used and must not be 0"),
        ((16,) * 65, (0, 0, 0), "addresses must have at most 64 entries, got 65"),
        ((16, 16, 0), (0, 0), "sites must have at least 3 entries, got 2"),
        ((16, 16, 0), (0, 0, 2**32), r"sites must be below 2\^32, got 4294967296"),
    ],
    ids=["few", "many", "null", "over-64", "few-sites", "wide-site"],
)
def test_values_that_a_run_refuses(
    addresses: tuple[int, ...], sites: tuple[int, ...], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        placed().run(addresses, sites, 0, -1)


def test_a_run_with_a_misaligned_address_launches_nothing() -> None:
    assert placed().run((24, 16, 0), (0, 0, 0), 0, -1) is False
    assert placed().run((16, 16, 8), (0, 0, 0), 0, -1) is False


def test_a_tensor_stands_for_its_address() -> None:
    tensor, launches = torch.empty(64, dtype=torch.uint8), placed()
    assert launches.run((tensor[8:], 16, 0), (0, 0, 0), 0, -1) is False  # no multiple of 16
    with pytest.raises(ValueError, match=r"addresses\[1\] is used and must not be 0"):
        launches.run((torch.nn.Parameter(torch.empty(64)), torch.empty(0), 0), (0, 0, 0), 0, -1)


@pytest.mark.skipif(_C.build_info()["cuda"], reason="this build launches")
def test_a_run_without_cuda_says_what_is_missing() -> None:
    with pytest.raises(RuntimeError, match=r"LaunchList.run: lorakernels._C was built without"):
        placed().run((16, 8, 0), (0, 0, 0), 0, -1)


@pytest.mark.parametrize(
    "arguments",
    [
        ([16], (), 0, -1),
        ((16.0, 16, 0), (), 0, -1),
        ((16, 16, -16), (), 0, -1),
        ((16, 16, 0), (0, 0, 0), None, -1),
        ((16, 16, 0), (0, 0, 0), 0, "cuda"),
        ((), (), 0),
    ],
    ids=["list", "float", "negative", "stream", "device", "count"],
)
def test_arguments_of_other_types_are_refused(arguments: tuple[Any, ...]) -> None:
    with pytest.raises((TypeError, OverflowError)):
        placed().run(*arguments)


def record_kernel(parameters: list[tuple[str, int | float]], **changes: Any) -> None:
    values = {"function": 1, "grid": (1, 1, 1), "threads": 32, "shared_bytes": 0, "early": False}
    _C.record_kernel(**(values | changes), parameters=parameters)


def test_kernels_are_recorded_with_their_addresses() -> None:
    numbers = [("i32", -(2**31)), ("u64", 2**64 - 1), ("fp32", 1e-5), ("i8", -1), ("fp64", 1.0)]
    with recording() as launches:
        record_kernel([("*", symbolic(1, 4)), *numbers, ("*", 0), ("*", symbolic(0))])
        record_kernel([], grid=(1, 0, 1))
    launches.place([(0, 0), (1, 8)], [True, False])
    assert launches.calls((16, 32), ()) == [("kernel", [32 + 8 + 4, 0, 16])]


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ([("i32", 2**31)], "of type 'i32' cannot be 2147483648"),
        ([("u32", -1)], "of type 'u32' cannot be -1"),
        ([("i64", 0.5)], "of type 'i64' cannot be 0.5"),
        ([("bf16", 1.0)], "or 'fp64', got 'bf16'"),
        ([("*", 4096)], "must be symbolic, got 4096"),
        ([("i32", 0)] * 65, "at most 64, got 65"),
    ],
    ids=["wide", "negative", "fraction", "type", "address", "many"],
)
def test_parameters_of_a_kernel_that_are_refused(
    parameters: list[tuple[str, int | float]], message: str
) -> None:
    with recording() as launches, pytest.raises(ValueError, match=message):
        record_kernel(parameters)
    assert len(launches) == 0


def test_a_kernel_is_recorded_or_refused() -> None:
    with pytest.raises(RuntimeError, match="record_kernel: this thread records into no LaunchList"):
        record_kernel([])


SITE = 2**32 - 3
BYTES = 1 << 20  # more than any of the cases has at an address


def through_a_list(case: str, memory: Tensor) -> Callable[[], None]:
    """Runs the case with memory [2 bases, 16, BYTES], its addresses in turns at the one and the other base."""
    with recording() as launches:
        count = len(submit(case, symbolic))
    launches.place([(i % 2, i // 2 * BYTES) for i in range(count)], [True, True])
    addresses, device = (memory[0].data_ptr(), memory[1].data_ptr()), memory.get_device()

    def run() -> None:
        stream = torch.cuda.current_stream().cuda_stream
        assert launches.run(addresses, (SITE,), stream, device)

    return run


def directly(case: str, memory: Tensor) -> None:
    stream = torch.cuda.current_stream().cuda_stream
    changes = {"stream": stream, "device": memory.get_device()}
    if "site" in CASES[case][1]:
        changes["site"] = SITE
    submit(case, lambda i: memory[i % 2, i // 2].data_ptr(), **changes)


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES)
def test_a_list_gives_the_bits_of_the_op(case: str) -> None:
    """Launched, and captured: all memory is the same after it as after the op itself, and not as before.

    A check alone writes nothing.
    """
    if reason := why_not_csrc(torch.cuda.get_device_capability()):
        pytest.skip(reason)
    # finite numbers of every type that is read
    before = torch.randint(0x3A, 0x40, (2, 16, BYTES), dtype=torch.uint8, device="cuda")
    if "group_of" in (names := pointers(case)):  # an index of one of two groups
        place = names.index("group_of")
        before[place % 2, place // 2].view(torch.int32)[:] = 1
    expected, found, replayed = before.clone(), before.clone(), before.clone()
    directly(case, expected)
    through_a_list(case, found)()
    graph, run = torch.cuda.CUDAGraph(), through_a_list(case, replayed)
    with torch.cuda.graph(graph):
        run()
    assert torch.equal(replayed, before)
    graph.replay()
    assert torch.equal(expected, before) == (case == "check_longest_document")
    assert torch.equal(found, expected)
    assert torch.equal(replayed, expected)
