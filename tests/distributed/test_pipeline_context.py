# SPDX-License-Identifier: Apache-2.0
"""Stages whose rows ranks share train as without stages, to the bit, and as float64 does; faults; refusals."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.multiprocessing.reductions import StorageWeakRef

from lorakernels import load_adapter, save_adapter
from lorakernels.checkpoints.adapters import files as adapters
from lorakernels.parallel import (
    ContextParallel,
    PipelineParallel,
    context_parallel,
    pipeline_parallel,
)
from lorakernels.parallel.context.rows import OwnChunks
from lorakernels.parallel.pipeline import stages
from lorakernels.parallel.pipeline.stages import microbatches_of, shifted
from lorakernels.parallel.ranks import comm
from tests.distributed.pipeline_models import (
    LENGTH,
    STEPS,
    Way,
    batch,
    differences,
    make,
    step_alone,
    train,
)
from tests.distributed.test_pipeline import refused
from tests.distributed.test_pipeline_inputs import another_forward_on
from tests.distributed.test_split_graphs import own_rows_of_the_sum
from tests.fusion.fused_models import FP32, LINEARS, exact, fp8_state
from tests.graphs.layers import managed
from tests.processes import backend_on_gpus, on_ranks

pytestmark = pytest.mark.slow
PLAIN = Way("plain")
WAYS = (
    PLAIN,
    Way("dropout", dropout=0.1),
    Way("one state for all microbatches", dropout=0.3, one_state=True),
    Way("fused", fused=True),
    Way("fused, FP8", fused=True, fp8=True, dropout=0.1),
    Way("interleaved, FP8", chunks=2, fp8=True, dropout=0.1),
    Way("uneven", layers=5, chunks=2, fused=True, fp8=True, dropout=0.1),
    Way("checkpointed", checkpoint=True, dropout=0.1),
    Way("fused, checkpoint, bf16", 4, 1, 2, fused=True, save="checkpoint", fp8=True, dtype=torch.bfloat16),
    Way("packed", packed=True),
    Way("packed, fused", packed=True, fused=True, dropout=0.1),
    Way("Granite, fused", family="Granite", fused=True),
)  # fmt: skip
REPLAYED = (
    Way("fused, FP8", fused=True, fp8=True),
    Way("fused, FP8, dropout", fused=True, fp8=True, dropout=0.3, one_state=True),
    Way("interleaved, packed", chunks=2, packed=True, fused=True),
)
BF16: dict[str, Any] = {"fused": True, "dtype": torch.bfloat16}
# sizes that FP8 kernels take
BF16["model"] = {"hidden_size": 64, "intermediate_size": 96, "num_key_value_heads": 4}
ON_GPU = (
    Way("bf16", **BF16),
    Way("bf16, packed, interleaved", chunks=2, packed=True, **BF16),
    Way("bf16, FP8, dropout", fp8=True, dropout=0.1, **BF16),
)
REPLAYED_ON_GPU = (
    Way("bf16, FP8", fp8=True, **BF16),
    Way("bf16, dropout", dropout=0.3, one_state=True, **BF16),
)


def mesh_of(device: torch.device) -> Any:
    return init_device_mesh(device.type, (2, 2), mesh_dim_names=("pp", "cp"))


def compare(device: torch.device, way: Way, mesh: Any, replays: bool = False) -> dict[str, Any]:
    """What is not equal to ranks that share rows without stages, to the bit; how far off they and float64 are."""
    whole, model = make(way, device), make(way, device)
    exactly = not (way.fp8 or way.dropout or way.fused)
    double = exact(copy.deepcopy(whole)) if exactly else None
    context_parallel(whole, mesh["cp"])
    cut = pipeline_parallel(model, mesh["pp"], microbatches=way.microbatches, chunks=way.chunks)
    context = context_parallel(model, mesh["cp"])
    manager: Any = None
    if replays:
        options: dict[str, Any] = {"fp8_state": fp8_state(model)} if way.fp8 else {}
        options |= {"rng_states": cut.rng_states, "num_microbatches": way.microbatches}
        manager = managed(cut.layers, device, together=context.together, **options)
    expected = train(whole, way, device, None)
    found = train(model, way, device, cut, manager.end_iteration if replays else lambda: None)
    cut.check()
    context.check()
    sums = {f"{i} {n}": float(x.sum()) for i, (_, r) in enumerate(found) for n, x in r.items()}
    alone = comm.agree(dist.group.WORLD, sums)
    result = {
        **differences(expected, found, way, double),
        "ranks equal": all(other == alone[0] for other in alone),
        "steps": len(found),
    }
    if manager is not None:
        result["replayed"] = manager.replayed
        manager.close()
    return result


def worker(rank: int, device: torch.device, ways: list[Way], replays: bool = False) -> Any:
    mesh = mesh_of(device)
    with ExitStack() as stack:
        if (
            replays and device.type == "cpu"
        ):  # gloo's scatter ends in ops that an imitated capture would record
            stack.enter_context(patch.object(comm, "sum_rows", own_rows_of_the_sum))
        return {str(way): compare(device, way, mesh, replays) for way in ways}


_ran: dict[tuple[str, bool], Any] = {}


def results(ways: tuple[Way, ...], backend: str = "gloo", replays: bool = False) -> Any:
    if (backend, replays) not in _ran:
        _ran[backend, replays] = on_ranks(worker, 4, backend, [*ways], replays)
    return _ran[backend, replays]


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_stages_of_shared_rows_train_as_without_stages(way: Way) -> None:
    """Kernels see the same tokens, and sums have one order, so that bits are equal. Beside float64, fp32 rounds."""
    for found in results(WAYS):
        found = found[str(way)]
        assert found["unequal"] == [] and found["ranks equal"] and found["steps"] == STEPS + 1
        worst = max(found["errors"], key=found["errors"].__getitem__)
        assert found["errors"][worst] <= 2 * FP32, (worst, found["errors"][worst])
        plain = not (way.fp8 or way.dropout or way.fused)
        assert any("float64" in name for name in found["errors"]) == plain


@pytest.mark.parametrize("way", REPLAYED, ids=str)
def test_replayed_stages_of_shared_rows_train_as_eager_rows(way: Way) -> None:
    """To the bit. One step is recorded."""
    for found in results(REPLAYED, replays=True):
        found = found[str(way)]
        assert found["unequal"] == [] and found["ranks equal"]
        assert found["replayed"] == (STEPS - 1) * way.microbatches


def check_on_gpu(found: dict[str, Any], way: Way) -> None:
    """Sums by atomics have no order. bf16 rounds to 2^-9 at each of some twenty places; FP8 may turn a rounding."""
    errors = found["errors"]
    worst = max(errors, key=errors.__getitem__)
    assert errors[worst] <= (2.0**-2 if way.fp8 else 2.0**-4), (worst, errors[worst])
    assert found["ranks equal"]


BETWEEN_STAGES = "gloo sends no GPU's memory from one stage to the next"


@pytest.mark.gpu
@pytest.mark.parametrize("way", ON_GPU, ids=str)
def test_stages_of_shared_rows_on_four_gpus(way: Way) -> None:
    for found in results(ON_GPU, backend_on_gpus(4, BETWEEN_STAGES)):
        check_on_gpu(found[str(way)], way)


@pytest.mark.gpu
@pytest.mark.parametrize("way", REPLAYED_ON_GPU, ids=str)
def test_replayed_stages_of_shared_rows_on_four_gpus(way: Way) -> None:
    for found in results(REPLAYED_ON_GPU, backend_on_gpus(4, BETWEEN_STAGES), replays=True):
        check_on_gpu(found[str(way)], way)
        assert found[str(way)]["replayed"] == (STEPS - 1) * way.microbatches


def in_stages(self: Any) -> bool:
    return PipelineParallel.of(self.model) is not None


def labels_before_the_shift() -> Any:
    """A rank cuts labels, and shifts them then: the last token of a chunk gets the label of its next chunk."""
    right = stages.shifted

    def wrong(self: PipelineParallel, labels: Tensor, items: Any, inputs: Any, trains: bool) -> Any:
        count = (right(labels) != -100).sum()
        given = self.context.own_inputs(labels, inputs)  # type: ignore[union-attr]
        own = right(self.context.shard(labels))  # type: ignore[union-attr]
        return self.run(stages.microbatches_of(own, given, 4, 2), count, trains)

    return patch.object(PipelineParallel, "_step", wrong)


def gradients_of_one_rank() -> Any:
    right = ContextParallel.reduce_gradients
    return patch.object(
        ContextParallel, "reduce_gradients", lambda self: None if in_stages(self) else right(self)
    )


def masks_of_the_first_rank() -> Any:
    """Masks of a stage's adapters are those of the first tokens of all rows."""
    right = OwnChunks.of

    def wrong(self: OwnChunks, own: int) -> None:
        if len(self._adapters) == 4 * len(LINEARS):  # of the model without stages
            right(self, own)

    return patch.object(OwnChunks, "of", wrong)


