# SPDX-License-Identifier: Apache-2.0
"""What each FP8 recipe costs a trained model: the base alone, and after LoRA has trained over it, beside PEFT and TE.

    python benchmarks/models/smollm2.py DIR                               # SmolLM2-135M-Instruct, 270 MB
    python benchmarks/models/quality_recipes.py DIR --output OUT [--seeds 0 1 2] [--variants …] [--minutes 9]

Every variant has the checkpoint in bf16, the same text, the sources of Python's standard library, and the same A by
seed. All linear layers but the head are adapted. A step has 4 rows of 1,024 tokens; AdamW, 5 % warm-up, then a cosine.

    KL             of the base alone from the plain one, nats a token, on the held-out rows; adapters begin with B = 0
    base loss      held-out loss of that base
    held-out loss  after training
    ÷ bf16         over PEFT's with a bf16 base, means over the same seeds
    KL ÷ one scale over the base with a scale for each tensor

"blocks" are unfused where `fuse` refuses them: SmolLM2's k has 192 rows, which do not end with a block of 128.

Every (variant, seed) is a process of its own, some at a time, as the host bounds the eager ones. Each appends its row
to quality_recipes_seeds.csv. The next call of the same command runs what is missing, and stops starting at --minutes.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import csv
import json
import math
import os
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.lib.quality_variants import REFERENCE, Plan, Run, adapters, peft, te
from benchmarks.lib.rows import Row, arguments, environment, finish, parser
from benchmarks.peers.base import Unavailable
from benchmarks.peers.te import te_first_or_hidden
from lorakernels import (
    BlockScaling,
    DelayedScaling,
    LoRAConfig,
    PhiloxState,
    apply_lora,
    attach,
    fuse,
)
from lorakernels.modules.model.merge import lora_modules
from lorakernels.recipes import Recipe
from lorakernels.train.model.model import quiet_transformers

CHARACTERS = 4_000_000
LOSS_TOKENS = 1024  # whose logits exist at a time where KL is measured
COLUMNS = (
    "variant",
    "seed",
    "check",
    "steps",
    "how",
    "KL",
    "base loss",
    "held-out loss",
    "seconds",
)


@dataclass(frozen=True)
class Sizes:
    """Of a run: rows of `length` tokens, `batch` a step, `held` of them held out."""

    steps: int = 200
    batch: int = 4
    length: int = 1024
    held: int = 32
    lr: float = 5e-4


def ours(recipe: Recipe | None, model: Any, plan: Plan) -> str:
    """Adapters over the model's base by `recipe`, fused where `fuse` takes it. Returns how."""
    initial = {name: a for name, _, a, _ in adapters(model, plan)}
    config = LoRAConfig(
        r=plan.rank,
        lora_alpha=2 * plan.rank,
        lora_dropout=plan.p,
        target_modules="all-linear",
        fp8=recipe,
    )
    device = next(model.parameters()).device
    apply_lora(model, config, rng_state=PhiloxState(3 + plan.seed, device))
    with torch.no_grad():
        for name, layer in lora_modules(model).items():
            layer.lora_A.copy_(initial[name])
    try:
        fuse(model)
    except ValueError as reason:
        if "under BlockScaling" not in str(reason):
            raise
        return "unfused"
    return "fused"


RECIPES: dict[str, Recipe | None] = {
    "ours, bf16 base": None,
    "ours, one scale": DelayedScaling(),
    "ours, blocks": BlockScaling(),
    "ours, blocks, powers of two": BlockScaling(power_2_scale=True),
}
ONE_SCALE = "ours, one scale"
PEERS = {REFERENCE: peft, "te fp8 + lora": te}
VARIANTS = (REFERENCE, *RECIPES, "te fp8 + lora")


