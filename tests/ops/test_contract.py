# SPDX-License-Identifier: Apache-2.0
"""Every battery for every op of the registry, over the cases of tests/ops/cases.

The schema, torch.library's opcheck, one compiled graph, empty tensors, refusals; the bound in float64 on the CPU, on a
GPU and in Triton's interpreter; NaN and inf; what Hopper runs; captured graphs, guards, tensors of 2³¹ elements.
"""

from __future__ import annotations

import inspect
import math
import sys
from collections.abc import Collection, Iterator
from contextlib import nullcontext
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from lorakernels import ops
from lorakernels.device import capability
from lorakernels.ops.hardware import PLAIN
from lorakernels.ops.register import OPS, Op
from lorakernels.values import Dropout, Scaled, Scaling, Weight
from tests.dry_cuda import dry_cuda
from tests.kernels.by_triton import interpret
from tests.ops.cases import CONTRACTS
from tests.ops.contract import Arguments, Call, Case, Checked, Contract, cloned, same, tensors
from tests.ops.guards import assert_untouched, between_guards

gpu = pytest.mark.gpu
CASES = [(op, case) for op, contract in CONTRACTS.items() for case in contract.cases]
SHAPES = [(op, case) for op, contract in CONTRACTS.items() for case in contract.shapes]
REFUSALS = [(op, what) for op, contract in CONTRACTS.items() for what in contract.refusals]


@pytest.fixture(autouse=True)
def _sums_in_fp32() -> Iterator[None]:
    """PyTorch lets cuBLAS cut a depth into parts and add these up in 16 bits, in as many parts as cuBLAS likes.

    No bound follows from that: each addition rounds a sum that may be far above the result. In fp32 the bounds hold.
    """
    settings: Any = torch.backends.cuda.matmul
    names = [f"allow_{dtype}_reduced_precision_reduction" for dtype in ("bf16", "fp16")]
    before = [getattr(settings, name) for name in names]
    for name in names:
        setattr(settings, name, False)
    yield
    for name, value in zip(names, before, strict=True):
        setattr(settings, name, value)


THEIRS = (
    "torch",
    "cublaslt",
)  # implementations that add one term after the other, by PyTorch's kernels


ASK_THE_HOST = ("grouped_linear_lora", "grouped_grad_input")


def case_of(name: str, case: str) -> Case:
    contract = CONTRACTS[name]
    return contract.cases.get(case) or contract.shapes[case]


def each(
    cases: list[tuple[str, str]], slow: Collection[tuple[str, str]] = ()
) -> pytest.MarkDecorator:
    """`make sanitize FULL=1` leaves out what goes through torch: its tools do not see all that cuBLAS does."""
    params = []
    for name, case in cases:
        through_torch = "" if case_of(name, case).why_not is None else "-goes_through_torch"
        marks = [pytest.mark.slow] if (name, case) in slow else []
        params.append(pytest.param(name, case, id=f"{name}-{case}{through_torch}", marks=marks))
    return pytest.mark.parametrize(("name", "case"), params)


def is_traced(case: Case) -> bool:
    return case.why_not in (None, PLAIN) if case.is_traced is None else case.is_traced


def pattern(name: str, case: str) -> tuple[str, ...]:
    """What a trace sees of a case: which arguments there are, and of which types."""
    leaves = tree_leaves(case_of(name, case).arguments("cpu"))
    return (name, *(str(x.dtype) if isinstance(x, Tensor) else type(x).__name__ for x in leaves))


def repeated(cases: list[tuple[str, str]]) -> set[tuple[str, str]]:
    """Those of `cases` whose pattern an earlier one has."""
    first = {pattern(*case): case for case in reversed(cases)}
    return {case for case in cases if first[pattern(*case)] != case}


each_case = each(CASES)
TRACED = [case for case in CASES if is_traced(case_of(*case))]
each_traced = each(TRACED, slow=repeated(TRACED))


def overload(name: str) -> torch._ops.OpOverload:
    return getattr(torch.ops.lorakernels, name).default


class Flat(Exception):
    """An op's call as torch's dispatcher gets it: (positional arguments, keywords)."""


