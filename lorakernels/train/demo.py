# SPDX-License-Identifier: Apache-2.0
"""The demo of ``lorakernels finetune``, in two parts.

A byte-level Llama first learns Python from the standard library's sources. LoRA over its FP8 base then teaches it the
English of pydoc's help texts. Every Python installation has both texts, so nothing is downloaded.
"""

from __future__ import annotations

import json
import shutil
import sysconfig
import tokenize
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lorakernels.train.errors import FinetuneError, OptionError

if TYPE_CHECKING:
    from lorakernels.train.job import Result
    from lorakernels.train.options import FinetuneOptions
    from lorakernels.train.packing import PackedRows
    from lorakernels.train.reporter import Reporter

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
    "eval_rows": 128,
    "save_every": 40,
    "log_every": 40,
    "deterministic": True,  # check_reload compares bits
}
BASE = {
    "batch_size": 8,
    "lr": 4e-3,
    "steps": 600,
    "eval_fraction": 0.03,
    "eval_every": 300,
    "weight_decay": 0.05,
    "warmup": 0.08,
}
SHAPE = {
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
}
OWN = ("base", "data", "tokens", "checkpoints", "adapter")
MARK = "demo.json"


def run_demo(options: FinetuneOptions) -> None:
    """Train the base and the adapter, print the table of losses, reload the adapter, and print the last line."""
    from lorakernels.train.job import adapt, locked
    from lorakernels.train.model import reproducible
    from lorakernels.train.ranks import ranks_of_environment
    from lorakernels.train.reporter import Reporter

    if ranks_of_environment().size > 1:
        raise OptionError("the demo runs on one process: start it without torchrun")
    output = Path(str(options.output))
    with locked(output), reproducible(options.deterministic):
        _clear(output, options.resume)
        sources, topics = write_texts(output / "data")
        base_reporter = Reporter("base", options.log_every)
        sources_held, before = base_model(options, sources, topics, base_reporter)
        reporter = Reporter("adapt", options.log_every)
        result = adapt(replace(options, model=str(output / "base"), data=[str(topics)]), reporter)
        show_losses(result, sources_held, before, reporter)
        check_reload(result, options, reporter)
        print(last_lines(output, result.last_line()), flush=True)


def _clear(output: Path, resume: bool) -> None:
    """Refuse an `output` with files of another run. Unless `resume` is set, delete what an earlier demo made."""
    found = [name for name in OWN if (output / name).exists()]
    if found and not (output / MARK).is_file():
        raise FinetuneError(
            f"{output} holds {', '.join(found)} of something else than the demo: take another directory"
        )
    if not resume:
        for name in found:
            shutil.rmtree(output / name)
    (output / MARK).write_text(json.dumps({"made_by": "lorakernels finetune --demo"}) + "\n")


def write_texts(directory: Path) -> tuple[Path, Path]:
    """Write two .jsonl files: the standard library's top-level sources, and pydoc's topics."""
    from pydoc_data import topics

    from lorakernels.train.files import replace_file

    directory.mkdir(parents=True, exist_ok=True)
    texts = {
        "stdlib.jsonl": library_sources(),
        "topics.jsonl": [topics.topics[name] for name in sorted(topics.topics)],
    }
    for name, documents in texts.items():
        lines = "".join(json.dumps({"text": text}) + "\n" for text in documents)
        replace_file(directory / name, lines.encode())
    return directory / "stdlib.jsonl", directory / "topics.jsonl"


def library_sources() -> list[str]:
    """The top-level files of this Python's standard library, in the order of their names.

    Raises:
        FinetuneError: there are none.
    """
    library = Path(sysconfig.get_path("stdlib"))
    found = []
    for path in sorted(library.glob("*.py")):
        with tokenize.open(path) as file:  # decodes with the encoding that the source declares
            found.append(file.read())
    if not found:
        raise FinetuneError(
            f"the demo needs the standard library's sources, found no .py file in {library}"
        )
    return found


