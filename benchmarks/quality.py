# SPDX-License-Identifier: Apache-2.0
"""Is training as good over an FP8 base? The same LoRA steps over ours, TE's FP8 base and a bf16 base by PEFT.

    python benchmarks/quality.py --output DIR [--models demo random] [--steps N]

Two Llamas, all linear layers adapted. "demo" has the demo's shape and learns the standard library's sources byte by
byte, then is adapted to pydoc's help texts in 500 steps; "random" is wider and does the same with two random Markov
chains over bytes in 300. Each base is trained once, rounded to bf16 and given to every variant, with the same A, B = 0,
rows in the same order and optimizer; fp32 adapters. Dropout masks differ, since each variant draws its own way.
"ours, fused + graphs" is `fuse` and a GraphManager over the layers, which replays from the third step on.

"held-out loss" is the mean over the same held-out rows after the last step, nats per byte. More than 0.5 % above the
bf16 base's is WRONG if it is ours, exit code 1; the curves are in quality_curves.csv and quality.png. On a GPU the
variants run beside each other, each in a process that trains the same base, and "seconds" is under that load.
"""

from __future__ import annotations

import contextlib
import copy
import csv
import gc
import hashlib
import json
import math
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from common import Row, arguments, environment, finish, parser, write_csv
from peers.base import Unavailable
from peers.te import te_or_unavailable
from quality_variants import REFERENCE, VARIANTS, Context, Run, te
from torch import Tensor, nn

from lorakernels.train.bytes import VOCABULARY
from lorakernels.train.demo import SHAPE, write_texts
from lorakernels.train.model import quiet_transformers, reproducible

TOLERANCE = 0.005
SUMMARY = (
    "model",
    "variant",
    "check",
    "steps",
    "base",
    "loss before",
    "held-out loss",
    "÷ bf16",
    "seconds",
)
EVERY = 10  # steps between two points of a curve


@dataclass(frozen=True)
class Plan:
    """A model, its two texts and how long it trains on them."""

    shape: dict[str, int]
    texts: Callable[[int], tuple[Tensor, Tensor]]  # of a length: two int64 [rows, length]
    base_lr: float
    lr: float
    batch: int = 8
    length: int = 256
    held: int = 64
    base_steps: int = 200
    steps: int = 300
    rank: int = 16
    p: float = 0.05


def demo_texts(length: int) -> tuple[Tensor, Tensor]:
    """The demo's documents, one after the other."""
    with tempfile.TemporaryDirectory() as folder:
        paths = write_texts(Path(folder))
        texts = [
            "\n".join(json.loads(line)["text"] for line in path.read_text().splitlines())
            for path in paths
        ]
    first, second = (_rows(text.encode(), length) for text in texts)
    return first, second


def _rows(text: bytes, length: int) -> Tensor:
    tokens = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
    return tokens[: len(tokens) // length * length].view(-1, length)


def random_texts(length: int, rows: int = 3000) -> tuple[Tensor, Tensor]:
    """Two Markov chains over bytes that share half of their transitions; 8 successors to each byte."""
    generator = torch.Generator().manual_seed(11)
    after = torch.randint(256, (256, 8), generator=generator)
    changed = torch.randint(256, (256, 8), generator=generator)
    second = torch.where(torch.rand(256, 1, generator=generator) < 0.5, after, changed)
    return _chain(after, rows, length, generator), _chain(second, rows, length, generator)


def _chain(after: Tensor, rows: int, length: int, generator: torch.Generator) -> Tensor:
    """The successor is the k-th with a probability that halves from one to the next."""
    state = torch.randint(256, (rows,), generator=generator)
    chances = 0.5 ** torch.arange(8).float()
    columns = []
    for _ in range(length):
        columns.append(state)
        picks = torch.multinomial(chances, rows, replacement=True, generator=generator)
        state = after[state, picks]
    return torch.stack(columns, 1)


PLANS = {
    "demo": Plan(SHAPE, demo_texts, base_lr=4e-3, lr=4e-3, steps=500),
    "random": Plan(
        {
            "hidden_size": 1024,
            "intermediate_size": 2816,
            "num_hidden_layers": 3,
            "num_attention_heads": 16,
        },
        random_texts,
        base_lr=1e-3,
        lr=1e-3,
        base_steps=150,
    ),
}


def make_base(plan: Plan, rows: Tensor, device: torch.device) -> Any:
    """A Llama, all of it trained in fp32 on `rows`, then frozen in bf16 (fp32 on a CPU)."""
    transformers = quiet_transformers()
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY,
        num_key_value_heads=plan.shape["num_attention_heads"],
        max_position_embeddings=plan.length,
        tie_word_embeddings=True,
        use_cache=False,
        **plan.shape,
    )
    model = transformers.LlamaForCausalLM(config).to(device)
    train(model, rows, plan, plan.base_steps, plan.base_lr, Run())
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    return model.to(dtype).requires_grad_(False)