class Stopped(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise Flat(args, kwargs or {})


def flat(op: Op[..., Any, Any], values: Arguments) -> tuple[tuple[Any, ...], dict[str, Any]]:
    with pytest.raises(Flat) as stopped, Stopped():
        op(*values)
    return stopped.value.args


def assert_same(found: list[Tensor], expected: list[Tensor]) -> None:
    """Shapes, dtypes, devices and bits, but for which NaN it is."""
    for a, b in zip(found, expected, strict=True):
        assert (a.shape, a.dtype, a.device) == (b.shape, b.dtype, b.device)
        assert same("", a, b).is_right()


def call(contract: Contract, arguments: Arguments) -> Call:
    """Run the op; what is not a kernel of ours, as a first implementation is, or the reference may round four times."""
    op, before = contract.op, cloned(arguments)
    on_gpu = any(t.is_cuda for t in tensors(arguments))
    runs = op.takes(*arguments).run if on_gpu else op.reference
    first = op.implementations[0]
    ours = runs is op.reference or (runs is first.run and first.name not in THEIRS)
    results = tuple(tensors(op(*arguments)))
    return Call(before, arguments, results, 1 if ours else 4)


def assert_bound(contract: Contract, done: Call) -> None:
    for each in contract.bound(done):
        assert each.is_right(), difference(each)


def difference(each: Checked) -> str:
    """The element that is furthest off of those that are wrong."""
    found, exact = each.found, each.exact
    if found.shape != exact.shape:
        return f"{each.name} is {tuple(found.shape)}, not {tuple(exact.shape)}"
    error = (found.double() - exact.double()).abs().nan_to_num(math.inf)
    worst = int(error.where(each.wrong(), -1.0).argmax())
    allowed = 0.0 if each.allowed is None else each.allowed.expand_as(error).flatten()[worst]
    values = found.flatten()[worst], exact.flatten()[worst]
    return f"{each.name}: {values[0]} for {values[1]}, off by more than {float(allowed):.3g}"


def test_each_op_has_a_contract() -> None:
    assert {op.name for op in vars(ops).values() if isinstance(op, Op)} == set(OPS)
    assert set(OPS) == set(CONTRACTS)
    for name, contract in CONTRACTS.items():
        assert contract.op is OPS[name] and contract.cases and contract.refusals
        assert not contract.cases.keys() & contract.shapes.keys()
        assert any(case.why_not is None for case in contract.cases.values())


@each_traced
def test_opcheck(name: str, case: str, device: torch.device) -> None:
    args, kwargs = flat(OPS[name], case_of(name, case).arguments(device))
    torch.library.opcheck(overload(name), args, kwargs)


@each_traced
def test_compiled_as_one_graph_it_gives_the_same_bits(
    name: str, case: str, device: torch.device
) -> None:
    torch._dynamo.reset()
    values = case_of(name, case).arguments(device)
    twins = cloned(values)
    found = OPS[name](*values)
    compiled = torch.compile(lambda *a: OPS[name](*a), fullgraph=True, backend="aot_eager")
    assert_same(tensors(compiled(*twins), twins), tensors(found, values))


@each_case
def test_of_no_rows_it_gives_what_the_fake_and_the_reference_say(
    name: str, case: str, device: torch.device
) -> None:
    op, values = OPS[name], case_of(name, case).arguments(device, rows=0)
    twins = cloned(values)
    found = tensors(op(*values))
    with FakeTensorMode() as mode:
        faked = tensors(op(*tree_map_only(Tensor, mode.from_tensor, values)))
    assert [(t.shape, t.dtype) for t in found] == [(t.shape, t.dtype) for t in faked]
    assert_same([*found, *tensors(values)], tensors(op.by_reference(*twins), twins))


def writes(argument: Any) -> bool:
    return argument.alias_info is not None and argument.alias_info.is_write


@each([(n, c) for n, c in CASES if any(map(writes, overload(n)._schema.arguments))])
@pytest.mark.parametrize("grad", [True, False], ids=["grad", "no grad"])
def test_autograd_counts_what_it_writes(
    name: str, case: str, grad: bool, device: torch.device
) -> None:
    """And nothing else: a backward that saved it raises, and one that saved another argument does not."""
    args, kwargs = flat(OPS[name], case_of(name, case).arguments(device))
    known = overload(name)._schema.arguments
    passed = {a.name: x for a, x in zip(known, args, strict=False)} | kwargs
    before = {key: x._version for key, x in passed.items() if isinstance(x, Tensor)}
    with torch.set_grad_enabled(grad):
        overload(name)(*args, **kwargs)
    found = {key for key, version in before.items() if passed[key]._version > version}
    assert found == {a.name for a in known if writes(a) and a.name in before}


@each_case
def test_within_its_bound(name: str, case: str, device: torch.device) -> None:
    contract = CONTRACTS[name]
    assert_bound(contract, call(contract, case_of(name, case).arguments(device)))


@gpu
@each(SHAPES)
def test_of_any_shape_within_its_bound_and_the_same_every_time(name: str, case: str) -> None:
    contract = CONTRACTS[name]
    arguments = case_of(name, case).arguments("cuda")
    twins = [cloned(arguments) for _ in range(5)]
    done = call(contract, arguments)
    assert_bound(contract, done)
    for twin in twins:
        found = tensors(contract.op(*twin))
        assert_same([*found, *tensors(twin)], [*done.results, *tensors(arguments)])


@pytest.mark.parametrize("name", CONTRACTS)
def test_what_is_kept_or_not_changes_nothing_else(name: str, device: torch.device) -> None:
    """A kernel compiled without a store may add a row up in another order: the bound judges rms_norm's on a GPU.

    Given rstd, that bound has x8 and the amax bit for bit, whether normed is kept or not.
    """
    parameters = list(inspect.signature(OPS[name]).parameters)
    if "keep" not in parameters:
        return
    place = parameters.index("keep")
    for case in CONTRACTS[name].cases.values():
        arguments = case.arguments(device)
        found = []
        for keep in (True, False):
            values = cloned((*arguments[:place], keep, *arguments[place + 1 :]))
            done = call(CONTRACTS[name], values)
            assert_bound(CONTRACTS[name], done)
            found.append([*done.results[1:], *tensors(values)])
        if device.type == "cpu" or name != "rms_norm_quantize":
            assert_same(*found)


def scales(arguments: Arguments) -> list[Tensor]:
    return tensors([a.scale_inv for a in arguments if isinstance(a, Scaled | Weight)])


def poisonable(arguments: Arguments, bad: float) -> Iterator[int]:
    """Which of the tensors are operands: not FP8 states, slots or labels.

    An infinite scale is none: zeros and sums of both signs are NaN by it, or are not, as it comes before or after them.
    """
    held = tensors([a for a in arguments if isinstance(a, Scaling | Dropout)])
    if bad == bad:
        held += scales(arguments)
    for i, tensor in enumerate(tensors(arguments)):
        is_operand = tensor.is_floating_point() or tensor.dtype == torch.uint8
        if is_operand and tensor.numel() and not any(tensor is t for t in held):
            yield i


def spoil(tensor: Tensor, bad: float) -> None:
    """Four elements in different rows and columns; 0x7F is NaN in both FP8 types, 0x7C is inf in one."""
    value = bad if tensor.is_floating_point() else (0x7F if bad != bad else 0x7C)
    strides = (tensor.numel() // 3 + 1, tensor.numel() // 5 + 1)
    for place in {0, *strides, tensor.numel() - 1}:
        index = torch.unravel_index(torch.tensor(place % tensor.numel()), tensor.shape)
        tensor[index] = value


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf], ids=str)
@each_case
def test_what_is_not_finite_goes_where_float64_says(
    name: str, case: str, bad: float, device: torch.device
) -> None:
    """In one operand at a time. Kernels of a GPU may tell it by a NaN; the reference may not."""
    contract, made = CONTRACTS[name], case_of(name, case)
    for i in poisonable(made.arguments("meta"), bad):
        arguments = made.arguments(device)
        spoiled = tensors(arguments)[i]
        of_scale = any(spoiled is scale for scale in scales(arguments))
        spoil(spoiled, bad)
        for each in contract.bound(call(contract, arguments)):
            told = each.told_by_a_kernel(of_scale) if device.type == "cuda" else each
            assert told.is_right(), difference(told)