def text_rows(folder: Path, sizes: Sizes, characters: int) -> Tensor:
    """int64 [rows, length] of the standard library's sources, as far as `characters` go, in a shuffled order."""
    from transformers import AutoTokenizer

    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    text = "\n".join(file.read_text(encoding="utf-8", errors="ignore") for file in files)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids = tokenizer(text[:characters], return_tensors="pt", add_special_tokens=False).input_ids[0]
    rows = ids[: len(ids) // sizes.length * sizes.length].view(-1, sizes.length)
    if len(rows) <= sizes.held:
        raise ValueError(f"the text has {len(rows)} rows, and {sizes.held} are held out")
    return rows[torch.randperm(len(rows), generator=torch.Generator().manual_seed(0))]


def loss_of(model: Any, ids: Tensor) -> Tensor:
    logits = model(input_ids=ids).logits[:, :-1]
    return F.cross_entropy(logits.flatten(0, 1).float(), ids[:, 1:].flatten())


@torch.no_grad()
def judged(model: Any, plain: Any, held: Tensor, run: Run) -> tuple[float, float]:
    """(KL from `plain`, held-out loss) of the model in evaluation, row by row; without a `plain` KL is NaN."""
    model.eval()
    kl, losses = [], []
    for ids in held.split(1):
        with run.context():
            logits = model(input_ids=ids).logits[0].float()
        losses.append(F.cross_entropy(logits[:-1], ids[0, 1:]))
        if plain is not None:
            truth = plain(input_ids=ids).logits[0].float()
            for one, other in zip(truth.split(LOSS_TOKENS), logits.split(LOSS_TOKENS), strict=True):
                p, q = one.log_softmax(1), other.log_softmax(1)
                kl.append((p.exp() * (p - q)).sum(1).mean())
    mean = float(torch.stack(losses).mean())
    return (float(torch.stack(kl).mean()) if kl else math.nan), mean


def train(model: Any, rows: Tensor, plan: Plan, sizes: Sizes, run: Run, attached: bool) -> None:
    model.train()
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=sizes.lr, weight_decay=0.0)
    held_together = attach(model, optimizer) if attached else None
    generator = torch.Generator().manual_seed(1 + plan.seed)
    order = torch.randint(len(rows), (sizes.steps, sizes.batch), generator=generator)
    for step, chosen in enumerate(order.to(rows.device)):
        ramp = min(1.0, (step + 1) / max(1, 0.05 * sizes.steps))
        cosine = 0.5 * (1 + math.cos(math.pi * step / sizes.steps))
        optimizer.param_groups[0]["lr"] = sizes.lr * ramp * cosine
        with run.context():
            loss = loss_of(model, rows[chosen])
        loss.backward()
        nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        run.after_step()
    if held_together is not None:
        held_together.detach()


def one(
    folder: Path, rows: Tensor, variant: str, seed: int, sizes: Sizes, device: torch.device
) -> Row:
    """The row of a variant and a seed."""
    transformers = quiet_transformers()
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    plain = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    plain = plain.to(device).eval().requires_grad_(False)
    plain.config.use_cache = False
    plan = Plan({}, lambda length: (rows, rows), sizes.lr, sizes.lr, seed=seed)
    rows = rows.to(device)
    held, data = rows[: sizes.held], rows[sizes.held :]
    torch.manual_seed(3 + seed)
    model, start = copy.deepcopy(plain), time.perf_counter()
    kl = before = after = math.nan
    check, how, run = "ok", "", Run()
    try:
        if variant in PEERS:
            run = PEERS[variant](model, plan)
        else:
            how = ours(RECIPES[variant], model, plan)
        kl, before = judged(model, plain, held, run)
        del plain
        train(model, data, plan, sizes, run, attached=variant not in PEERS)
        _, after = judged(model, None, held, run)
        if not math.isfinite(after):
            check = "WRONG: the loss is not finite"
    except Unavailable as reason:
        check = str(reason)
    except Exception as problem:  # a peer's own limits are its row's business; ours are wrong
        kind = "raised" if variant in PEERS else "WRONG: raised"
        check = f"{kind} {type(problem).__name__}: {problem}"
    numbers = [
        "" if math.isnan(n) else round(n, digits)
        for n, digits in ((kl, 6), (before, 5), (after, 5))
    ]
    seconds = round(time.perf_counter() - start, 1)
    values = (variant, seed, check.partition("\n")[0][:160], sizes.steps, how, *numbers, seconds)
    return dict(zip(COLUMNS, values, strict=True))


def read(path: Path) -> list[Row]:
    if not path.is_file():
        return []
    with path.open(newline="") as file:
        return [dict(row) for row in csv.DictReader(file)]


def append(path: Path, row: Row, facts: dict[str, str]) -> None:
    new = not path.is_file()
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", newline="") as file:
        writer = csv.DictWriter(file, [*COLUMNS, *facts])
        if new:
            writer.writeheader()
        writer.writerow({**row, **facts})


