# SPDX-License-Identifier: Apache-2.0
"""graphed_generation: tokens of the same call without a graph, and what it refuses.

On a CPU a graph is stood in for by the forward itself, which runs again into the captured result.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from benchmarks.lib.generation import repeatable_attention
from lorakernels import BlockScaling, DelayedScaling, batch_adapters
from lorakernels.integrations import generation
from lorakernels.integrations.generation import graphed_generation
from tests.fusion.fused_models import LINEARS, adapted, fused_copy, tokens
from tests.fusion.fused_models import model_of as plain_model

OPTIONS = {"max_new_tokens": 7, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
STATIC = {"cache_implementation": "static", "disable_compile": True}
LOGITS = {"output_logits": True, "return_dict_in_generate": True}


class Stand:
    """In place of `captured`: counts captures and replays, and leaves the cache of a capture as it was."""

    def __init__(self) -> None:
        self.caches: list[Any] = []
        self.captures = self.replays = 0

    def check(self, cache: Any) -> None:
        self.caches.append(cache)
        _check_cache(cache)

    def __call__(self, run: Callable[[], Any]) -> tuple[Callable[[], object], Any]:
        layers = self.caches[-1].layers
        held = [t for layer in layers for t in (layer.keys, layer.values, layer.cumulative_length)]
        before = [t.clone() for t in held]
        result = run()
        for tensor, value in zip(held, before, strict=True):
            tensor.copy_(value)
        self.captures += 1

        def replay() -> None:
            self.replays += 1
            result.logits.copy_(run().logits)

        return replay, result


_check_cache = generation._check_cache


@pytest.fixture
def stand(monkeypatch: pytest.MonkeyPatch) -> Stand:
    made = Stand()
    monkeypatch.setattr(generation, "captured", made)
    monkeypatch.setattr(generation, "_check_cache", made.check)
    monkeypatch.setattr(generation, "check_device", lambda device: None)
    return made


def model_of(fused: bool) -> nn.Module:
    torch.manual_seed(0)
    made = adapted("Llama", LINEARS, fp8=DelayedScaling()).eval()
    return fused_copy(made)[0] if fused else made


def said(model: Any, x: Tensor, **options: Any) -> Any:
    """Tokens [B, T + new]; with LOGITS transformers' result, which has them and the logits."""
    return model.generate(x, **{**OPTIONS, **STATIC, **options})


@pytest.mark.parametrize("fused", [False, True], ids=["not fused", "fused"])
def test_tokens_are_those_without_a_graph(fused: bool, stand: Stand) -> None:
    model, x = model_of(fused), tokens(2, 5)
    mask = torch.ones_like(x)
    mask[0, :2] = 0
    calls: list[dict[str, Any]] = [{}, {"attention_mask": mask}, {"max_new_tokens": 3}]
    expected = [said(model, x, **call) for call in calls] + [said(model, x[:, :1])]
    forward = model.forward
    with graphed_generation(model):
        found = [said(model, x, **call) for call in calls] + [said(model, x[:, :1])]
        y = model(input_ids=x, use_cache=False).logits  # no cache: as before
    assert y.requires_grad and model.forward == forward and "forward" not in vars(model)
    assert all(map(torch.equal, found, expected))
    # of n tokens the prompt's and the next one are eager; a prompt of one token warms up itself
    assert stand.captures == 4 and stand.replays == 5 + 5 + 1 + 6


def test_masks_and_positions_are_made_as_without_a_graph(stand: Stand) -> None:
    """By the forward's signature: for pad ids without a mask, and for rows that begin later. In 16 bits they show."""
    model, x = adapted("Llama", LINEARS, fp8=DelayedScaling(), dtype=torch.bfloat16), tokens(2, 5)
    model.eval()
    x[0, :2] = 0
    later = torch.ones_like(x)
    later[0, :2] = 0
    calls: list[dict[str, Any]] = [{}, {"attention_mask": later}]
    for call in calls:
        expected = said(model, x, **call, **LOGITS)
        with graphed_generation(model):
            found = said(model, x, **call, **LOGITS)
        assert [t.shape for t in found.logits] == [t.shape for t in expected.logits]
        assert all(map(torch.equal, found.logits, expected.logits))