@pytest.mark.parametrize("name", CONTRACTS)
def test_what_a_hopper_gpu_runs(name: str) -> None:
    """The first implementation, or there is the reason why not."""
    contract = CONTRACTS[name]
    made = {case: each.arguments("cpu") for case, each in contract.cases.items()}
    first, *others = contract.op.implementations
    with dry_cuda():
        reasons = {
            case: first.why_not(contract.op.arguments(*arguments))
            for case, arguments in made.items()
        }
        taken = {case: contract.op.takes(*arguments) for case, arguments in made.items()}
    for case, expected in contract.cases.items():
        if expected.why_not is None:
            assert reasons[case] is None and taken[case] is first, case
        else:
            assert expected.why_not in (reasons[case] or "") and taken[case] in others, case


@gpu
@each_case
def test_what_this_gpu_runs(name: str, case: str) -> None:
    if capability(0) != (9, 0):
        pytest.skip("the cases say what a Hopper GPU takes")
    op, expected = OPS[name], case_of(name, case)
    reason = op.implementations[0].why_not(op.arguments(*expected.arguments("cuda")))
    assert reason is None if expected.why_not is None else expected.why_not in (reason or "")


def ordered(contract: Contract, arguments: dict[str, Any]) -> Arguments:
    return tuple(arguments[p] for p in inspect.signature(contract.op).parameters if p in arguments)


