# SPDX-License-Identifier: Apache-2.0
"""Every call after every other one: it works, or it is refused by the table's sentence and nothing has changed."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from lorakernels import (
    AdapterBatch,
    DelayedScaling,
    LoRAConfig,
    PhiloxState,
    apply_lora,
    attach,
    batch_adapters,
    fuse,
    load_adapter,
    merge_and_unload,
    merge_lora,
    save_adapter,
    unfuse,
    unload,
)
from lorakernels.modules.marks import became
from lorakernels.modules.order import CALLS, STATES
from lorakernels.parallel import (
    ContextParallel,
    PipelineParallel,
    context_parallel,
    parallelize,
    pipeline_parallel,
    shard_base,
)
from tests.fusion.fused_models import FP32, LINEARS, VOCABULARY, adapted, difference

# Where scales or sums differ by a bit, a value may be rounded to the next number of e4m3, which is 2^-3 of it away
E4M3 = 2.0**-3
Step = dict[str, Tensor]  # the loss, and gradients by name
ENDS = ("merge_and_unload", "unload")  # the model is plain again
# {call: what the model is after it, beside being adapted}
MAKES = {
    "apply_lora": "adapted",
    "load_adapter": "adapted",
    "batch_adapters": "batched",
    "fuse": "fused",
    "unfuse": "adapted",
    "parallelize": "split",
    "shard_base": "held",
    "pipeline_parallel": "stages",
    "context_parallel": "shared rows",
    "attach": "graphs",
    "merge_lora": "merged",
    "merge_and_unload": "plain",
    "unload": "plain",
}
# {(first, second): what is said} where one process cannot be both, or the second call refuses only itself
OWN = {
    ("parallelize", "context_parallel"): "is split over these ranks already",
    ("attach", "attach"): "is attached already",
    ("unfuse", "unfuse"): "is not fused",
}
WORKS_ON_PLAIN = ("apply_lora", "load_adapter", "parallelize", "context_parallel")
# of the other calls, which need an adapter, or its FP8 base, and get a plain model
PLAIN = "no LoRALinear|has LoRALinears|is not fused|no parameter that trains|is an nn.Linear of|none of the model's"


def recipe(fp8: bool) -> DelayedScaling | None:
    return DelayedScaling(amax_history_len=2) if fp8 else None


def make(fp8: bool) -> nn.Module:
    torch.manual_seed(0)
    return adapted("Llama", LINEARS, fp8=recipe(fp8), rng_state=PhiloxState(1, "cpu"))


def several(model: nn.Module) -> AdapterBatch:
    """The first adapter is the model's, the second one has twice its B."""
    values = {n: p.detach().clone() for n, p in model.named_parameters() if "lora_" in n}
    batch = batch_adapters(model, ["a", "b"])
    with torch.no_grad():
        for factor, name in enumerate("ab", 1):
            for path, parameter in batch.parameters(name).items():
                parameter.copy_(values[path] * (factor if "lora_B" in path else 1))
    return batch


class Calls:
    """Each call by its name, on a model whose base is in FP8 or not."""

    def __init__(self, fp8: bool, folder: Path) -> None:
        mesh, scaling = init_device_mesh("cpu", (1,)), recipe(fp8)
        config = LoRAConfig(r=4, target_modules=[*LINEARS], fp8=scaling)
        self.fp8 = fp8
        self.by_name: dict[str, Callable[[Any], object]] = {
            "apply_lora": lambda m: apply_lora(m, config),
            "load_adapter": lambda m: load_adapter(m, folder, fp8=scaling),
            "batch_adapters": several,
            "fuse": fuse,
            "unfuse": unfuse,
            "parallelize": lambda m: parallelize(m, mesh),
            "shard_base": lambda m: shard_base(m, mesh),
            "pipeline_parallel": lambda m: pipeline_parallel(m, mesh, microbatches=2),
            "context_parallel": lambda m: context_parallel(m, mesh),
            "attach": lambda m: attach(m, torch.optim.SGD(m.parameters())),
            "merge_lora": merge_lora,
            "merge_and_unload": merge_and_unload,
            "unload": unload,
        }
        save_adapter(make(fp8), folder)

    def made(self, *names: str) -> nn.Module:
        """A new model after these calls."""
        model = make(self.fp8)
        for name in names:
            if name != "apply_lora":  # which `make` has called
                self.by_name[name](model)
        return model