def test_a_prompt_in_a_kept_cache_has_a_graph_of_its_own(stand: Stand) -> None:
    """Adapters may be merged or switched between."""
    from transformers import StaticCache

    model, x = model_of(fused=False), tokens(2, 5)
    cache = StaticCache(model.config, max_cache_len=12)
    kept = {"past_key_values": cache, "cache_implementation": None}
    with graphed_generation(model):
        said(model, x, **kept)
        cache.reset()
        said(model, x, **kept)
    assert stand.captures == 2


def test_a_model_inside_of_peft_s(stand: Stand) -> None:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(
        target_modules=["q_proj"], task_type="CAUSAL_LM", init_lora_weights=False
    )
    model, x = peft.get_peft_model(plain_model("Llama"), config).eval(), tokens(2, 5)
    expected = said(model, x)
    with graphed_generation(model):
        assert torch.equal(said(model, x), expected)
    assert stand.captures == 1 and stand.replays == 5


def test_a_model_of_several_adapters(stand: Stand) -> None:
    """Before a forward it looks at the number of sequences, which is the graph's own."""
    model, x = model_of(fused=False), tokens(2, 5)
    batch_adapters(model, ["a", "b"])
    expected = said(model, x)
    with graphed_generation(model):
        assert torch.equal(said(model, x), expected)
        with pytest.raises(ValueError, match="2 adapters must divide the sequences, found 1"):
            said(model, x[:1])
    assert stand.captures == 1 and stand.replays == 5


def test_a_model_on_a_cpu_is_refused() -> None:
    message = "model must be on a GPU, found cpu"
    with pytest.raises(ValueError, match=message), graphed_generation(model_of(fused=False)):
        pass


def test_what_is_refused_at_entry(stand: Stand) -> None:
    model = model_of(fused=True)
    with pytest.raises(ValueError, match="found training mode"), graphed_generation(model.train()):
        pass
    model.eval().model.layers[1].register_forward_hook(lambda *_: None)
    message = r"model\.layers\.1 has a forward hook"
    with pytest.raises(ValueError, match=message), graphed_generation(model):
        pass
    assert "forward" not in vars(model)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"cache_implementation": None}, ValueError, "found DynamicCache .*cache_implementation="),
        ({"num_beams": 2}, RuntimeError, "the cache's tensors were replaced, as beam search does"),
        (
            {"output_hidden_states": True, "return_dict_in_generate": True},
            ValueError,
            "hidden_states must not be requested",
        ),
    ],
)
def test_what_is_refused_in_generate(
    options: dict[str, Any], error: type[Exception], message: str, stand: Stand
) -> None:
    model = model_of(fused=False)
    with graphed_generation(model), pytest.raises(error, match=message):
        said(model, tokens(2, 5), **options)
    assert "forward" not in vars(model)
    with graphed_generation(model):  # also where transformers' hooks for hidden states have stayed
        said(model, tokens(2, 5))


def test_a_call_that_is_not_the_captured_one_is_refused(stand: Stand) -> None:
    from transformers import StaticCache

    model, x = model_of(fused=False), tokens(2, 5)
    cache = StaticCache(model.config, max_cache_len=12)
    token = {"input_ids": x[:, :1], "past_key_values": cache, "use_cache": True}
    with graphed_generation(model), torch.no_grad():
        for _ in range(3):
            model(**token)
        replays = stand.replays
        for other, message in (
            ({"input_ids": x[:1, :1]}, r"captured with .*\(2, 1\).* found .*\(1, 1\)"),
            ({"position_ids": x[:, :1]}, "captured with"),
            ({"use_cache": False}, "captured with another use_cache, found False"),
            ({"logits_to_keep": 1}, "captured with .* found .*logits_to_keep"),
        ):
            with pytest.raises(RuntimeError, match=message):
                model(**{**token, **other})
        assert stand.replays == replays == 2


def test_a_sliding_window_is_refused_without_the_hint_that_was_followed(stand: Stand) -> None:
    model = plain_model("Mistral").eval()
    model.config.sliding_window = 4
    message = r"of \['StaticSlidingWindowLayer'\]: .* count their tokens on the host"
    with graphed_generation(model), pytest.raises(ValueError, match=message):
        said(model, tokens(1, 9))


