# SPDX-License-Identifier: Apache-2.0
"""Rows cut over 2 and 4 ranks train as in one process; documents do not see each other; what is refused."""

from __future__ import annotations

import copy
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from lorakernels import DelayedScaling, LoRAConfig, apply_lora, attach, fuse, unfuse
from lorakernels.parallel import context_parallel, parallelize
from tests.distributed.context_models import DOCUMENTS, Way, batch, make, positions, worker
from tests.fusion.fused_models import FP32, adapted, an_adapter, fp8_state, model_of
from tests.processes import backend_on_gpus, on_ranks

pytestmark = pytest.mark.slow
PLAIN = Way("plain")
WORLDS = {
    2: (
        PLAIN,
        Way("whole rows", documents=False),
        Way("dropout", dropout=0.1),
        Way("checkpointed", dropout=0.1, checkpoint=True),
        Way("fused", fused=True),
        Way("fused, dropout", dropout=0.1, fused=True),
        Way("fused, checkpoint", dropout=0.1, fused=True, save="checkpoint"),
        Way("FP8", dropout=0.1, fp8=True),
        Way("fused, FP8, over a sharded base", dropout=0.1, fp8=True, fused=True, sharded=True),
        Way("blocks", dropout=0.1, blocks=True),
        Way("fused, blocks, checkpoint", dropout=0.1, blocks=True, fused=True, save="checkpoint"),
        Way("scales updated by the layers", fp8=True, automatic=True),
        Way("Qwen3, fused", fused=True, family="Qwen3"),
        Way("Granite, whose logits are divided", family="Granite"),
    ),
    4: (
        PLAIN,
        Way("fused, FP8", dropout=0.1, fp8=True, fused=True),
        Way("2 x 2", dropout=0.1, vocabulary=False),
        Way("2 x 2, vocabulary", vocabulary=True),
        Way("2 x 2, fused", dropout=0.1, fused=True, vocabulary=True),
        Way("2 x 2, fused, FP8", fused=True, fp8=True, save="full", vocabulary=False),
        Way("2 x 2, FP8", dropout=0.1, fp8=True, automatic=True, vocabulary=True),
    ),
}
_ran: dict[int, Any] = {}
_on_gpus: dict[int, Any] = {}


def results(world: int) -> Any:
    if world not in _ran:
        _ran[world] = on_ranks(worker, world, "gloo", [*WORLDS[world]])
    return _ran[world]


ON_GPU = (
    Way("fp32", dropout=0.1),
    Way("fused, fp32", dropout=0.1, fused=True),
    Way("fused, bf16", fused=True, dtype=torch.bfloat16),
    Way("fused, bf16, FP8", dropout=0.1, fp8=True, fused=True, dtype=torch.bfloat16),
    Way("fused, bf16, blocks", dropout=0.1, blocks=True, fused=True, dtype=torch.bfloat16),
)


@pytest.mark.gpu
def test_two_processes_on_one_gpu() -> None:
    """bf16 rounds to 2^-9 at each of some twenty places; FP8 as on a CPU, and bf16 turns more roundings."""
    for found in on_ranks(worker, 2, "cuda:gloo", [*ON_GPU]):
        for way in ON_GPU:
            bound = (
                2.0**-2
                if way.fp8 or way.blocks
                else 2.0**-4
                if way.dtype == torch.bfloat16
                else 2 * FP32
            )
            errors = found[str(way)]["errors"]
            worst = max(errors, key=errors.__getitem__)
            assert found[str(way)]["unequal"] == [] and errors[worst] <= bound, (
                worst,
                errors[worst],
            )


BF16: dict[str, Any] = {"fused": True, "dtype": torch.bfloat16}
# of which FP8 kernels take the half, too
BF16["model"] = {"hidden_size": 64, "intermediate_size": 96, "num_key_value_heads": 4}
ON_FOUR = (
    Way("four ranks, FP8, checkpoint, sharded", fp8=True, save="checkpoint", sharded=True, **BF16),
    Way("four ranks, whole rows, checkpoint", documents=False, save="checkpoint", **BF16),
    Way("2 x 2", vocabulary=True, **BF16),
    Way("2 x 2, dropout", dropout=0.1, vocabulary=False, save="checkpoint", **BF16),
    Way("2 x 2, FP8", dropout=0.1, fp8=True, vocabulary=True, **BF16),
    Way("2 x 2, FP8, kept in full", fp8=True, vocabulary=False, save="full", **BF16),
    Way("2 x 2, not fused", dropout=0.1, vocabulary=True, **{**BF16, "fused": False}),
)


