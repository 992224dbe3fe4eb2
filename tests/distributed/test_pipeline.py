# SPDX-License-Identifier: Apache-2.0
"""A model cut into stages over 2 and 4 ranks trains as one process does, to the bit; faults are seen; refusals."""

from __future__ import annotations

import copy
import gc
import re
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.multiprocessing.reductions import StorageWeakRef

from lorakernels import PhiloxState, attach, batch_adapters, fuse
from lorakernels.parallel import (
    ShardedAdamW,
    context_parallel,
    parallelize,
    pipeline_parallel,
    shard_base,
)
from lorakernels.parallel.pipeline import stages
from lorakernels.parallel.pipeline.cut import cut
from lorakernels.parallel.ranks import comm
from lorakernels.state.philox import skip_slots
from tests.distributed.pipeline_models import Way, batch, compare, make, step_alone, worker
from tests.distributed.tensor_layers import relative
from tests.fusion.fused_models import FP32, LINEARS, adapted, an_adapter, fp8_state
from tests.graphs.layers import managed
from tests.processes import on_ranks

pytestmark = pytest.mark.slow
PLAIN = Way("plain")
SMOL = {"no_rope_layers": [1, 0, 1, 0]}
WORLDS = {
    2: (
        PLAIN,
        Way("dropout", dropout=0.1),
        Way("fused", fused=True),
        Way("fused, FP8", fused=True, fp8=True, dropout=0.1),
        Way("interleaved", chunks=2),
        Way("interleaved, FP8", chunks=2, fp8=True, dropout=0.1),
        Way("uneven", layers=5, chunks=2, fused=True, fp8=True, dropout=0.1),
        Way("a mask for each", fused=True, dropout=0.1, shared_dropout=False),
        Way("checkpointed", checkpoint=True, dropout=0.1),
        Way("fused, checkpoint", fused=True, save="checkpoint", dropout=0.1, fp8=True),
        Way("bf16", dtype=torch.bfloat16, fused=True, dropout=0.1, fp8=True),
        Way("padded", padded=True),
        Way("packed", packed=True),
        Way("packed, fused", packed=True, fused=True),
        Way("tied", model={"tie_word_embeddings": True}),
        Way("two microbatches", microbatches=2, chunks=2),
        Way("first stage without a gradient", chunks=2, lora={"layers_to_transform": [2, 3]}),
        Way("last stage without adapters", chunks=2, lora={"layers_to_transform": [0, 1]}),
        Way("Gemma2, whose embedding is scaled", family="Gemma2", chunks=2, dropout=0.1),
        Way("Granite, fused", family="Granite", fused=True, fp8=True),
        Way("Phi3, fused", family="Phi3", fused=True, dropout=0.1),
        Way("SmolLM3", family="SmolLM3", model=SMOL, dropout=0.1),
    ),
    4: (
        PLAIN,
        Way("fused, FP8", fused=True, fp8=True, dropout=0.1),
        Way("interleaved, fused, FP8", 8, 2, 8, fused=True, fp8=True, dropout=0.1),
        Way("uneven, interleaved", 9, 2, 10, dropout=0.1),
    ),
}
ON_GPU = (
    Way("fp32", dropout=0.1),
    Way("interleaved, fused, bf16", chunks=2, fused=True, dtype=torch.bfloat16),
    Way("fused, bf16, FP8", dropout=0.1, fp8=True, fused=True, dtype=torch.bfloat16),
)
_ran: dict[int, Any] = {}


def results(world: int) -> Any:
    if world not in _ran:
        _ran[world] = on_ranks(worker, world, "gloo", [*WORLDS[world]])
    return _ran[world]


CASES = [pytest.param(w, way, id=f"{w} ranks-{way}") for w, ways in WORLDS.items() for way in ways]


@pytest.mark.parametrize(("world", "way"), CASES)
def test_stages_train_as_one_process(world: int, way: Way) -> None:
    """Kernels see the same rows and sums have one order, so that bits are equal. Beside float64, fp32 rounds."""
    for found in results(world):
        found = found[str(way)]
        assert found["unequal"] == [] and found["ranks equal"]
        worst = max(found["errors"], key=found["errors"].__getitem__)
        assert found["errors"][worst] <= FP32, (worst, found["errors"][worst])