def scales_of_one_rank() -> Any:
    """The scales of a stage are not reduced over the ranks that share its rows."""
    right = ContextParallel.attach

    def wrong(self: ContextParallel, layers: Any) -> ContextParallel:
        found = right(self, layers)
        if in_stages(self):
            fp8_state(self.model).shared_over = ()
        return found

    return patch.object(ContextParallel, "attach", wrong)


FAULTS: dict[str, tuple[Way, Callable[[], AbstractContextManager[Any]], str]] = {
    "labels": (PLAIN, labels_before_the_shift, "loss in step 0"),
    "gradients": (PLAIN, gradients_of_one_rank, "lora_B in step 0"),
    "masks": (Way("", dropout=0.3), masks_of_the_first_rank, "lora_A in step 1"),
    "scales": (Way("", fp8=True), scales_of_one_rank, "scales of x in step 0"),
}


def faulty(rank: int, device: torch.device) -> dict[str, list[str]]:
    mesh, found = mesh_of(device), {}
    for name, (way, fault, _) in FAULTS.items():
        with fault(), patch.object(ContextParallel, "check"):
            found[name] = compare(device, way, mesh)["unequal"]
    return found


def test_a_fault_is_seen() -> None:
    """On one of the ranks at least: the first one has the right masks, and one has the largest amaxes."""
    ranks = on_ranks(faulty, 4, "gloo")
    for name, (_, _, what) in FAULTS.items():
        seen = [said for found in ranks for said in found[name]]
        assert any(said.endswith(what) for said in seen), (name, seen[:9])


