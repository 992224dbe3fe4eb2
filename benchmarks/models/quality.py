# SPDX-License-Identifier: Apache-2.0
"""Does LoRA train as well over an FP8 base? The same steps over ours, over TE's FP8 base and over PEFT's bf16 base.

    python benchmarks/models/quality.py --output DIR [--models demo random] [--steps N] [--seeds 0 1 …]

There are two Llamas, whose linear layers are all adapted. "demo" has the demo's shape. It learns the standard
library's sources byte by byte and is then adapted to pydoc's help texts in 500 steps. "random" is wider and does the
same with two random Markov chains over bytes, in 300 steps. Each base is trained once, rounded to bf16 and given to
every variant. A seed decides A, the order of the rows and, in each variant's own way, the dropout masks. B = 0, the
optimizer and the fp32 adapters are the same for all. "ours, fused + graphs" calls `fuse` and replays the layers'
graphs from step 3 on. "FP8 head" multiplies by the frozen head in FP8 as well while it trains; what is held out has
logits in bf16, as a model has when it is used.

"held-out loss" is in nats per byte, after the last step. It is the mean over the same rows and over the seeds: six for
"demo" and two for "random", unless --seeds says otherwise. "spread" is the largest seed's loss less the smallest's,
which was 0.5 to 1.1 % on "demo" (three seeds, an H200). Where ours is more than 0.5 % above the bf16 base, the row is
WRONG and the exit code 1.

quality_seeds.csv has a row for each seed. quality_curves.csv and quality.png have the curves. On a GPU, all variants
run beside each other in processes that train the same base, and "seconds" is measured under that load.
"""

from __future__ import annotations

import contextlib
import copy
import csv
import gc
import hashlib
import math
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
from torch import Tensor, nn

from benchmarks.lib.quality_summary import kind_of, summary
from benchmarks.lib.quality_variants import VARIANTS, Context, Plan, Run, loss_of, te
from benchmarks.lib.rows import Row, arguments, environment, finish, parser, write_csv
from benchmarks.peers.base import Unavailable
from benchmarks.peers.te import te_first_or_hidden
from benchmarks.peers.texts import demo_texts
from lorakernels.train.data.byte_tokenizer import VOCABULARY
from lorakernels.train.model.model import quiet_transformers, reproducible

SEED_COLUMNS = (
    "model",
    "variant",
    "seed",
    "check",
    "steps",
    "base",
    "loss before",
    "held-out loss",
    "seconds",
)
EVERY = 10  # steps between two points of a curve


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


DEMO = {
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
}
PLANS = {
    "demo": Plan(DEMO, demo_texts, base_lr=4e-3, lr=4e-3, steps=500, seeds=6),
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


def train(model: Any, rows: Tensor, plan: Plan, steps: int, lr: float, run: Run) -> list[float]:
    """AdamW, 5 % warm-up, then a cosine; the loss of every step. `rows` on the model's device."""
    model.train()
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=lr, weight_decay=0.0)
    generator, losses = torch.Generator().manual_seed(1 + plan.seed), []
    order = torch.randint(len(rows), (steps, plan.batch), generator=generator).to(rows.device)
    for step in range(steps):
        ramp = min(1.0, (step + 1) / max(1, 0.05 * steps))
        optimizer.param_groups[0]["lr"] = lr * ramp * 0.5 * (1 + math.cos(math.pi * step / steps))
        with run.context():
            loss = run.loss(model, rows[order[step]])
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
    name: str, plan: Plan, variants: list[str], device: torch.device, seeds: list[int]
) -> tuple[list[Row], list[Row]]:
    """A row for each variant and seed, and the points of their curves."""
    with te_first_or_hidden(any(VARIANTS[variant] is te for variant in variants)):
        texts = plan.texts(plan.length)
        with reproducible(True):
            base = make_base(plan, texts[0].to(device), device)
        text = texts[1].to(device)
        rows: list[Row] = []
        curves: list[Row] = []
        for variant in variants:
            for seed in seeds:
                row, points = bench_seed(name, replace(plan, seed=seed), variant, base, text)
                rows.append(row)
                curves += points
                gc.collect()
    return rows, curves