@pytest.mark.gpu
@pytest.mark.parametrize("way", ON_GPU, ids=str)
def test_stages_on_two_gpus(way: Way) -> None:
    """Sums by atomics have no order. bf16 rounds to 2^-9 at each of some twenty places; FP8 may turn a rounding.

    From float64 the stages may differ half as much again as one process does, where that is more.
    """
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    if "gpu" not in _ran_on_gpu:
        _ran_on_gpu["gpu"] = on_ranks(worker, 2, "nccl", [*ON_GPU])
    bound = 2.0**-2 if way.fp8 else 2.0**-4 if way.dtype == torch.bfloat16 else 2 * FP32
    for found in _ran_on_gpu["gpu"]:
        found = found[str(way)]
        errors, said = found["errors"], found["unequal"]
        assert not [name for name in said if name.startswith("generator")] and found["ranks equal"]
        alone = found["errors of one process"]
        over = {n: e - max(bound, 1.5 * alone.get(n, 0.0)) for n, e in errors.items()}
        worst = max(over, key=over.__getitem__)
        assert over[worst] <= 0, (worst, errors[worst], alone.get(worst))


_ran_on_gpu: dict[str, Any] = {}


def test_a_rank_has_its_layers_alone() -> None:
    for rank, found in enumerate(results(2)):
        own = found[str(WORLDS[2][4])]["own"]
        layers = {int(n) for name in own for n in re.findall(r"layers\.(\d+)\.", name)}
        assert layers == {rank, rank + 2}
        assert any("embed_tokens" in name for name in own) == (rank == 0)
        assert any("lm_head" in name or name.endswith("model.norm.weight") for name in own) == (
            rank == 1
        )
        assert found[str(WORLDS[2][4])]["said"].splitlines()[1:] == [
            "  stage 0, rank 0: the embedding, model.layers.0 … model.layers.0",
            "  stage 1, rank 1: model.layers.1 … model.layers.1",
            "  stage 2, rank 0: model.layers.2 … model.layers.2",
            "  stage 3, rank 1: model.layers.3 … model.layers.3, the norm, head and loss",
        ]


def without_a_microbatch() -> Any:
    """The gradient of one microbatch is lost in the last stage."""
    right = stages.Stage.forward

    def wrong(self: stages.Stage, x: Tensor, microbatch: Tensor) -> Tensor:
        found = right(self, x, microbatch)
        return found * 0.0 if self.is_last and int(microbatch) == 2 else found

    return patch.object(stages.Stage, "forward", wrong)


def each_by_its_own_labels() -> Any:
    """The mean of the microbatches' means."""
    right = stages.sum_of_losses

    def wrong(model: Any, hidden: Tensor, labels: Tensor, chunk: int) -> Tensor:
        return right(model, hidden, labels, chunk) / (labels != -100).sum() * 40

    return patch.object(stages, "sum_of_losses", wrong)


def draws_of_its_own() -> Any:
    """A rank draws as its layers come."""
    return patch.object(stages.Draws, "of", lambda self, stage, microbatch: nullcontext())


def no_entry() -> Any:
    """A stage runs the embedding's factor over what it got."""
    return patch.object(stages.Skipped, "forward", lambda self, x, *args, **kwargs: x)


FAULTS: dict[str, tuple[Way, Callable[[], AbstractContextManager[Any]], str]] = {
    "a microbatch's gradient": (PLAIN, without_a_microbatch, "lora_A"),
    "the loss's divisor": (PLAIN, each_by_its_own_labels, "loss"),
    "draws": (Way("", dropout=0.1), draws_of_its_own, "loss"),
    "entry": (Way("", family="Granite"), no_entry, "loss"),
}


def faulty(rank: int, device: torch.device) -> dict[str, list[str]]:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("pp",))
    found = {}
    for name, (way, fault, _) in FAULTS.items():
        with fault(), patch("lorakernels.parallel.PipelineParallel.check"):
            found[name] = compare(device, way, mesh["pp"])["unequal"]
    return found


def test_a_fault_is_seen() -> None:
    for found in on_ranks(faulty, 2, "gloo"):
        for name, (_, _, what) in FAULTS.items():
            assert any(what in unequal for unequal in found[name]), (name, found[name])