def test_generate_compiles_nothing_of_it(stand: Stand) -> None:
    """On a GPU `generate` compiles the forward over a static cache; here it is told to."""
    from torch._dynamo.utils import counters
    from transformers import CompileConfig

    model, x = model_of(fused=False), tokens(1, 5)
    config = CompileConfig(backend="eager", mode=None)
    config._compile_all_devices = True
    expected = said(model, x)
    torch._dynamo.reset()
    counters.clear()
    with graphed_generation(model):
        found = said(model, x, disable_compile=False, compile_config=config)
    assert torch.equal(found, expected) and stand.replays == 5
    assert not counters["frames"]


def test_fp8_scales_and_histories_stay_what_they_were(stand: Stand) -> None:
    model, x = model_of(fused=True), tokens(2, 5)
    state = model.model.layers[0].self_attn.q_proj.fp8_state
    before = [t.clone() for t in (state.forward, state.backward)]
    with graphed_generation(model):
        said(model, x)
    assert all(map(torch.equal, (state.forward, state.backward), before))


@pytest.mark.parametrize("recipe", [DelayedScaling(), BlockScaling()], ids=["one scale", "blocks"])
def test_rows_read_each_other_s_amax_but_in_blocks(recipe: Any) -> None:
    """So one bit of one row moves the logits of all rows under DelayedScaling (docs/facts.md, P10)."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 128, "intermediate_size": 256}
    model = adapted("Llama", LINEARS, model=sizes, fp8=recipe).eval()
    x = tokens(8, 5)
    other = x.clone()
    other[1:] = tokens(7, 5)
    one, two = (said(model, of, max_new_tokens=1, **LOGITS).logits[0][0] for of in (x, other))
    assert torch.equal(one, two) == isinstance(recipe, BlockScaling)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "disable_compile", [True, False], ids=["compile disabled", "compile allowed"]
)
@pytest.mark.parametrize("fused", [False, True], ids=["not fused", "fused"])
def test_tokens_of_a_gpu_s_graph(fused: bool, disable_compile: bool) -> None:
    """cuDNN's attention does not repeat its bits for a token (docs/facts.md, P9)."""
    model = gpu_model(fused, {"hidden_size": 128, "intermediate_size": 256})
    x = tokens(2, 5, "cuda")
    mask = torch.ones_like(x)
    mask[0, :2] = 0
    calls: list[dict[str, Any]] = [{}, {"attention_mask": mask}]
    for call in calls:
        with repeatable_attention():
            expected = said(model, x, **call, **LOGITS)
            with graphed_generation(model):
                for _ in range(2):  # the second call has a cache and a graph of its own
                    found = said(model, x, **call, **LOGITS, disable_compile=disable_compile)
                    assert_equal(found, expected)


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [16, 63, 64, 65])
def test_many_rows_say_the_same_fused_or_not_and_by_a_graph(rows: int) -> None:
    """The amax of all rows scales each of them, so that one bit of one row that differs would show in the others."""
    sizes = {"hidden_size": 512, "intermediate_size": 1024}
    x = tokens(rows, 33, "cuda")
    with repeatable_attention():
        for kind in ({}, {"cache_implementation": None}):
            unfused, fused = (said(gpu_model(f, sizes), x, **kind, **LOGITS) for f in (False, True))
            assert_equal(fused, unfused)
        for f in (False, True):
            model = gpu_model(f, sizes)
            expected = said(model, x, **LOGITS)
            with graphed_generation(model):
                assert_equal(said(model, x, **LOGITS), expected)


def gpu_model(fused: bool, sizes: dict[str, int]) -> Any:
    torch.manual_seed(0)
    kind = {"fp8": DelayedScaling(), "dtype": torch.bfloat16, "device": "cuda"}
    model = adapted("Llama", LINEARS, model=sizes, **kind).eval()
    return fused_copy(model)[0] if fused else model


def assert_equal(found: Any, expected: Any) -> None:
    assert torch.equal(found.sequences, expected.sequences)
    assert all(map(torch.equal, found.logits, expected.logits))