@pytest.mark.gpu
@pytest.mark.parametrize("way", ON_FOUR, ids=str)
def test_four_ranks_on_gpus_train_as_one(way: Way) -> None:
    """Bounds as of two processes on one GPU."""
    if 4 not in _on_gpus:
        _on_gpus[4] = on_ranks(worker, 4, backend_on_gpus(4), [*ON_FOUR])
    for found in _on_gpus[4]:
        assert found[str(way)]["unequal"] == []
        errors = found[str(way)]["errors"]
        worst = max(errors, key=errors.__getitem__)
        assert errors[worst] <= (2.0**-2 if way.fp8 else 2.0**-4), (worst, errors[worst])


CASES = [pytest.param(w, way, id=f"{w} ranks-{way}") for w, ways in WORLDS.items() for way in ways]


@pytest.mark.slow
@pytest.mark.parametrize(("world", "way"), CASES)
def test_rows_over_ranks_train_as_in_one_process(world: int, way: Way) -> None:
    """Sums of fp32 have another order. Over FP8 one such difference may turn one rounding, 2^-3 of an element of dy,
    and in the first step each rank's tokens have a scale of their own. Blocks have the same scales."""
    bound = 2.0**-3 if way.fp8 or way.blocks else 2 * FP32
    for found in results(world):
        assert found[str(way)]["unequal"] == []
        errors = found[str(way)]["errors"]
        worst = max(errors, key=errors.__getitem__)
        assert errors[worst] <= bound, (worst, errors[worst])


def hidden(context: Any, tokens: Tensor) -> Tensor:
    """[B, S, H] of all tokens."""
    starts = torch.tensor(DOCUMENTS, dtype=torch.int32)
    own = {"input_ids": tokens, "position_ids": positions()}
    own = {name: context.shard(value) for name, value in own.items()}
    base: Any = context.model.base_model
    found = base(**own, cu_seq_lens_q=starts, max_length_q=12, use_cache=False)
    whole: Tensor = context.whole(found.last_hidden_state)
    return whole


def leaks(rank: int, device: torch.device, fused: bool) -> list[bool]:
    """For each document of tokens: whether a change of its tokens changes it alone."""
    model = make(PLAIN, device)
    if fused:
        fuse(model)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("cp",))
    context = context_parallel(model, mesh["cp"])
    tokens, _ = batch(0, device)
    with torch.no_grad():
        before = hidden(context, tokens).flatten(0, 1)
        found = []
        for start, end in pairwise(DOCUMENTS):
            if start == end:
                continue
            other = tokens.flatten().clone()
            other[start] = (other[start] + 1) % 64
            after = hidden(context, other.view_as(tokens)).flatten(0, 1)
            changed = (before != after).any(-1)
            inside = torch.zeros_like(changed)
            inside[start:end] = True
            found.append(bool(changed[start:end].all()) and not bool(changed[~inside].any()))
    return found


@pytest.mark.parametrize("fused", [False, True], ids=["unfused", "fused"])
def test_a_document_changes_no_other_by_a_bit(fused: bool) -> None:
    for found in on_ranks(leaks, 2, "gloo", fused):
        assert found == [True] * 5