def refusals(rank: int, device: torch.device) -> dict[str, str]:
    mesh, way = mesh_of(device), Way("", microbatches=2)
    shared = make(way, device)
    context_parallel(shared, mesh["cp"])
    found = {"order": refused(lambda: pipeline_parallel(shared, mesh["pp"], microbatches=2))}
    early = make(way, device)
    pipeline_parallel(early, mesh["pp"], microbatches=2)
    found["the same ranks"] = refused(lambda: context_parallel(early, mesh["pp"]))
    last = make(Way("", family="Qwen2"), device)
    last.get_submodule("model.layers.3.self_attn").sliding_window = 8  # type: ignore[assignment]
    pipeline_parallel(last, mesh["pp"], microbatches=2)
    found["a window in one stage"] = refused(lambda: context_parallel(last, mesh["cp"]))
    model = make(way, device)
    cut = pipeline_parallel(model, mesh["pp"], microbatches=2)
    context = context_parallel(model, mesh["cp"])
    labels, inputs = batch(0, way, device)
    tokens = inputs["input_ids"]
    places = torch.arange(LENGTH).repeat(len(tokens), 1)
    found["loss"] = refused(lambda: context.loss(labels, input_ids=tokens))
    found["length"] = refused(lambda: cut.loss(labels[:, :10], input_ids=tokens[:, :10]))
    found["mask"] = refused(
        lambda: cut.loss(labels, input_ids=tokens, attention_mask=torch.ones_like(tokens))
    )
    jump = places.clone()
    jump[0, 5:] = places[0, :-5] if rank == 3 else jump[0, 5:]  # on one rank of four
    found["a jump on one rank"] = refused(
        lambda: cut.forward_backward(labels, input_ids=tokens, position_ids=jump)
    )
    starts = torch.tensor([0, 5, tokens.numel() - 1], dtype=torch.int32)
    packed = {"input_ids": tokens, "position_ids": places, "cu_seq_lens_q": starts}
    found["starts"] = refused(lambda: cut.forward_backward(labels, **packed))
    some = slice(0, 2 + 2 * (rank % 2))
    found["other rows"] = refused(lambda: cut.loss(labels[some], input_ids=tokens[some]))
    last = rank == 3  # of a stage whose other rank is right
    fewer = slice(0, 2 if last else 4)
    found["other rows on one rank"] = refused(
        lambda: cut.loss(labels[fewer], input_ids=tokens[fewer])
    )
    short = slice(0, 10 if last else LENGTH)
    found["length on one rank"] = refused(
        lambda: cut.loss(labels[:, short], input_ids=tokens[:, short])
    )
    found["positions on one rank"] = refused(
        lambda: cut.loss(labels, input_ids=tokens, position_ids=places if last else None)
    )
    wanted = context.shard(shifted(labels))
    rows = microbatches_of(wanted, {n: context.shard(x) for n, x in inputs.items()}, 2, 2)
    another_forward_on(rank, 3, cut)
    context.checks_places = False  # as in finetune, whose rows are right
    found["another forward on one rank"] = refused(lambda: cut.run(rows, 3, True))
    context.checks_places = True
    found["another forward in a step"] = refused(lambda: cut.forward_backward(labels, **inputs))
    for layer in cut.layers.values():
        vars(layer).pop("forward", None)
    found["right"] = refused(lambda: cut.forward_backward(labels, **inputs))
    context.close()
    whole = make(way, device)
    expected = step_alone(whole, labels, inputs, way)
    alone = pipeline_parallel(make(way, device), mesh["pp"], microbatches=2)
    found["closed"] = refused(lambda: cut.forward_backward(labels, **inputs))
    found["as before"] = str(bool(alone.loss(labels, **inputs) == expected))
    found["closed loss"] = str(bool(cut.loss(labels, **inputs) == expected))
    return found