def base_model(
    options: FinetuneOptions, sources: Path, topics: Path, reporter: Reporter
) -> tuple[PackedRows, dict[str, float]]:
    """Train and save the base, or use the base that exists. Returns its held-out rows and its losses on both texts."""
    from lorakernels.train import job
    from lorakernels.train.byte_tokenizer import byte_tokenizer
    from lorakernels.train.data.prepare import pack_data
    from lorakernels.train.data.tokens import tokenize_files
    from lorakernels.train.loop import evaluate
    from lorakernels.train.model import load_model, pick_device, pick_dtype

    output = Path(str(options.output))
    device = pick_device(options.device)
    tokenizer = byte_tokenizer()
    own = job.without_lora(options, **BASE)
    rows, held = pack_data(
        tokenize_files([sources], tokenizer, output / "tokens"), own, reporter.say
    )
    if not (output / "base").is_dir():
        train_base(own, rows, held, tokenizer, reporter)
    model = load_model(output / "base", pick_dtype(options.dtype, device), device)
    _, topics_held = pack_data(tokenize_files([topics], tokenizer, output / "tokens"), options)
    return held, {
        "sources": evaluate(model, held, options),
        "topics": evaluate(model, topics_held, options),
    }


def train_base(
    options: FinetuneOptions, rows: PackedRows, held: PackedRows, tokenizer: Any, reporter: Reporter
) -> None:
    """Train all parameters with fp32 weights, and save <output>/base as an ordinary model directory."""
    import torch

    from lorakernels.train import job
    from lorakernels.train.byte_tokenizer import VOCABULARY
    from lorakernels.train.files import replace_dir
    from lorakernels.train.flops import Sizes
    from lorakernels.train.loop import Trainer
    from lorakernels.train.model import pick_device, quiet_transformers

    transformers = quiet_transformers()
    output = Path(str(options.output))
    torch.manual_seed(options.seed)
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY,
        num_key_value_heads=SHAPE["num_attention_heads"],
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        **SHAPE,
    )
    model = transformers.LlamaForCausalLM(config).to(pick_device(options.device))
    trainer = Trainer(model, options, rows, None)
    sizes = Sizes.of(model, options.seq_len)
    session = job.make_session(trainer, held, reporter, output / "base-metrics.jsonl", sizes)
    session.run()
    with replace_dir(output / "base") as directory:
        model.save_pretrained(directory)
        tokenizer.save_pretrained(directory)


def last_lines(output: Path, result: str) -> str:
    """What the demo made, and the commands that come next."""
    return f"""\
{result}
loss curve in {output / "loss.png"}
next, on your model and data:
    lorakernels finetune --model DIR --data FILE.jsonl --output out
    lorakernels export --model {output / "base"} --adapter {output / "adapter"} --output merged
    lorakernels doctor"""


def show_losses(
    result: Result, sources_held: PackedRows, before: dict[str, float], reporter: Reporter
) -> None:
    """Print held-out losses in nats per byte for the plain base, the FP8 base, and the FP8 base with the adapter.

    For the adapter's own text the run has already measured the last two. Its first evaluation was with B = 0.
    """
    from lorakernels import disable_lora
    from lorakernels.train.loop import evaluate

    session = result.session
    first, last = session.evaluations.first_eval, session.evaluations.last_eval
    assert first is not None and last is not None
    with disable_lora(result.model):
        fp8 = evaluate(result.model, sources_held, session.options)
    after = evaluate(result.model, sources_held, session.options)
    found = {
        "topics": ("pydoc topics (adapted to)", first, last),
        "sources": ("standard library (base text)", fp8, after),
    }
    table = [
        (label, *(f"{loss:.4f}" for loss in (before[name], *losses)))
        for name, (label, *losses) in found.items()
    ]
    base = "FP8 base" if session.options.fp8 else "frozen base"
    reporter.table("held-out loss, nats per byte", ("text", "base", base, f"{base} + LoRA"), table)


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
    from lorakernels.train.model import load_model, pick_dtype
    from lorakernels.train.runtime import fuse_layers

    session = result.session
    assert session.held is not None and session.checkpoints is not None
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
        expected, found = trained(input_ids=ids).logits, fresh(input_ids=ids).logits
    if not torch.equal(expected, found):
        worst = (expected - found).abs().max().item()
        raise FinetuneError(
            f"the reloaded adapter does not give the same outputs (largest difference {worst:.3g})"
        )
    reporter.say(f"reloaded into a fresh base: {expected.numel():,} logits equal, bit for bit")