def refused(call: Callable[[], Any]) -> str:
    try:
        call()
    except (TypeError, ValueError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def with_dropout(model: nn.Module) -> nn.Module:
    model.get_submodule("model.layers.1.mlp").add_module("drop", nn.Dropout(0.1))
    return model


def another_adapter(rank: int, model: nn.Module) -> nn.Module:
    with torch.no_grad():
        an_adapter(model).lora_A.add_(rank)
    return model


def with_dora(device: torch.device) -> nn.Module:
    return adapted(use_dora=True, lora_dropout=0.1)


def fused_flash8(device: torch.device) -> nn.Module:
    model = make(PLAIN, device)
    fuse(model, attention="cudnn")
    return model


def refusals(rank: int, device: torch.device) -> dict[str, str]:
    from peft import LoraConfig, get_peft_model

    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("cp",))
    both = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "cp"))
    window = Way("window", family="Mistral", model={"sliding_window": 8})
    split = make(Way("", fp8=True), device)
    parallelize(split, mesh["cp"])
    made: dict[str, Callable[[], nn.Module]] = {
        "no model": lambda: nn.Linear(2, 2),
        "window": lambda: make(window, device),
        "cap": lambda: make(Way("cap", family="Gemma2"), device),
        "dropout": lambda: with_dropout(make(PLAIN, device)),
        "dora": lambda: with_dora(device),
        "attention": lambda: fused_flash8(device),
        "adapters": lambda: another_adapter(rank, make(PLAIN, device)),
        "split": lambda: split,
        "PEFT": lambda: get_peft_model(model_of("Llama"), LoraConfig(target_modules=["q_proj"])),
    }
    found = {}
    for name, model in made.items():
        given = model()
        found[name] = refused(lambda given=given: context_parallel(given, mesh["cp"]))  # type: ignore[misc]
    model = make(PLAIN, device)
    found["mesh"] = refused(lambda: context_parallel(model, both))
    context = context_parallel(model, mesh["cp"])
    tokens, labels = batch(0, device)
    own = context.shard(tokens)
    found["twice"] = refused(lambda: context_parallel(model, mesh["cp"]))
    found["labels"] = refused(lambda: model(own, labels=own))
    found["positions"] = refused(lambda: model(own))
    found["mask"] = refused(
        lambda: model(own, position_ids=own, attention_mask=torch.ones_like(own))
    )
    found["length"] = refused(lambda: context.loss(labels[:, :6], input_ids=tokens[:, :6]))
    found["shapes"] = refused(lambda: context.loss(labels[:1], input_ids=tokens))
    found["input"] = refused(lambda: context.loss(labels, input_ids=tokens, attention_mask=tokens))
    found["no input"] = refused(lambda: context.loss(labels))
    found["items"] = refused(lambda: context.loss(labels, items=8 + rank, input_ids=tokens))
    model.train(rank == 0)
    found["modes"] = refused(lambda: context.loss(labels, input_ids=tokens))
    model.train()
    model.set_attn_implementation("sdpa")
    found["changed"] = refused(lambda: context.loss(labels, input_ids=tokens))
    context.close()
    found["closed"] = refused(lambda: model(tokens, labels=labels).loss.backward())
    return found


def test_what_does_not_fit_is_refused_on_all_ranks() -> None:
    pytest.importorskip("peft")
    expected = {
        "no model": "TypeError: model must be one of transformers, found Linear",
        "window": "ValueError: model.layers.0 has a sliding window of 8",
        "cap": "ValueError: model.layers.0 has a",
        "dropout": "ValueError: model.layers.1.mlp.drop is Dropout(p=0.1",
        "dora": "q_proj is a DoRALinear with dropout",
        "attention": "ValueError: model.layers.0 has attention='cudnn'",
        "adapters": "ValueError: all ranks of the group must have the same model, but the values of",
        "split": "is split over these ranks already",
        "PEFT": "found PeftModel around it: give its get_base_model()",
        "mesh": "ValueError: mesh must have one dimension",
        "twice": "has its rows over ranks since context_parallel",
        "labels": "ValueError: labels: the model sees this rank's tokens alone",
        "positions": "ValueError: position_ids must be given",
        "mask": "ValueError: attention_mask must be None over ranks",
        "length": "ValueError: rows over 2 ranks must have a positive multiple of 4 tokens, found (2, 6)",
        "shapes": "ValueError: labels must be int64 [2, 16] as the rows, found torch.int64 [1, 16]",
        "input": "TypeError: loss takes",
        "no input": "TypeError: loss needs input_ids or inputs_embeds",
        "items": "ValueError: all ranks must have equal modes and items, found by rank ['training True",
        "modes": "ValueError: all ranks must have equal modes and items, found by rank ['training True",
        "changed": "RuntimeError: attention no longer runs over the ranks: attn_implementation is 'sdpa'",
        "closed": "nothing",
    }
    for found in on_ranks(refusals, 2, "gloo"):
        assert found.keys() == expected.keys()
        for name, text in expected.items():
            assert text in found[name], (name, found[name])


def shape_of(model: nn.Module) -> list[Any]:
    """What a change of layers or adapters would change."""
    own = [(n, type(m), [*m._parameters], len(vars(m))) for n, m in model.named_modules()]
    return [own, [(n, p.requires_grad) for n, p in model.named_parameters()]]


