# SPDX-License-Identifier: Apache-2.0
"""The command from end to end: what a run leaves, and what it imports."""

from __future__ import annotations

import ast
import json
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import yaml

from lorakernels import BlockScaling, LoRAConfig
from lorakernels.cli.__main__ import main
from lorakernels.train import demo
from lorakernels.train.data.byte_tokenizer import byte_tokenizer
from lorakernels.train.errors import ON_DEMAND
from lorakernels.train.job import few_steps, fingerprint
from lorakernels.train.model.model import load_model, load_tokenizer
from lorakernels.train.options.options import FinetuneOptions
from tests.train.test_job_refusals import copy_of, small_vocabulary

Cli = Callable[..., int]


def test_run_leaves_what_it_promises(
    cli: Cli, base_args: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "out"
    assert cli(*base_args, "--output", output, "--steps", 6, "--save-every", 2, "--keep", 2) == 0
    said = capsys.readouterr().out
    last = said.splitlines()[-1]
    match = re.fullmatch(r"validation loss (\d\.\d{4}) → (\d\.\d{4}), adapter in (.*)", last)
    assert match and match[3] == str(output / "adapter") and float(match[2]) < float(match[1])
    assert "documents are longer than seq_len 48 and were split" in said
    assert "6 steps of 192 positions\n" in said and "MFU" not in said and "FLOP" not in said
    assert sorted(p.name for p in (output / "checkpoints").iterdir()) == [
        "step-00000004",
        "step-00000006",
    ]
    assert (output / "loss.png").stat().st_size > 1000
    assert json.loads((output / "options.json").read_text())["r"] == 4
    records = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    assert [r["step"] for r in records if "loss" in r] == [1, 2, 3, 4, 5, 6]
    assert [r["step"] for r in records if "eval_loss" in r] == [0, 6]
    assert all(
        r["tokens_per_s"] > 0 and r["tflops"] > 0 and "mfu" not in r for r in records if "loss" in r
    )
    adapter = {p.name: p.read_bytes() for p in (output / "adapter").iterdir()}
    assert {"adapter_config.json", "adapter_model.safetensors", "README.md"} < set(adapter)
    newest = output / "checkpoints" / "step-00000006"
    assert adapter == {p.name: p.read_bytes() for p in newest.iterdir() if p.is_file()}


@pytest.mark.parametrize(
    "more",
    [
        ["--dtype", "bfloat16", "--gradient-checkpointing"],
        ["--use-rslora", "--target-modules", "q_proj", "down_proj", "--eval-fraction", "0"],
        ["--target-modules", "v_proj", "lm_head", "--weight-decay", "0.1", "--max-grad-norm", "0"],
    ],
    ids=["bf16-recompute", "two-targets", "output-head"],
)
def test_variants_run(
    cli: Cli,
    base_args: list[str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    more: list[str],
) -> None:
    assert cli(*base_args, "--output", tmp_path, "--steps", 3, *more) == 0
    last = capsys.readouterr().out.splitlines()[-1]
    if "--eval-fraction" in more:
        assert (
            last
            == f"validation loss not measured, as no document was held out; adapter in {tmp_path / 'adapter'}"
        )
    else:
        match = re.match(r"validation loss ([\d.]+) → ([\d.]+), adapter in ", last)
        assert match and float(match[2]) < float(match[1])


def test_peft_loads_the_adapter_and_every_checkpoint(
    cli: Cli, base_args: list[str], model_dir: Path, tmp_path: Path
) -> None:
    """And computes what our layers compute, on a base that is not quantized."""
    peft = pytest.importorskip("peft")
    from lorakernels import load_adapter

    assert cli(*base_args, "--output", tmp_path, "--steps", 3, "--save-every", 2, "--no-fp8") == 0
    cpu, ids, seen = torch.device("cpu"), torch.arange(20)[None], []
    middle, last = sorted((tmp_path / "checkpoints").iterdir())
    for folder in (middle, last, tmp_path / "adapter"):
        ours, base = (load_model(model_dir, torch.float32, cpu) for _ in range(2))
        load_adapter(ours, folder, fp8=None)
        theirs = peft.PeftModel.from_pretrained(base, folder)
        with torch.no_grad():
            found, expected = ours.eval()(input_ids=ids).logits, theirs.eval()(input_ids=ids).logits
        # fp32, other order of sums
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
        seen.append(found)
        assert load_tokenizer(folder).get_vocab() == byte_tokenizer().get_vocab()
        assert theirs.peft_config["default"].task_type == "CAUSAL_LM"
        card = (folder / "README.md").read_text()
        head = yaml.safe_load(card.split("---")[1])
        assert head["base_model"] == str(model_dir) and head["library_name"] == "peft"
        assert head["tags"] == [f"base_model:adapter:{model_dir}", "lora", "lorakernels"]
        assert "`texts.jsonl`: " in card and "\n- r: 4\n" in card and "\n- steps: 3\n" in card
        step = 2 if folder is middle else 3
        assert f"Trained for {step} of 3 steps." in card
        assert ("Held-out loss" in card) is (step == 3), "what was measured by then"
    assert torch.equal(seen[1], seen[2]) and not torch.equal(seen[0], seen[1])
    assert not list((tmp_path / "checkpoints").glob("*/state/tensors.safetensors"))


def test_a_card_of_a_base_whose_name_yaml_would_read_otherwise() -> None:
    from lorakernels.train.model_card import model_card

    for name in ("a: b", "base #2", "true", 'a "b"', "\\n", "é 模型", "bytes \udcff"):
        text = model_card(Path(name), FinetuneOptions(), "", "", {}).decode()
        head = yaml.safe_load(text.split("---")[1])
        shown = name.replace("\udcff", "?")  # a path may hold bytes that are not UTF-8
        assert head["base_model"] == shown
        assert head["tags"] == [f"base_model:adapter:{shown}", "lora", "lorakernels"]
        call = next(line for line in text.splitlines() if line.startswith("base = "))
        assert ast.literal_eval(call.partition("from_pretrained(")[2].removesuffix(")")) == shown


def test_byte_tokenizer_files(tmp_path: Path) -> None:
    """Every byte is its own token, also after saving and loading as ordinary tokenizer files."""
    byte_tokenizer().save_pretrained(tmp_path)
    tokenizer = load_tokenizer(tmp_path)
    text = "".join(map(chr, range(128))) + "žluťoučký 🐎\n"
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert bytes(ids) == text.encode() and tokenizer.decode(ids) == text
    assert (tokenizer.pad_token_id, tokenizer.bos_token_id, tokenizer.eos_token_id) == (
        256,
        257,
        258,
    )


def test_fingerprint_sees_config_and_tensors(model_dir: Path, tmp_path: Path) -> None:
    copy = copy_of(model_dir, tmp_path)
    assert fingerprint(copy) == fingerprint(model_dir)
    from safetensors.torch import load_file, save_file

    tensors = load_file(copy / "model.safetensors")
    next(iter(tensors.values())).mul_(2)
    save_file(tensors, copy / "model.safetensors", {"format": "pt"})
    changed = fingerprint(copy)
    assert changed != fingerprint(model_dir), "the same shapes with other values are another base"
    small_vocabulary(copy)
    assert fingerprint(copy) != changed


def test_padding_does_not_need_the_tokenizers_pad_token(
    cli: Cli, base_args: list[str], model_dir: Path, tmp_path: Path
) -> None:
    """A [PAD] added to the tokenizer alone lies outside the embedding."""
    from transformers import AutoTokenizer

    model = copy_of(model_dir, tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.add_special_tokens({"pad_token": "[PAD]"})
    tokenizer.save_pretrained(model)
    assert cli(*base_args, "--output", tmp_path / "out", "--steps", 1, "--model", model) == 0


def test_demo_from_end_to_end(
    cli: Cli, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two steps on two topics: the adapter, its bit-equal reload, a sample of text before and after, the curve."""
    monkeypatch.setattr(demo, "help_texts", lambda: ["The with statement. " * 60, "A for. " * 90])
    monkeypatch.setattr(demo, "SAMPLE", 8)
    output = tmp_path / "out"
    run = [
        "--demo",
        "--device",
        "cpu",
        "--output",
        output,
        "--steps",
        2,
        "--batch-size",
        2,
        "--eval-rows",
        2,
    ]
    for again in ([], [], ["--resume"]):
        assert cli(*run, *again) == 0
        said = capsys.readouterr().out.splitlines()
        at = next(i for i, line in enumerate(said) if line.startswith("validation loss "))
        found = re.fullmatch(r"validation loss \d\.\d{4} → \d\.\d{4}, adapter in (.*)", said[at])
        assert found and Path(found[1], "adapter_config.json").is_file()
        assert Path(said[at + 1].removeprefix("loss curve in ")).is_file()
        command = next(line for line in said[at:] if "lorakernels export" in line)
        assert any("logits equal, bit for bit" in line for line in said)
        samples = [said[said.index(f"--- {when}") + 1] for when in ("before", "after")]
        assert all(sample.startswith(demo.PROMPT) for sample in samples)
        assert re.fullmatch(r"training loss \d\.\d\d [▁-█]{2} \d\.\d\d", said[at - 1])
    assert main([*shlex.split(command)[1:-1], str(tmp_path / "merged")]) == 0
    load_model(tmp_path / "merged", torch.float32, torch.device("cpu"))
    load_model(output / "base", torch.float32, torch.device("cpu"))
    (output / demo.MARK).unlink()
    assert cli(*run) == 1
    assert "of something else than the demo: take another directory" in capsys.readouterr().err


def test_the_job_imports_declared_packages_only() -> None:
    """Of lorakernels itself, of its extras hf and train, and what one value of an option needs."""
    tomllib = pytest.importorskip("tomllib", reason="Python 3.10 has no reader of TOML")
    root = Path(__file__).parents[2]
    project = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    declared = [*project["dependencies"], *extras["hf"], *extras["train"], *extras["data"]]
    names = {re.split(r"[^\w.-]", line)[0] for line in declared} | {"lorakernels"}
    names = {"yaml" if name == "pyyaml" else name for name in names}
    found = {}
    for path in [*root.glob("lorakernels/train/**/*.py"), *root.glob("lorakernels/cli/*.py")]:
        for node in ast.walk(ast.parse(path.read_text())):
            wanted = [each.name for each in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom):
                wanted = [node.module or ""]
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "require":
                wanted = [each.value for each in node.args if isinstance(each, ast.Constant)]
            found |= {name.split(".")[0]: path.name for name in wanted}
    names |= {*ON_DEMAND, "jinja2", "pyarrow"}  # torch requires the one, datasets the other
    undeclared = {k: v for k, v in found.items() if k not in names | sys.stdlib_module_names}
    assert len(found) > 20 and undeclared == {}


@pytest.mark.slow
def test_help_imports_no_heavy_library() -> None:
    code = (
        "import argparse, sys; from lorakernels.cli.finetune import add_arguments;"
        "add_arguments(argparse.ArgumentParser());"
        "print([m for m in ('transformers', 'rich', 'matplotlib', 'yaml') if m in sys.modules])"
    )
    found = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        cwd=Path(__file__).parents[2],
        check=True,
    )
    assert found.stdout.strip() == "[]"


def test_config_of_the_adapter_follows_the_options() -> None:
    from lorakernels.train.adapted import lora_config
    from lorakernels.train.options.options import FinetuneOptions

    options = FinetuneOptions(r=3, use_rslora=True, fp8=False)
    expected = LoRAConfig(
        r=3,
        lora_alpha=32.0,
        lora_dropout=0.05,
        target_modules="all-linear",
        use_rslora=True,
        fp8=None,
    )
    assert lora_config(options) == expected
    assert lora_config(FinetuneOptions(fp8_recipe="block")).fp8 == BlockScaling()


def test_few_steps_of_an_epoch_are_said_before_the_first(
    cli: Cli, base_args: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of four rows a step at first, then of two, which make more than nine steps of the same rows."""
    run = [*base_args, "--steps", "1", "--output"]
    assert cli(*run, tmp_path / "few") == 0
    said = capsys.readouterr().out
    found = re.search(
        r"few steps: an epoch has (\S+), as .* are (\d+) sequences of 48 and a step takes 4;", said
    )
    assert found is not None and said.index("few steps:") < said.index("step 1/1")
    rows = int(found[2])
    assert 20 <= rows < 40 and found[1] == f"{rows / 4:.1f}"
    assert "smaller --batch-size, --grad-accum or --seq-len" in said
    assert cli(*run, tmp_path / "more", "--grad-accum", "1") == 0
    assert "few steps" not in capsys.readouterr().out


def test_few_steps_are_fewer_than_ten() -> None:
    options = FinetuneOptions()
    assert few_steps(160, 16, options) == ""
    assert "an epoch has 9.9, as all training data are 159 " in few_steps(159, 16, options)
    one = few_steps(1, 16, options)
    assert "at most one, as all training data are 1 sequence of 1,024" in one
    assert one.endswith("--epochs says how long to train")
    assert few_steps(1, 16, replace(options, steps=3)).endswith("--steps says how long to train")