@pytest.mark.parametrize("how", ["cpu", "cuda"])
@pytest.mark.parametrize(("name", "what"), REFUSALS, ids=str)
def test_refuses(name: str, what: str, how: str) -> None:
    """Both the reference and what CUDA runs, before anything is changed."""
    contract = CONTRACTS[name]
    refusal = contract.refusals[what]
    arguments = ordered(contract, {**contract.valid, **refusal.change})
    given, before = cloned(arguments), cloned(arguments)
    is_meta = any(t.is_meta for t in tensors(given))
    run: Any = contract.op.run if how == "cuda" else contract.op
    if how == "cpu" and is_meta:  # the dispatcher would take it for a trace
        run = contract.op.by_reference
    with pytest.raises(refusal.error, match=refusal.message):
        run(*given)
    assert is_meta or all(map(torch.equal, tensors(given), tensors(before)))


@pytest.mark.parametrize("name", CONTRACTS)
def test_what_refusals_differ_from_is_taken(name: str) -> None:
    contract = CONTRACTS[name]
    contract.op(*cloned(ordered(contract, dict(contract.valid))))


def interpretable(name: str, case: Case) -> bool:
    """Triton's kernel takes it; its interpreter cuts off where it rounds to bf16."""
    is_triton = OPS[name].implementations[0].name == "triton"
    if not is_triton or case.why_not is not None:
        return False
    made = case.arguments("meta")
    given = [a for a in (*made, *tensors(made)) if isinstance(a, torch.dtype | Tensor)]
    few = sum(t.numel() for t in tensors(made)) < 60_000
    return few and torch.bfloat16 not in {getattr(a, "dtype", a) for a in given}


INTERPRETED = [(n, c) for n, c in (*CASES, *SHAPES) if interpretable(n, case_of(n, c))]
# Its kernel takes fp16, which the op gives to PyTorch for the sake of inf and NaN; these operands have none
INTERPRETED.append(("grouped_quantize_grad", "fp16"))


def test_every_op_that_triton_takes_first_is_interpreted() -> None:
    first = {name for name, op in OPS.items() if op.implementations[0].name == "triton"}
    assert {name for name, _ in INTERPRETED} == first