def test_what_does_not_fit_is_refused_on_all_ranks() -> None:
    expected = {
        "order": "since context_parallel (and 38 more): call pipeline_parallel first, then context_parallel",
        "the same ranks": "has stages on these ranks already: rows over ranks need a dimension of their own",
        "a window in one stage": "model.layers.3 has a sliding window of 8",
        "loss": "RuntimeError: the model was cut into stages: call PipelineParallel.forward_backward",
        "length": "ValueError: rows over 2 ranks must have a positive multiple of 4 tokens, found (4, 10)",
        "mask": "ValueError: attention_mask must be None over ranks",
        "a jump on one rank": "must have equal rows, found other values of position_ids on rank 1 than on rank 0",
        "starts": "cu_seq_lens_q must go up from 0 to all 48 tokens of 4 rows over 2 ranks, found 0 to 47",
        "other rows": "all ranks that share rows must run a step of equal rows and options, found by rank [",
        "other rows on one rank": "must run a step of equal rows and options, found by rank [",
        "length on one rank": "rows over 2 ranks must have a positive multiple of 4 tokens, found (4, 10)",
        "positions on one rank": "must run a step of equal rows and options, found by rank [",
        "another forward on one rank": "model.layers.2 is compiled since it was cut",
        "another forward in a step": "model.layers.2 is compiled since it was cut",
        "right": "nothing",
        "closed": "nothing",
        "as before": "True",
        "closed loss": "True",
    }
    for found in on_ranks(refusals, 4, "gloo"):
        assert found.keys() == expected.keys()
        for name, text in expected.items():
            assert text in found[name], (name, found[name])