@pytest.fixture(scope="module")
def calls(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[bool], Calls]]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        folder = tmp_path_factory.mktemp("adapters")
        both = {fp8: Calls(fp8, folder / str(fp8)) for fp8 in (False, True)}
        yield both.__getitem__
    finally:
        dist.destroy_process_group()


def rows() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(5)
    tokens = torch.randint(VOCABULARY, (4, 12), generator=generator)
    return tokens, tokens.index_fill(1, torch.tensor([2, 7]), -100)


def step(model: Any) -> Step:
    """By what the model has become."""
    tokens, labels = rows()
    stages, context = PipelineParallel.of(model), ContextParallel.of(model)
    if stages is not None:
        trains = any(p.requires_grad for p in model.parameters())
        loss = (stages.forward_backward if trains else stages.loss)(labels, input_ids=tokens)
    else:
        inputs = {"input_ids": tokens, "labels": labels}
        loss = model(**inputs).loss if context is None else context.loss(**inputs)
        if loss.requires_grad:
            loss.backward()
    if context is not None:
        context.reduce_gradients()
    found = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    return {"loss": loss.detach(), **found}


def looks(model: Any) -> dict[str, Any]:
    """What a caller can see."""
    found: dict[str, Any] = {n: x.view(torch.uint8).tolist() for n, x in model.state_dict().items()}
    for path, module in model.named_modules():
        hooks = len(module._forward_pre_hooks), len(module._forward_hooks)
        found[f"{path}:"] = type(module), became(module), hooks, sorted(vars(module))
    found |= {f"{n} trains": p.requires_grad for n, p in model.named_parameters()}
    with torch.no_grad():
        where = torch.arange(12)[None]
        logits = model.eval()(input_ids=rows()[0], position_ids=where).logits
        found["logits"] = logits.tolist()
    model.train()
    return found


def expected(calls: Calls, first: str, second: str) -> Step:
    """The step of a model on which only those calls were that change what it computes."""
    if {first, second} & {*ENDS}:
        model = calls.made(*(n for n in (first, second) if n in (*ENDS, "merge_lora")))
        if second in ("apply_lora", "load_adapter"):
            calls.by_name[second](model)
        return {"loss": step(model)["loss"]}
    made = calls.made(*(n for n in (first, second) if n in ("merge_lora", "batch_adapters")))
    return step(made)


def sentence(first: str, second: str) -> tuple[type[Exception], str] | None:
    """What the table says of `second` after `first`; None where it says nothing."""
    if (first, second) in OWN:
        return ValueError, OWN[first, second]
    states = {"adapted", MAKES[first]} | ({"fused"} if second == "unfuse" != first else set())
    if MAKES[first] == "plain":
        return None if second in WORKS_ON_PLAIN else (ValueError, PLAIN)
    for state, never in CALLS[second].items():
        if state in states:
            return never.error, f"{re.escape(STATES[state].says)}.*: {re.escape(never.why)}"
    return None


PAIRS = [
    (first, second)
    for first in MAKES
    for second in MAKES
    # `unfuse` needs `fuse` before the first call, which that may refuse
    if not (second == "unfuse" and {"fused", "plain"} & {*CALLS[first], MAKES[first]})
]


@pytest.mark.parametrize(("first", "second"), PAIRS, ids=[f"{a} then {b}" for a, b in PAIRS])
def test_a_call_after_another(calls: Callable[[bool], Calls], first: str, second: str) -> None:
    fp8 = "shard_base" in (first, second)
    here = calls(fp8)
    model = here.made(*(("fuse",) if "unfuse" in (first, second) else ()), first)
    said = sentence(first, second)
    if said is None:
        here.by_name[second](model)
        wanted, found = expected(here, first, second), step(model)
        for name, value in wanted.items():
            assert difference(found[name], value) <= (E4M3 if fp8 else FP32), name
        return
    before = looks(model)
    with pytest.raises(said[0], match=said[1]):
        here.by_name[second](model)
    assert looks(model) == before


@pytest.mark.parametrize("second", ["apply_lora", "load_adapter"])
@pytest.mark.parametrize("first", ["parallelize", "context_parallel"])
def test_a_plain_model_gets_its_adapters_before(
    calls: Callable[[bool], Calls], first: str, second: str
) -> None:
    here = calls(False)
    model = here.made("unload", first)
    before = looks(model)
    with pytest.raises(ValueError, match=re.escape(CALLS["apply_lora"][MAKES[first]].why)):
        here.by_name[second](model)
    assert looks(model) == before