def summary(rows: list[Row]) -> list[Row]:
    """A row for each variant: means over its seeds."""
    found: dict[str, list[Row]] = {}
    for row in rows:
        found.setdefault(str(row["variant"]), []).append(row)

    def mean(variant: str, column: str, seeds: set[str]) -> float:
        of = [r for r in found.get(variant, []) if str(r["seed"]) in seeds and r[column] != ""]
        return math.fsum(float(str(r[column])) for r in of) / len(of) if of else math.nan

    def shown(value: float, digits: int = 5) -> object:
        return "" if math.isnan(value) else round(value, digits)

    result: list[Row] = []
    for variant in sorted(found, key=VARIANTS.index):
        of = found[variant]
        seeds = {str(row["seed"]) for row in of}
        losses = [float(str(row["held-out loss"])) for row in of if row["held-out loss"] != ""]
        get = partial(mean, variant, seeds=seeds)
        loss, kl = get("held-out loss"), get("KL")
        result.append(
            {
                "variant": variant,
                "check": next((r["check"] for r in of if r["check"] != "ok"), "ok"),
                "how": of[0]["how"],
                "seeds": len(of),
                "steps": of[0]["steps"],
                "KL": shown(kl),
                "KL ÷ one scale": shown(kl / mean(ONE_SCALE, "KL", seeds), 3),
                "base loss": shown(get("base loss")),
                "held-out loss": shown(loss),
                "spread": shown(max(losses) - min(losses)) if losses else "",
                "÷ bf16": shown(loss / mean(REFERENCE, "held-out loss", seeds)),
                "seconds": shown(get("seconds"), 1),
            }
        )
    return result


@contextlib.contextmanager
def ending(processes: list[subprocess.Popen[bytes]]) -> Iterator[None]:
    """None of them is left behind."""
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def all_of(args: argparse.Namespace, sizes: Sizes, path: Path, facts: dict[str, str]) -> list[Row]:
    """Run what `path` has no row of, and append it there. Returns the rows of what was asked for."""
    until = time.monotonic() + 60 * args.minutes
    asked = [(v, seed) for seed in args.seeds for v in args.variants]
    have = {
        (r["variant"], int(str(r["seed"]))) for r in read(path) if r["steps"] == str(sizes.steps)
    }
    todo = [job for job in asked if job not in have]
    running: dict[subprocess.Popen[bytes], Path] = {}
    with tempfile.TemporaryDirectory() as scratch:
        text = Path(scratch, "rows.pt")
        torch.save(text_rows(args.model, sizes, args.characters), text)
        processes: list[subprocess.Popen[bytes]] = []
        with ending(processes):
            while (todo or running) and time.monotonic() < until:
                while todo and len(running) < args.at_once:
                    variant, seed = todo.pop(0)
                    found = Path(scratch, f"{len(processes)}.json")
                    job = [variant, str(seed), str(text), str(found)]
                    command = [sys.executable, __file__, *sys.argv[1:], "--one", *job]
                    environ = os.environ | {"PYTHONHASHSEED": "0"}
                    processes.append(
                        subprocess.Popen(command, env=environ, stdout=subprocess.DEVNULL)
                    )
                    running[processes[-1]] = found
                for process in [p for p in running if p.poll() is not None]:
                    found = running.pop(process)
                    if found.is_file():
                        row = json.loads(found.read_text())
                        append(path, row, facts)
                        print(*(row[name] for name in COLUMNS), sep="  ", flush=True)
                time.sleep(0.2)
    rows = [r for r in read(path) if r["steps"] == str(sizes.steps)]
    return [r for r in rows if (r["variant"], int(str(r["seed"]))) in asked]


def main() -> int:
    options = parser("what FP8 recipes cost a trained model")
    options.add_argument("model", type=Path, metavar="DIR", help="a checkpoint with a tokenizer")
    options.add_argument("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS))
    options.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    options.add_argument("--minutes", type=float, default=9.0, help="no longer (default 9)")
    options.add_argument("--at-once", type=int, default=4, help="processes (default 4)")
    options.add_argument("--characters", type=int, default=CHARACTERS, help=argparse.SUPPRESS)
    for name, value in vars(Sizes()).items():
        option = f"--{name}"
        options.add_argument(option, type=type(value), default=value, help=f"default {value}")
    options.add_argument("--one", nargs=4, help=argparse.SUPPRESS)
    args, device = arguments(options)
    sizes = Sizes(**{name: getattr(args, name) for name in vars(Sizes())})
    if args.one:
        variant, seed, text, found = args.one
        with te_first_or_hidden(PEERS.get(variant) is te):
            row = one(args.model, torch.load(text), variant, int(seed), sizes, device)
        Path(found).write_text(json.dumps(row))
        return 0
    if args.output is None:
        options.error("--output is missing: rows are kept there from call to call")
    facts = environment(device)
    rows = all_of(args, sizes, args.output / "quality_recipes_seeds.csv", facts)
    missing = len(args.seeds) * len(args.variants) - len(rows)
    if missing:
        print(
            f"{missing} of {len(args.seeds) * len(args.variants)} runs are missing: call it again"
        )
    code = finish("quality_recipes", summary(rows), facts, args.output) if rows else 0
    return code or 2 * (missing > 0)


if __name__ == "__main__":
    sys.exit(main())