def too_late(rank: int, device: torch.device) -> dict[str, Any]:
    """What is said of changes to layers once rows are over ranks, whether nothing changed, and after `close`."""
    from peft import LoraConfig, get_peft_model

    from lorakernels.integrations import peft as ours

    mesh, found = init_device_mesh("cpu", (2,), mesh_dim_names=("cp",))["cp"], {}
    plain, part = model_of("Llama"), model_of("Llama")
    adapters = LoRAConfig(target_modules=["q_proj"], fp8=None)
    unfused, fused, whole = (make(PLAIN, device) for _ in range(3))
    fuse(fused)
    first, on_others = (
        ours.register(LoraConfig(target_modules=[name]), fp8=None) for name in ("q_proj", "v_proj")
    )
    theirs, others = (get_peft_model(model_of("Llama"), copy.deepcopy(first)) for _ in range(2))
    calls: dict[str, tuple[nn.Module, Callable[[], Any]]] = {
        "add adapters": (plain, lambda: apply_lora(plain, adapters)),
        "add adapters to a part": (part, lambda: apply_lora(part.model.layers[0], adapters)),
        "add adapters by PEFT": (theirs, lambda: theirs.add_adapter("b", first)),
        "add adapters to other layers by PEFT": (others, lambda: others.add_adapter("b", on_others)),
        "fuse": (unfused, lambda: fuse(unfused)),
        "unfuse": (fused, lambda: unfuse(fused)),
        "parallelize": (whole, lambda: parallelize(whole, mesh)),
    }  # fmt: skip
    for name, (model, call) in calls.items():
        base = model.get_base_model() if model in (theirs, others) else model
        context = context_parallel(base, mesh)
        before = shape_of(model)
        said = refused(call)
        same = shape_of(model) == before
        context.close()
        found[name] = said, same, refused(call)
    return found


def test_what_changes_layers_comes_before_rows_are_over_ranks() -> None:
    """New adapters would draw equal masks on all ranks, and fused layers would attend to this rank's tokens alone."""
    pytest.importorskip("peft")
    for found in on_ranks(too_late, 2, "gloo"):
        for name, (said, same, closed) in found.items():
            verb = " ".join(name.split()[: 2 if "add" in name else 1])
            assert "has its rows over ranks since context_parallel" in said
            assert f"it is too late to {verb}: call ContextParallel.close" in said
            assert same and closed == "nothing", (name, closed)


def a_mask_of_pefts(rank: int, device: torch.device) -> list[str]:
    """What `check` says before and after an adapter of PEFT's own layers, which ask nobody, is added on a rank."""
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(0)
    model = get_peft_model(model_of("Llama"), LoraConfig(target_modules=["q_proj"]))
    context = context_parallel(model.get_base_model(), init_device_mesh("cpu", (2,)))
    found = [refused(context.check)]
    if rank:
        model.add_adapter("b", LoraConfig(target_modules=["q_proj"], lora_dropout=0.1))
    return [*found, refused(context.check)]


def test_check_finds_masks_that_came_later() -> None:
    pytest.importorskip("peft")
    for rank, (before, after) in enumerate(on_ranks(a_mask_of_pefts, 2, "gloo")):
        said = "model.layers.0.self_attn.q_proj.lora_dropout.b is Dropout(p=0.1"
        assert before == "nothing"
        assert after.startswith("ValueError: " + ("" if rank else "rank 1: ") + said)


def states_of_peft(rank: int, device: torch.device) -> list[Any]:
    """How many groups share each FP8 state of PEFT's layers, which made one each: first, after `attach`, and closed."""
    from peft import LoraConfig, get_peft_model

    from lorakernels.integrations import peft as ours

    torch.manual_seed(0)
    config = ours.register(LoraConfig(target_modules=["q_proj", "o_proj"]), fp8=DelayedScaling())
    model = get_peft_model(model_of("Llama"), config)
    context = context_parallel(model.get_base_model(), init_device_mesh("cpu", (2,)))

    def shared() -> list[int]:
        states = {id(s): s for m in model.modules() if (s := getattr(m, "fp8_state", None))}
        return [len(state.shared_over) for state in states.values()]

    found = [shared()]
    attached = attach(model, torch.optim.SGD([p for p in model.parameters() if p.requires_grad]))
    found.append(shared())
    attached.detach()
    context.close()
    return [*found, shared()]