def refused(call: Callable[[], Any]) -> str:
    try:
        call()
    except (TypeError, ValueError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def changed(model: nn.Module, change: Callable[[Any], Any]) -> nn.Module:
    change(model)
    return model


def compiled(model: nn.Module) -> nn.Module:
    model.get_submodule("model.layers.1").compile()
    return model


def plain_dropout(model: nn.Module) -> nn.Module:
    model.get_submodule("model.layers.1.mlp").add_module("drop", nn.Dropout(0.1))
    return model


def another_adapter(rank: int, model: nn.Module) -> nn.Module:
    with torch.no_grad():
        an_adapter(model).lora_A.add_(rank)
    return model


def recorded(model: nn.Module) -> nn.Module:
    layers = [*model.get_submodule("model.layers").children()]
    vars(model)["manager"] = managed(layers, torch.device("cpu"))
    return model


def refusals(rank: int, device: torch.device) -> dict[str, str]:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("pp",))
    both = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "pp"))

    def plain(**options: Any) -> nn.Module:
        return make(Way("", **options), device)

    shared, split, held = plain(), plain(fp8=True), plain(fp8=True)
    context_parallel(shared, mesh["pp"])
    parallelize(split, mesh["pp"])
    fuse(held)
    shard_base(held, mesh["pp"])
    away = plain()
    fuse(away, save="checkpoint", offload_activations=True)
    own_generator = adapted("Llama", LINEARS, model={"num_hidden_layers": 4}, lora_dropout=0.1)
    norms = changed(plain(), lambda m: m.model.norm.weight.requires_grad_(True))
    wide = changed(plain(dtype=torch.bfloat16), lambda m: m.model.layers[0].input_layernorm.float())
    cuts: dict[str, tuple[nn.Module, dict[str, Any]]] = {
        "no model": (nn.Linear(2, 2), {}),
        "layers": (plain(), {"chunks": 3}),
        "microbatches": (plain(), {"microbatches": 1}),
        "rounds": (plain(), {"microbatches": 5, "chunks": 2}),
        "number": (plain(), {"chunks": 0}),
        "options": (plain(), {"microbatches": 2 + 2 * rank}),
        "adapters": (another_adapter(rank, plain()), {}),
        "compiled": (compiled(plain()), {}),
        "dropout": (plain_dropout(plain()), {}),
        "attention": (plain(model={"attention_dropout": 0.1}), {}),
        "generator": (own_generator, {}),
        "norm": (norms, {}),
        "dtypes": (wide, {}),
        "several adapters": (changed(plain(), lambda m: batch_adapters(m, ["a", "b"])), {}),
        "nothing to train": (plain(lora={"layers_to_transform": [0]}), {}),
        "shared": (shared, {}),
        "split": (split, {}),
        "held": (held, {}),
        "away": (away, {}),
        "managed": (recorded(plain()), {}),
    }
    found = {
        name: refused(lambda m=model, o=options: pipeline_parallel(m, mesh["pp"], **{"microbatches": 2, **o}))  # type: ignore[misc]
        for name, (model, options) in cuts.items()
    }  # fmt: skip
    model = plain()
    found["mesh"] = refused(lambda: pipeline_parallel(model, both, microbatches=2))
    cut = pipeline_parallel(model, mesh["pp"], microbatches=2)
    labels, inputs = batch(0, Way("", microbatches=2), device)
    tokens = inputs["input_ids"]
    found["twice"] = refused(lambda: pipeline_parallel(model, mesh["pp"], microbatches=2))
    found["forward"] = refused(lambda: model(tokens))
    found["input"] = refused(lambda: cut.forward_backward(labels, inputs_embeds=tokens))
    found["no input"] = refused(lambda: cut.forward_backward(labels))
    found["rows"] = refused(lambda: cut.forward_backward(labels[:3], input_ids=tokens[:3]))
    found["labels"] = refused(lambda: cut.forward_backward(labels[:2], input_ids=tokens))
    found["positions"] = refused(
        lambda: cut.loss(labels, input_ids=tokens, position_ids=tokens[:2])
    )
    found["copied"] = refused(lambda: copy.deepcopy(model))
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad])
    found["attached"] = refused(lambda: attach(model, optimizer))
    found["no gradients"] = refused(torch.no_grad()(lambda: cut.forward_backward(labels, **inputs)))
    found["other rows"] = refused(
        lambda: cut.loss(labels[: 2 + 2 * rank], input_ids=tokens[: 2 + 2 * rank])
    )
    own = next(path for path in cut.stages[rank])
    model.get_submodule(own).compile()
    found["compiled later"] = refused(lambda: cut.loss(labels, **inputs))
    if rank:
        torch.rand(1)
    found["another generator"] = refused(cut.check)
    return found