def loss_of(model: Any, ids: Tensor) -> Tensor:
    logits = model(input_ids=ids).logits[:, :-1]
    return F.cross_entropy(logits.flatten(0, 1).float(), ids[:, 1:].flatten())


def train(model: Any, rows: Tensor, plan: Plan, steps: int, lr: float, run: Run) -> list[float]:
    """AdamW, 5 % warm-up, then a cosine; the loss of every step. `rows` on the model's device."""
    model.train()
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=lr, weight_decay=0.0)
    generator, losses = torch.Generator().manual_seed(1), []
    order = torch.randint(len(rows), (steps, plan.batch), generator=generator).to(rows.device)
    for step in range(steps):
        ramp = min(1.0, (step + 1) / max(1, 0.05 * steps))
        optimizer.param_groups[0]["lr"] = lr * ramp * 0.5 * (1 + math.cos(math.pi * step / steps))
        with run.context():
            loss = loss_of(model, rows[order[step]])
        loss.backward()
        nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        run.after_step()
        losses.append(loss.detach())
    return torch.stack(losses).tolist()


@torch.no_grad()
def held_out(model: Any, held: Tensor, plan: Plan, context: Context) -> float:
    model.eval()
    with context():
        losses = [loss_of(model, ids) for ids in held.split(plan.batch)]
    return float(torch.stack(losses).mean())


def bench_model(
    name: str, plan: Plan, variants: list[str], device: torch.device
) -> tuple[list[Row], list[Row]]:
    """Rows of the summary, and of the curves."""
    if any(VARIANTS[variant] is te for variant in variants):
        with contextlib.suppress(Unavailable):  # its row will say so
            te_or_unavailable()  # first: once torch had loaded its cuDNN, importing TE 2.12 failed on an H200 machine
    texts = plan.texts(plan.length)
    rows: list[Row] = []
    curves: list[Row] = []
    with reproducible(True):
        base = make_base(plan, texts[0].to(device), device)
    data = texts[1].to(device)
    held, data = data[: plan.held], data[plan.held :]
    before = held_out(base, held, plan, contextlib.nullcontext)
    for variant in variants:
        torch.manual_seed(3)
        model, start, loss, check = copy.deepcopy(base), time.perf_counter(), math.nan, "ok"
        try:
            run = VARIANTS[variant](model, plan)
            points = train(model, data, plan, plan.steps, plan.lr, run)
            loss = held_out(model, held, plan, run.context)
            check = "WRONG: the loss is nan" if math.isnan(loss) else "ok"
            for step in range(0, plan.steps, EVERY):
                part = points[step : step + EVERY]
                mean = sum(part) / len(part)
                curves.append({"model": name, "variant": variant, "step": step, "loss": mean})
        except Unavailable as reason:
            check = str(reason)
        except Exception as problem:  # a peer's own limits are its row's business; ours are wrong
            check = f"{_kind(variant, 'raised')}: {type(problem).__name__}: {problem}"
        rows.append(
            {
                "model": name,
                "variant": variant,
                "check": check.partition("\n")[0][:160],
                "steps": plan.steps,
                "base": checksum(base),
                "loss before": round(before, 5),
                "held-out loss": "" if math.isnan(loss) else round(loss, 5),
                "÷ bf16": "",
                "seconds": round(time.perf_counter() - start, 1),
            }
        )
        del model
        gc.collect()
    return judged(rows), curves


def _kind(variant: str, otherwise: str) -> str:
    return otherwise if variant.startswith("te") else "WRONG"


def checksum(model: nn.Module) -> str:
    """Of all parameters, bit for bit."""
    digest = hashlib.sha256()
    for parameter in model.parameters():
        digest.update(parameter.detach().cpu().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:8]


