# SPDX-License-Identifier: Apache-2.0
"""The examples run as they stand, and Trainer's path is a whole epoch: eager on a CPU, on imitated graphs, on a GPU."""

from __future__ import annotations

import importlib
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from tests.graphs.fake import FakeBackend

pytest.importorskip("transformers")
pytest.importorskip("accelerate")
BACKENDS = (SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH)
EXAMPLES = Path(__file__).parents[1] / "examples"


@pytest.fixture(autouse=True, scope="module")
def trainer_without_te() -> None:
    """Trainer and Accelerate import PEFT, which imports Transformer Engine where there is one; a TE that was built for
    another cuDNN would end that import, and nothing here needs it."""
    hide = "transformer_engine" not in sys.modules
    if hide:
        sys.modules["transformer_engine"] = None  # type: ignore[assignment]
    try:
        importlib.import_module("transformers").Trainer  # noqa: B018  (imports it)
        importlib.import_module("accelerate")
    finally:
        if hide:
            del sys.modules["transformer_engine"]


def example(name: str) -> dict[str, Any]:
    return runpy.run_path(str(EXAMPLES / name))


def losses(trainer: Any) -> list[float]:
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def test_drop_in(tmp_path, monkeypatch, capsys):
    pytest.importorskip("rich")
    transformers = pytest.importorskip("transformers")
    from tests.synthetic import write_checkpoint

    config = transformers.LlamaConfig(
        vocab_size=128,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    write_checkpoint(tmp_path / "model", config)
    monkeypatch.setattr(sys, "argv", ["drop_in.py", str(tmp_path / "model"), str(tmp_path / "out")])
    example("drop_in.py")
    assert "step 3 loss" in capsys.readouterr().out
    assert (tmp_path / "out" / "adapter_model.safetensors").is_file()
    code = (EXAMPLES / "drop_in.py").read_text().split("\n\n")[-1]
    assert len([line for line in code.splitlines() if line.strip()]) <= 12


def test_kernels_alone():
    """A product of e4m3 values is off by √2 · 2.6 % rms, of e5m2 by 5.8 %; dA has x8 alone, dB nothing."""
    errors = example("kernels_alone.py")["main"]()
    assert errors["y"] < 0.05 and errors["dx"] < 0.08 and errors["dA"] < 0.05
    assert errors["dB"] < 0.01, "bf16 s and dy"


@pytest.mark.slow
def test_trainer_for_an_epoch(tmp_path, capsys, monkeypatch):
    """Fused; eager on a CPU, graphs on a GPU. The adapter is in PEFT's format beside Trainer's checkpoint."""
    seen = min(torch.cuda.device_count(), 1)  # Trainer would take all
    monkeypatch.setattr(torch.cuda, "device_count", lambda: seen)
    trainer = example("trainer.py")["main"](None, str(tmp_path))
    said = capsys.readouterr().out
    on_gpu = torch.cuda.is_available()
    assert ("layers replayed as CUDA graphs" in said) == on_gpu
    assert ("CUDA graphs need a GPU" in said) == (not on_gpu)
    found = losses(trainer)
    assert found[-1] < found[0] - 0.2 and trainer.state.epoch == 1
    assert list(tmp_path.glob("checkpoint-*/adapter/adapter_model.safetensors"))


@pytest.mark.parametrize("family", ["Llama", "Gemma2", "Granite"])
def test_trainer_has_the_loss_of_the_model_that_it_is_given(family):
    """Also of one that changes its logits after the head."""
    transformers = pytest.importorskip("transformers")
    changes = {"Gemma2": {"final_logit_softcapping": 0.5}, "Granite": {"logits_scaling": 8.0}}
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "vocab_size": 64}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "initializer_range": 0.5}
    config = getattr(transformers, f"{family}Config")(**sizes, **heads, **changes.get(family, {}))
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config)
    ids = torch.randint(64, (2, 9))
    inputs = {"input_ids": ids, "labels": ids}
    found = example("trainer.py")["LoRATrainer"].compute_loss(None, model, inputs)
    torch.testing.assert_close(found, model(**inputs).loss)  # fp32, other order of sums


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="imitated graphs are the CPU's")
def test_trainer_replays_imitated_graphs_to_the_same_losses(tmp_path):
    """The same epoch, its masks drawn from frozen nonces after the capture: near, not equal; without dropout equal."""
    module = example("trainer.py")
    main = module["main"]
    main.__globals__["LORA"] = main.__globals__["LORA"].__class__(r=8, target_modules="all-linear")
    with sdpa_kernel(SDPBackend.MATH):  # what the imitation can replay
        eager = main(None, str(tmp_path / "eager"), graphs=False)
        graphed = main(None, str(tmp_path / "graphs"), backend=FakeBackend)
    assert losses(eager) == losses(graphed)
    pairs = zip(eager.model.parameters(), graphed.model.parameters(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)


def test_what_rules_graphs_out_is_said():
    from lorakernels.integrations.transformers import LoRAKernelsCallback

    module = example("trainer.py")
    from lorakernels import PhiloxState

    model, report = module["small_llama"]("cpu", PhiloxState(1))
    arguments = type("Arguments", (), {"gradient_accumulation_steps": 1})()
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad])
    for options, reason in (
        ({"graphs": False}, "graphs=False"),
        ({}, "the model is on cpu"),
        ({"backend": FakeBackend}, "no shape has come 3 times yet"),
    ):
        callback = LoRAKernelsCallback(model, report, **options)
        callback.on_train_begin(arguments, None, None, optimizer=optimizer)
        assert reason in callback.attached.why_not and callback.manager is None
        callback.on_train_end(arguments, None, None)
    arguments.n_gpu = 2
    with pytest.raises(ValueError, match="over 2 GPUs in threads"):
        LoRAKernelsCallback(model, report).on_train_begin(arguments, None, None)
    with pytest.raises(TypeError, match="unexpected keyword argument 'max_shape'"):
        LoRAKernelsCallback(model, report, max_shape=2)


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="imitated graphs are the CPU's")
def test_train_again_after_an_exception(tmp_path):
    """Trainer leaves on_train_end out: the graphs of the first train() must not be under those of the second."""
    from transformers import TrainerCallback

    class Break(TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == 5:
                raise KeyboardInterrupt

    module = example("trainer.py")
    main, trainers = module["main"], []

    class Breaks(module["LoRATrainer"]):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            self.add_callback(Break)
            trainers.append(self)

    main.__globals__["LoRATrainer"] = Breaks
    with sdpa_kernel(SDPBackend.MATH):
        with pytest.raises(KeyboardInterrupt):
            main(None, str(tmp_path), backend=FakeBackend)
        (trainer,) = trainers
        kernels = next(c for c in trainer.callback_handler.callbacks if hasattr(c, "why_not"))
        first = kernels.manager
        assert first.phase == "replaying"
        trainer.remove_callback(Break)
        trainer.train()
    assert kernels.manager is None and kernels.why_not is None and first.phase == "closed"
    assert not any("forward" in vars(layer) for layer in trainer.model.model.layers)


def test_the_trainer_example_refuses_several_processes(tmp_path, monkeypatch):
    """Before torch.distributed waits for the others."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(SystemExit, match="one process, found WORLD_SIZE=2"):
        example("trainer.py")["main"](None, str(tmp_path))


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="imitated graphs are the CPU's")
def test_a_capture_that_fails_is_a_warning_and_training_goes_on(tmp_path):
    """A layer that waits for the device."""
    module = example("trainer.py")
    small = module["small_llama"]

    def waits(*args: Any) -> Any:
        model, report = small(*args)
        norm = model.model.layers[0].input_layernorm
        real = norm.forward
        norm.forward = lambda x: real(x) if x.sum().item() < 1e30 else x
        return model, report

    main = module["main"]
    main.__globals__.update(small_llama=waits, fuse=lambda model: "not fused")
    with pytest.warns(RuntimeWarning, match="layers run eagerly: "):
        trainer = main(None, str(tmp_path), backend=FakeBackend)
    assert trainer.state.epoch == 1 and len(losses(trainer)) > 1


def test_accelerate_loop_with_fused_and_replayed_layers(device):
    """Accelerate's prepare and backward around the same calls; imitated graphs on a CPU."""
    from accelerate import Accelerator
    from lorakernels.graphs import GraphManager, GraphOptions

    from lorakernels import PhiloxState, fuse

    philox = PhiloxState(1, device)
    model, report = example("trainer.py")["small_llama"](device.type, philox)
    fuse(model)
    accelerator = Accelerator(cpu=device.type == "cpu")
    trained = [p for p in model.parameters() if p.requires_grad]
    model, optimizer = accelerator.prepare(model.train(), torch.optim.AdamW(trained, lr=5e-3))
    state = report.fp8_state
    state.reduce_and_update()
    options = GraphOptions(backend=FakeBackend if device.type == "cpu" else None)
    manager = GraphManager(
        model.model.layers, fp8_state=state, rng_states=[philox], options=options
    )
    tokens = torch.arange(256, device=device).view(4, 64)
    found = []
    with sdpa_kernel([SDPBackend.MATH] if device.type == "cpu" else list(BACKENDS)):
        for _ in range(8):
            loss = model(tokens, labels=tokens).loss
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            state.reduce_and_update()
            if manager.phase != "replaying":
                philox.advance()
            manager.end_iteration()
            found.append(loss.item())
    assert manager.phase == "replaying" and found[-1] < found[0]
    manager.close()