def test_attach_keeps_the_ranks_that_share_scales() -> None:
    pytest.importorskip("peft")
    assert on_ranks(states_of_peft, 2, "gloo") == [[[1], [1], [0]]] * 2


def uneven(rank: int, device: torch.device) -> list[Any]:
    """The sums of gradients of which the first rank, the second, or none has one."""
    model = make(PLAIN, device)
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("cp",))
    context = context_parallel(model, mesh["cp"])
    trained = [p for p in model.parameters() if p.requires_grad]
    for owner, p in enumerate(trained[:2]):
        p.grad = torch.full_like(p, 3.0 + rank) if rank == owner or owner == 0 else None
    context.reduce_gradients()
    return [None if p.grad is None else set(p.grad.flatten().tolist()) for p in trained[:3]]


def test_a_gradient_that_one_rank_has_reaches_all() -> None:
    assert on_ranks(uneven, 2, "gloo") == [[{7.0}, {4.0}, None]] * 2


def losses_of_three(rank: int, device: torch.device) -> list[float]:
    """Of rows, each between 3.5 and 4 while a rank's part is between 1 and 2, with one bit more behind its point."""
    model, found = make(PLAIN, device), []
    context = context_parallel(model, init_device_mesh(device.type, (3,)))
    generator = torch.Generator().manual_seed(0)
    for _ in range(100):
        rows = torch.randint(8, (1, 12), generator=generator)
        with torch.no_grad():
            found.append(float(context.loss(rows, items=12, input_ids=rows)))
    return found


@pytest.mark.slow
def test_all_ranks_have_one_loss_to_the_bit() -> None:
    """By which each decides alone whether to stop. Of three parts of a sum, each rank has another."""
    first, *others = on_ranks(losses_of_three, 3, "gloo")
    assert others == [first] * 2


def other_scales(rank: int, device: torch.device) -> dict[str, str]:
    """What is said where rank 1 alone has other values in the FP8State, before and while rows are shared."""
    mesh, found = init_device_mesh("cpu", (2,), mesh_dim_names=("cp",))["cp"], {}
    tokens, labels = batch(0, device)
    places = {"scale": ("forward", -1), "history": ("backward", 1), "amax of now": ("backward", 0)}
    for name, (direction, row) in places.items():
        model = make(Way("", fp8=True), device)
        values = getattr(fp8_state(model), direction)
        values[row, :2] = torch.tensor(
            [2.0, 4.0][:: 1 - 2 * rank]
        )  # the same values in other places
        found[name] = refused(lambda model=model: context_parallel(model, mesh))
    context = context_parallel(make(Way("", fp8=True), device), mesh)
    context.loss(labels, input_ids=tokens).backward()
    found["before the update"] = refused(context.check)
    state = fp8_state(context.model)
    state.reduce_and_update()
    found["after it"] = refused(context.check)
    state.forward[-1, 0] *= 1.0 + rank
    found["drifted"] = refused(context.check)
    return found


def test_ranks_with_other_fp8_scales_are_refused() -> None:
    text = "scales and amax histories of FP8State 0, as its state_dict has them, differ between rank 0 and rank 1"
    differ = {"scale", "history", "drifted"}
    for found in on_ranks(other_scales, 2, "gloo"):
        assert {name for name, said in found.items() if text in said} == differ, found
        others = {said for name, said in found.items() if name not in differ}
        assert len(others) == 1, found  # nothing was refused


def closing(rank: int, device: torch.device, fused: bool) -> list[bool]:
    """Whether a closed model gives the bits that it gave before."""
    model = make(Way("", fp8=True, dropout=0.1), device)
    if fused:
        fuse(model)
    tokens, labels = batch(0, device)

    def loss() -> Tensor:
        torch.manual_seed(4)
        found: Tensor = model(tokens, labels=labels, use_cache=False).loss.detach()
        return found

    state, _ = fp8_state(model), loss()
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("cp",))
    state.reduce_and_update()
    before = loss()
    context = context_parallel(model, mesh["cp"])
    context.loss(labels, input_ids=tokens)
    context.close()
    after = loss()
    return [torch.equal(before, after), state.shared_over == (), an_adapter(model).chunks == ()]


@pytest.mark.parametrize("fused", [False, True], ids=["unfused", "fused"])
def test_a_closed_model_is_as_before(fused: bool) -> None:
    for found in on_ranks(closing, 2, "gloo", fused):
        assert found == [True] * 3