def test_what_does_not_fit_is_refused_on_all_ranks() -> None:
    expected = {
        "no model": "TypeError: model must be one of transformers, found Linear",
        "layers": "ValueError: 4 decoder layers cannot make 6 stages",
        "microbatches": "ValueError: microbatches must be at least the 2 ranks, found 1",
        "rounds": "ValueError: microbatches must be a multiple of 2 for 2 chunks over 2 ranks, found 5",
        "number": "ValueError: chunks must be a positive integer, found 0",
        "options": "ValueError: all ranks of the group must have the same model, but microbatches differ",
        "adapters": "same model, but the values of model.layers.0",
        "compiled": "ValueError: model.layers.1 is compiled: stages run eagerly",
        "dropout": "ValueError: model.layers.1.mlp.drop is Dropout(p=0.1",
        "attention": "ValueError: model.layers.0 has self_attn.attention_dropout = 0.1",
        "generator": "has dropout, which draws the masks of one process only with a PhiloxState",
        "norm": "ValueError: model.norm.weight trains",
        "dtypes": "ValueError: model.layers.0 has norms of torch.float32 after an embedding of torch.bfloat16",
        "several adapters": "microbatches would cut the rows of several adapters apart",
        "nothing to train": "ValueError: rank 1 would have no parameter that trains",
        "shared": "call pipeline_parallel first, then context_parallel",
        "split": "a pipeline of split layers is not supported yet",
        "held": "a pipeline with a sharded or offloaded base is not supported yet",
        "away": "ValueError: model.layers.0 keeps activations in host memory",
        "managed": "ValueError: model.layers.0 is managed by attach or lorakernels.graphs",
        "mesh": "ValueError: mesh must have one dimension",
        "twice": "was cut into stages by pipeline_parallel: call pipeline_parallel once",
        "forward": "of the pipeline: the model runs by PipelineParallel.forward_backward",
        "copied": "RuntimeError: a model that ranks hold together",
        "input": "TypeError: a pipeline takes",
        "no input": "TypeError: a pipeline needs input_ids",
        "rows": "B a positive multiple of the 2 microbatches, found [3, 12]",
        "labels": "ValueError: labels must be [4, 12] as the rows, found [2, 12]",
        "positions": "ValueError: position_ids must be [4, 12] as the rows, found [2, 12]",
        "attached": "was cut into stages by pipeline_parallel: a pipeline draws for each microbatch itself",
        "no gradients": "RuntimeError: forward_backward needs gradients",
        "other rows": "ValueError: all ranks that have stages must run a step of equal rows and options",
        "compiled later": "is compiled since it was cut: stages run eagerly, or by GraphManager",
        "another generator": "but torch's CPU generator differ",
    }
    for found in on_ranks(refusals, 2, "gloo"):
        assert found.keys() == expected.keys()
        for name, text in expected.items():
            assert text in found[name], (name, found[name])


def announced(rank: int, device: torch.device) -> list[list[str]]:
    """What happened in a step and in an evaluation: forwards and backwards of the stage, and calls of `begins`."""
    way, log = Way("", microbatches=4), []  # type: ignore[var-annotated]
    model = make(way, device)
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("pp",))
    cut = pipeline_parallel(model, mesh["pp"], microbatches=4)

    def seen(module: nn.Module, args: Any, out: Any) -> None:
        log.append("forward")
        hidden = out if isinstance(out, Tensor) else out[0]
        if hidden.requires_grad:
            hidden.register_hook(lambda _: log.append("backward"))

    model.get_submodule(next(iter(cut.stages[rank]))).register_forward_hook(seen)
    labels, inputs = batch(0, way, device)
    parts = stages.microbatches_of(labels, inputs, 4)
    found = []
    for trains in (True, False):
        log.clear()
        with nullcontext() if trains else torch.no_grad():
            cut.run(parts, 1.0, trains, lambda: log.append("begins"))
        found.append([*log])
    return found


def test_each_forward_and_backward_of_a_stage_is_announced() -> None:
    """So that the host can wait there: NCCL's timeout of a send counts from its launch."""
    for step, evaluation in on_ranks(announced, 2, "gloo"):
        assert step[::2] == ["begins"] * 8
        assert sorted(step[1::2]) == ["backward"] * 4 + ["forward"] * 4
        assert evaluation == ["begins", "forward"] * 4


def memory(rank: int, device: torch.device, fused: bool) -> list[bool]:
    """Of each layer, whether some of its weights' memory is there."""
    model = make(Way("", fp8=True), device)
    kept = fuse(model, keep_linears=True) if fused else None
    refs = [
        [StorageWeakRef(p.untyped_storage()) for p in layer.parameters()]
        for layer in model.get_submodule("model.layers").children()
    ]
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("pp",))
    cut = pipeline_parallel(model, mesh["pp"], microbatches=2)
    labels, inputs = batch(0, Way("", microbatches=2), device)
    cut.forward_backward(labels, **inputs)
    gc.collect()
    assert kept is None or kept.backends
    return [any(not ref.expired() for ref in layer) for layer in refs]


