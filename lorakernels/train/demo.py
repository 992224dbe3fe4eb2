# SPDX-License-Identifier: Apache-2.0
"""The demo of ``lorakernels finetune``: a small model that writes Python learns to write Python's help.

The model comes with the package (demo_base/README.md). Its texts are pydoc's topics, which every Python installation
has, so nothing is downloaded.
"""

from __future__ import annotations

import itertools
import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lorakernels.train.errors import FinetuneError, OptionError
from lorakernels.train.files.written import LOSS, METRICS

if TYPE_CHECKING:
    from lorakernels.train.job import Result
    from lorakernels.train.options.options import FinetuneOptions
    from lorakernels.train.run.reporter import Reporter

DEMO_DEFAULTS: dict[str, Any] = {
    "output": "demo-output",
    "seq_len": 256,
    "batch_size": 8,
    "steps": 120,
    "lr": 4e-3,
    "lora_dropout": 0.05,
    "warmup": 0.05,
    "eval_fraction": 0.1,
    "eval_every": 60,
    "eval_rows": 64,
    "save_every": 40,
    "log_every": 20,
    "deterministic": True,  # check_reload compares bits
}
BASE = Path(__file__).parent / "demo_base"
OWN = ("base", "data", "tokens", "checkpoints", "adapter")
MARK = "demo.json"
PROMPT = "If "  # where Python and English differ
SAMPLE = 300  # bytes that are written after the prompt


def run_demo(options: FinetuneOptions) -> None:
    """Train the adapter, reload it, show what it changed, and name the commands that come next."""
    from lorakernels.train.job import adapt, locked
    from lorakernels.train.model.model import reproducible
    from lorakernels.train.ranks.ranks import ranks_of_environment
    from lorakernels.train.run.reporter import Reporter

    if ranks_of_environment().size > 1:
        raise OptionError("the demo runs on one process: start it without torchrun")
    output = Path(str(options.output))
    with locked(output), reproducible(options.deterministic):
        _clear(output, options.resume)
        if not (output / "base").is_dir():
            shutil.copytree(BASE, output / "base")
        topics = write_topics(output / "data")
        reporter = Reporter("adapt", options.log_every)
        result = adapt(replace(options, model=str(output / "base"), data=[str(topics)]), reporter)
        check_reload(result, options, reporter)
        print(f"\n{samples(result)}\n\n{curve(output / METRICS)}\n{last_lines(output, result)}")


def _clear(output: Path, resume: bool) -> None:
    """Refuse an `output` with files of another run. Unless `resume` is set, delete what an earlier demo made."""
    present = [name for name in OWN if (output / name).exists()]
    if present and not (output / MARK).is_file():
        raise FinetuneError(
            f"{output} holds {', '.join(present)} of something else than the demo: take another directory"
        )
    if not resume:
        for name in present:
            shutil.rmtree(output / name)
    (output / MARK).write_text(json.dumps({"made_by": "lorakernels finetune --demo"}) + "\n")


def help_texts() -> list[str]:
    """Pydoc's topics, in the order of their names: the language reference as `help()` shows it."""
    from pydoc_data import topics

    return [topics.topics[name] for name in sorted(topics.topics)]


def write_topics(directory: Path) -> Path:
    """Write `help_texts` as a .jsonl file, a topic a line."""
    from lorakernels.train.files.files import replace_file

    directory.mkdir(parents=True, exist_ok=True)
    lines = "".join(json.dumps({"text": text}) + "\n" for text in help_texts())
    replace_file(directory / "topics.jsonl", lines.encode())
    return directory / "topics.jsonl"


def samples(result: Result) -> str:
    """The model's texts after PROMPT, without the adapter and with it."""
    from lorakernels import disable_lora

    with disable_lora(result.model):
        before = _continue(result)
    return f"--- before\n{before}\n--- after\n{_continue(result)}"


def _continue(result: Result) -> str:
    import torch

    model: Any = result.model
    ids = torch.tensor([[*PROMPT.encode()]], device=result.session.trainer.device)
    was_training = model.training
    model.eval()
    torch.manual_seed(0)
    with torch.no_grad():
        ids = model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=SAMPLE,
            do_sample=True,
            temperature=0.6,
            no_repeat_ngram_size=12,  # bytes: a model this small repeats itself
        )
    model.train(was_training)
    text = bytes(token for token in ids[0].tolist() if token < 256)
    return text.decode(errors="replace")


def curve(metrics: Path, width: int = 60) -> str:
    """The training loss as one line of blocks, the mean of some steps each."""
    from lorakernels.train.run.metrics import read_metrics

    losses = [r["loss"] for r in read_metrics(metrics) if r.get("loss") is not None]
    parts = min(width, len(losses))
    edges = [len(losses) * part // parts for part in range(parts + 1)]
    means = [sum(losses[start:end]) / (end - start) for start, end in itertools.pairwise(edges)]
    low, high = min(means), max(means)
    blocks = "▁▂▃▄▅▆▇█"
    levels = [round((mean - low) / ((high - low) or 1) * (len(blocks) - 1)) for mean in means]
    drawn = "".join(blocks[level] for level in levels)
    return f"training loss {means[0]:.2f} {drawn} {means[-1]:.2f}"


def last_lines(output: Path, result: Result) -> str:
    """The demo's results, and the commands that come next."""
    return f"""\
{result.last_line()}
loss curve in {output / LOSS}
next, on your model and data:
    lorakernels finetune --model DIR --data FILE.jsonl --output out
    lorakernels export --model {output / "base"} --adapter {output / "adapter"} --output merged
    lorakernels doctor"""


def check_reload(result: Result, options: FinetuneOptions, reporter: Reporter) -> None:
    """Load base and adapter from their files and check that the logits equal the trained model's, bit for bit.

    The activation scales are part of FP8 arithmetic, but PEFT's files do not hold them. They come from the last
    checkpoint.

    Raises:
        FinetuneError: the logits differ.
    """
    import torch

    from lorakernels import load_adapter
    from lorakernels.train.adapted import recipe_of
    from lorakernels.train.model.model import load_model, pick_dtype
    from lorakernels.train.run.runtime import fuse_layers

    session = result.session
    assert session.held is not None
    device = session.trainer.device
    fresh: Any = load_model(
        Path(str(options.output)) / "base", pick_dtype(options.dtype, device), device
    )
    report = load_adapter(fresh, result.adapter, fp8=recipe_of(options))
    if report.fp8_state is not None:
        saved = session.checkpoints.load(session.adapter_step, device)
        report.fp8_state.load_state_dict(saved.state["fp8"])
    if result.fused:
        fuse_layers(fresh, options, device)
    trained: Any = result.model
    ids = session.held.batch(range(min(4, len(session.held)))).to(device).input_ids
    fresh.eval(), trained.eval()
    with torch.no_grad():
        expected, logits = trained(input_ids=ids).logits, fresh(input_ids=ids).logits
    if not torch.equal(expected, logits):
        worst = (expected - logits).abs().max().item()
        raise FinetuneError(
            f"the reloaded adapter does not give the same outputs (largest difference {worst:.3g})"
        )
    reporter.say(f"reloaded into a fresh base: {expected.numel():,} logits equal, bit for bit")