def judged(rows: list[Row]) -> list[Row]:
    """The rows with their loss ÷ that of the bf16 base of the same model; too high a ratio is WRONG if it is ours."""
    for row in rows:
        bf16 = next(
            (r for r in rows if (r["model"], r["variant"]) == (row["model"], REFERENCE)), None
        )
        if row["check"] != "ok" or bf16 is None or not bf16["held-out loss"]:
            continue
        ratio = float(str(row["held-out loss"])) / float(str(bf16["held-out loss"]))
        row["÷ bf16"] = round(ratio, 5)
        if row["base"] != bf16["base"]:
            row["check"] = f"WRONG: trained another base than {bf16['base']}"
        elif not ratio <= 1 + TOLERANCE:
            kind = _kind(str(row["variant"]), "missed")
            row["check"] = f"{kind}: more than {TOLERANCE:.1%} above bf16's"
    return rows


def in_parallel(jobs: list[tuple[str, str]], options: list[str]) -> tuple[list[Row], list[Row]]:
    """As `bench_model` of each (model, variant), each in a process of its own: most of a step is the host's time.

    Each trains its base again, with deterministic kernels; `judged` compares their checksums.
    """
    rows: list[Row] = []
    curves: list[Row] = []
    with tempfile.TemporaryDirectory() as folder:
        started = []
        for i, (model, variant) in enumerate(jobs):
            chosen = ["--models", model, "--variants", variant, "--output", f"{folder}/{i}"]
            command = [sys.executable, __file__, *chosen, *options]
            started.append(subprocess.Popen(command, stdout=subprocess.DEVNULL))
        for i, process in enumerate(started):
            process.wait()
            rows += read_csv(Path(folder, str(i), "quality.csv"))
            curves += read_csv(Path(folder, str(i), "quality_curves.csv"))
    found = {(row["model"], row["variant"]) for row in rows}
    if missing := [job for job in jobs if job not in found]:
        raise RuntimeError(f"no result of {missing}: their output is above")
    return judged([{k: row[k] for k in SUMMARY} for row in rows]), curves


def read_csv(path: Path) -> list[Row]:
    """Empty where there is no such file."""
    if not path.is_file():
        return []
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def plot(path: Path, curves: list[Row]) -> None:
    """One panel per model, one line per variant."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    models = list(dict.fromkeys(str(point["model"]) for point in curves))
    figure, panels = pyplot.subplots(1, len(models), figsize=(5.5 * len(models), 4), squeeze=False)
    for panel, model in zip(panels[0], models, strict=True):
        for variant in dict.fromkeys(str(point["variant"]) for point in curves):
            chosen = [c for c in curves if (c["model"], c["variant"]) == (model, variant)]
            panel.plot(
                [float(str(c["step"])) for c in chosen],
                [float(str(c["loss"])) for c in chosen],
                label=variant,
                linewidth=1.2,
            )
        panel.set(
            title=model, xlabel="step", ylabel=f"training loss, nats per byte, mean of {EVERY}"
        )
        panel.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def main() -> int:
    options = parser("training over FP8 bases against a bf16 base")
    options.add_argument("--models", nargs="+", choices=list(PLANS), default=list(PLANS))
    options.add_argument("--variants", nargs="+", choices=list(VARIANTS), default=list(VARIANTS))
    options.add_argument("--steps", type=int, help="default: the model's own")
    args, device = arguments(options)
    rows: list[Row] = []
    curves: list[Row] = []
    jobs = [(model, variant) for model in args.models for variant in args.variants]
    if device.type == "cuda" and len(jobs) > 1:
        steps = ["--steps", str(args.steps)] if args.steps else []
        rows, curves = in_parallel(jobs, ["--device", args.device, *steps])
    else:
        for name in args.models:
            plan = PLANS[name]
            if args.steps:
                plan = replace(plan, steps=args.steps)
            summary, points = bench_model(name, plan, args.variants, device)
            rows += summary
            curves += points
    code = finish("quality", rows, environment(device), args.output)
    if args.output and curves:
        write_csv(args.output / "quality_curves.csv", curves, {})
        if len(jobs) > 1:
            plot(args.output / "quality.png", curves)
    return code


if __name__ == "__main__":
    sys.exit(main())