@pytest.fixture(scope="module")
def interpreted(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return interpret(__file__, tmp_path_factory.mktemp("interpreted") / "calls.pt")


@pytest.mark.slow
@each(INTERPRETED)
def test_interpreted_within_its_bound(name: str, case: str, interpreted: Any) -> None:
    assert_bound(CONTRACTS[name], Call(*interpreted[f"{name}: {case}"]))


def run_interpreted() -> dict[str, tuple[Arguments, Arguments, tuple[Tensor, ...]]]:
    found = {}
    with mock.patch.object(torch.cuda, "device", lambda *_: nullcontext()):
        for name, case in INTERPRETED:
            arguments = case_of(name, case).arguments("cpu")
            before = cloned(arguments)
            op = OPS[name]
            results = op.implementations[0].run(op.arguments(*arguments))
            found[f"{name}: {case}"] = before, arguments, tuple(tensors(results))
    return found


@gpu
@each([(n, c) for n, c in CASES if case_of(n, c).why_not is None])
def test_captured_it_reads_the_operands_states_and_slots_of_the_replay(
    name: str, case: str
) -> None:
    op, made = OPS[name], case_of(name, case)
    arguments = made.arguments("cuda")
    if name in ASK_THE_HOST and op.takes(*arguments).name == "torch":  # as on an A100
        pytest.skip("PyTorch's products ask the host whose rows are whose")
    op(*cloned(arguments))  # compiles, and makes cuBLAS's workspace
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = op(*arguments)
    for i, scale in enumerate((0.0, 30.0, 0.0)):
        for tensor, fresh in zip(tensors(arguments), tensors(made.arguments("cuda")), strict=True):
            tensor.copy_(fresh)
        for value in arguments:
            if isinstance(value, Scaling):
                value.state[0], value.state[-1] = 0.0, scale
            elif isinstance(value, Dropout):
                value.slot[1] = 2**35 * i
        twins = cloned(arguments)
        graph.replay()
        assert_same(tensors(results, arguments), tensors(op(*twins), twins))


@gpu
@each(CASES + SHAPES)
def test_every_element_is_written_and_nothing_beside(name: str, case: str) -> None:
    op, arguments = OPS[name], case_of(name, case).arguments("cuda")
    twins, rooms = cloned(arguments), list[tuple[Tensor, int]]()
    first = op.takes(*arguments)
    if first is not op.implementations[0] or first.name in THEIRS:
        pytest.skip("PyTorch's kernels run this case")
    with between_guards(rooms):  # what it writes to as well
        given = tree_map_only(
            Tensor,
            lambda t: (
                t if t.data_ptr() % 16 or not t.is_contiguous() else torch.empty_like(t).copy_(t)
            ),
            arguments,
        )
        found = tensors(op.run(*given))
    assert_same([*found, *tensors(given)], tensors(op.run(*twins), twins))
    assert_untouched(rooms)
    inside = [range(w.data_ptr(), w.data_ptr() + w.numel()) for w, _ in rooms]
    results = [result.data_ptr() for result in found if result.numel()]
    assert not results or any(place in each for place in results for each in inside)


@gpu
@pytest.mark.parametrize("name", [name for name, each in CONTRACTS.items() if each.large])
def test_more_elements_than_32_bits_count(name: str) -> None:
    """The last row is what it is alone, and nothing else is written."""
    contract = CONTRACTS[name]
    assert contract.large is not None
    large, last = contract.large("cuda")
    rows = len(next(t for t in tensors(large) if t.dim() == 2))
    whole, alone = (tensors(contract.op(*values), values) for values in (large, last))
    for a, b in zip(whole, alone, strict=True):
        if len(a) == rows and rows > 1:
            assert_same([a[-1:]], [b])
            assert a.dim() == 1 or not a[:-1].any()
        elif a.dtype != torch.int64:
            assert_same([a], [b])


def test_poisoned_tensors_are_operands() -> None:
    """An FP8 state and a slot are none; both halves of an adapter are."""
    arguments = case_of("quantize_grad", "fp8").arguments("meta")
    assert len(tensors(arguments)) == 4 and list(poisonable(arguments, torch.nan)) == [0, 1, 2]
    arguments = case_of("fp8_linear_lora", "fp8").arguments("meta")
    counts = [len(list(poisonable(arguments, bad))) for bad in (torch.nan, torch.inf)]
    assert len(tensors(arguments)) == 7 and counts == [7, 5]


if __name__ == "__main__":
    torch.manual_seed(0)
    torch.save(run_interpreted(), sys.argv[1])