def files(rank: int, device: torch.device, folder: str) -> list[str]:
    """Who wrote, where all saved; and what differs after all have read another adapter."""
    mesh, way, wrote = mesh_of(device), Way("", microbatches=2), []
    whole, model = make(way, device), make(way, device)
    pipeline_parallel(model, mesh["pp"], microbatches=2)
    context_parallel(model, mesh["cp"])
    right = adapters.write_files

    def noted(*given: Any) -> None:
        wrote.append(f"rank {rank}")
        right(*given)

    with patch.object(adapters, "write_files", noted):
        save_adapter(model, f"{folder}/saved")
    dist.barrier()
    if rank == 0:
        save_adapter(whole, f"{folder}/whole")
        with torch.no_grad():
            for p in whole.parameters():
                p += 1.0
        save_adapter(whole, f"{folder}/other")
    dist.barrier()
    load_adapter(model, f"{folder}/other")
    expected = load_file(f"{folder}/other/adapter_model.safetensors")
    for name, p in model.named_parameters():
        if p.requires_grad and not torch.equal(p, expected[f"base_model.model.{name}.weight"]):
            wrote.append(f"{name} differs")
    return wrote


def test_one_rank_writes_the_files_of_one_process(tmp_path: Path) -> None:
    assert on_ranks(files, 4, "gloo", str(tmp_path)) == [["rank 0"], [], [], []]
    for name in ("adapter_model.safetensors", "adapter_config.json"):
        assert (tmp_path / "saved" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()


def memory(rank: int, device: torch.device, fused: bool) -> list[bool]:
    """Of each layer, whether some of its weights' memory is there."""
    model = make(Way("", fp8=True, fused=fused), device)
    refs = [
        [StorageWeakRef(p.untyped_storage()) for p in layer.parameters()]
        for layer in model.get_submodule("model.layers").children()
    ]
    mesh, way = mesh_of(device), Way("", microbatches=2)
    cut = pipeline_parallel(model, mesh["pp"], microbatches=2)
    context_parallel(model, mesh["cp"])
    labels, inputs = batch(0, way, device)
    cut.forward_backward(labels, **inputs)
    gc.collect()
    return [any(not ref.expired() for ref in layer) for layer in refs]


@pytest.mark.parametrize("fused", [False, True], ids=["unfused", "fused"])
def test_the_memory_of_other_layers_is_free(fused: bool) -> None:
    first, last = [True, True, False, False], [False, False, True, True]
    assert on_ranks(memory, 4, "gloo", fused) == [first, first, last, last]


def clipped(rank: int, device: torch.device) -> list[float]:
    """The norms, of stages of shared rows and of one process."""
    mesh, way = mesh_of(device), Way("", microbatches=2)
    labels, inputs = batch(0, way, device)
    whole, model = make(way, device), make(way, device)
    step_alone(whole, labels, inputs, way)
    cut = pipeline_parallel(model, mesh["pp"], microbatches=2)
    context = context_parallel(model, mesh["cp"])
    cut.forward_backward(labels, **inputs)
    context.reduce_gradients()
    trained = [p for p in whole.parameters() if p.requires_grad]
    return [float(torch.nn.utils.clip_grad_norm_(trained, 0.01)), float(cut.clip_grad_norm_(0.01))]


def test_gradients_are_clipped_by_the_norm_of_all() -> None:
    for alone, over_ranks in on_ranks(clipped, 4, "gloo"):
        assert abs(alone - over_ranks) <= 2 * FP32 * alone