@pytest.mark.parametrize("fused", [False, True], ids=["unfused", "fused"])
def test_the_memory_of_other_layers_is_free(fused: bool) -> None:
    assert on_ranks(memory, 2, "gloo", fused) == [
        [True, True, False, False],
        [False, False, True, True],
    ]


def test_masks_are_skipped_as_slots_are_drawn() -> None:
    state = PhiloxState(3)
    for count in (0, 1, 2, 7, 40):
        torch.manual_seed(count)
        for _ in range(count):
            state.slot()
        drawn = torch.get_rng_state()
        torch.manual_seed(count)
        skip_slots(count)
        assert torch.equal(torch.get_rng_state(), drawn)


def test_layers_are_cut_evenly() -> None:
    assert [*map(len, cut(9, 4))] == [3, 2, 2, 2]
    assert [i for part in cut(9, 4) for i in part] == [*range(9)]


def clipped(rank: int, device: torch.device) -> list[float]:
    """The norms before and after, of two stages and of one process."""
    way, found = Way("", microbatches=2), []
    labels, inputs = batch(0, way, device)
    whole, model = make(way, device), make(way, device)
    step_alone(whole, labels, inputs, way)
    trained = [p for p in whole.parameters() if p.requires_grad]
    found.append(float(torch.nn.utils.clip_grad_norm_(trained, 0.01)))
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("pp",))
    cut = pipeline_parallel(model, mesh["pp"], microbatches=2)
    cut.forward_backward(labels, **inputs)
    found.append(float(cut.clip_grad_norm_(0.01)))
    grads, expected = cut.whole_gradients(), dict(whole.named_parameters())
    errors = [float((g - expected[n].grad).abs().max()) for n, g in grads.items()]  # type: ignore[operator]
    return [*found, max(errors) / max(float(g.abs().max()) for g in grads.values())]


def test_gradients_are_clipped_by_the_norm_of_all() -> None:
    for alone, over_ranks, error in on_ranks(clipped, 2, "gloo"):
        assert abs(alone - over_ranks) <= FP32 * alone and error <= FP32


def two_by_two(rank: int, device: torch.device) -> dict[str, float]:
    """Differences of losses and of trained values from one process, over two replicas of two stages."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "pp"))
    both, way = Way("", microbatches=4, fp8=True, fused=True), Way("", microbatches=2)
    whole, model = make(both, device), make(both, device)
    cut = pipeline_parallel(model, mesh["pp"], microbatches=way.microbatches)
    optimizers = [
        torch.optim.AdamW([p for p in whole.parameters() if p.requires_grad], eps=1e-3),
        ShardedAdamW([p for p in model.parameters() if p.requires_grad], mesh["dp"], eps=1e-3),
    ]
    states, replica, found = [fp8_state(whole), fp8_state(model)], rank // 2, {}
    for step in range(3):
        labels, inputs = batch(step, both, device)
        tokens = inputs["input_ids"]
        items = (labels[:, 1:] != -100).sum()
        expected = step_alone(whole, labels, inputs, both)
        own = labels.chunk(2)[replica], tokens.chunk(2)[replica]
        loss = cut.forward_backward(own[0], items / 2, input_ids=own[1])  # averaged over two
        loss = sum(comm.agree(mesh["dp"].get_group(), loss)) / 2
        found[f"loss {step}"] = float((loss - expected).abs() / expected)
        for optimizer, state, group in zip(
            optimizers, states, (cut.ranks.group, None), strict=True
        ):
            optimizer.step()
            optimizer.zero_grad()
            state.reduce_and_update(group)
        ratio = (
            states[1].forward / states[0].forward
        )  # those of dy are twice as large: loss is divided by items / 2
        found[f"scales of x {step}"] = float((ratio - 1).nan_to_num().abs().max())
    trained = dict(whole.named_parameters())
    return found | {n: relative(x, trained[n].detach()) for n, x in cut.whole_adapters().items()}


def test_two_replicas_of_two_stages() -> None:
    """Two replicas' gradients are added in another order. Over FP8 that may turn a rounding, 2^-3 of an element."""
    for found in on_ranks(two_by_two, 4, "gloo"):
        assert len(found) > 28 * 2 and max(found.values()) <= 2.0**-7, max(
            found.items(), key=lambda x: x[1]
        )
        assert found["loss 0"] <= FP32