def bench_seed(
    name: str, plan: Plan, variant: str, base: Any, text: Tensor
) -> tuple[Row, list[Row]]:
    """Adapt a copy of `base` to `text` [rows, length], on one device, but for the first `plan.held` rows."""
    held, data = text[: plan.held], text[plan.held :]
    before = held_out(base, held, plan, contextlib.nullcontext)
    torch.manual_seed(3 + plan.seed)
    model, start, loss, check = copy.deepcopy(base), time.perf_counter(), math.nan, "ok"
    curve: list[Row] = []
    try:
        run = VARIANTS[variant](model, plan)
        points = train(model, data, plan, plan.steps, plan.lr, run)
        loss = held_out(model, held, plan, run.context)
        check = "WRONG: the loss is nan" if math.isnan(loss) else "ok"
        for step in range(0, plan.steps, EVERY):
            part = points[step : step + EVERY]
            head: Row = {"model": name, "variant": variant, "seed": plan.seed}
            curve.append({**head, "step": step, "loss": sum(part) / len(part)})
    except Unavailable as reason:
        check = str(reason)
    except Exception as problem:  # a peer's own limits are its row's business; ours are wrong
        check = f"{kind_of(variant, 'raised')}: {type(problem).__name__}: {problem}"
    values = (
        name,
        variant,
        plan.seed,
        check.partition("\n")[0][:160],
        plan.steps,
        checksum(base),
        round(before, 5),
        "" if math.isnan(loss) else round(loss, 5),
        round(time.perf_counter() - start, 1),
    )
    return dict(zip(SEED_COLUMNS, values, strict=True)), curve


def checksum(model: nn.Module) -> str:
    """Of all parameters, bit for bit."""
    digest = hashlib.sha256()
    for parameter in model.parameters():
        digest.update(parameter.detach().cpu().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:8]


def in_parallel(
    jobs: list[tuple[str, str, int]], options: list[str]
) -> tuple[list[Row], list[Row]]:
    """As `bench_model` of each (model, variant, seed), each in a process of its own: most of a step is the host's time.

    Each trains its base again, with deterministic kernels; `summary` compares their checksums.
    """
    rows: list[Row] = []
    curves: list[Row] = []
    with tempfile.TemporaryDirectory() as folder:
        started = []
        for i, (model, variant, seed) in enumerate(jobs):
            chosen = ["--models", model, "--variants", variant, "--seeds", str(seed)]
            command = [sys.executable, __file__, *chosen, "--output", f"{folder}/{i}", *options]
            started.append(subprocess.Popen(command, stdout=subprocess.DEVNULL))
        for i, process in enumerate(started):
            process.wait()
            rows += read_csv(Path(folder, str(i), "quality_seeds.csv"))
            curves += read_csv(Path(folder, str(i), "quality_curves.csv"))
    found = {(row["model"], row["variant"], int(str(row["seed"]))) for row in rows}
    if missing := [job for job in jobs if job not in found]:
        raise RuntimeError(f"no result of {missing}: their output is above")
    return [{k: row[k] for k in SEED_COLUMNS} for row in rows], curves


def read_csv(path: Path) -> list[Row]:
    """Empty where there is no such file."""
    if not path.is_file():
        return []
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def main() -> int:
    options = parser("training over FP8 bases against a bf16 base")
    options.add_argument("--models", nargs="+", choices=list(PLANS), default=list(PLANS))
    options.add_argument("--variants", nargs="+", choices=list(VARIANTS), default=list(VARIANTS))
    options.add_argument("--steps", type=int, help="default: the model's own")
    options.add_argument("--seeds", nargs="+", type=int, help="default: the model's own")
    args, device = arguments(options)
    rows: list[Row] = []
    curves: list[Row] = []
    seeds_of = {m: args.seeds or list(range(PLANS[m].seeds)) for m in args.models}
    jobs = [(m, v, seed) for m in args.models for v in args.variants for seed in seeds_of[m]]
    if device.type == "cuda" and len(jobs) > 1:
        steps = ["--steps", str(args.steps)] if args.steps else []
        rows, curves = in_parallel(jobs, ["--device", args.device, *steps])
    else:
        for name in args.models:
            plan = PLANS[name]
            if args.steps:
                plan = replace(plan, steps=args.steps)
            seeds, points = bench_model(name, plan, args.variants, device, seeds_of[name])
            rows += seeds
            curves += points
    facts = environment(device)
    code = finish("quality", summary(rows), facts, args.output)
    if args.output:
        write_csv(args.output / "quality_seeds.csv", rows, facts)
    if args.output and curves:
        write_csv(args.output / "quality_curves.csv", curves, {})
    return code


if __name__ == "__main__":
    sys.exit(main())
