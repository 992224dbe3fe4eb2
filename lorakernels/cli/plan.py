# SPDX-License-Identifier: Apache-2.0
"""``lorakernels plan``: read a model's config.json, and print what `ShardPlan` chooses and predicts for it."""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path

from lorakernels import PlanAxes
from lorakernels.train.errors import FinetuneError, OptionError
from lorakernels.train.model.folder import why_no_model
from lorakernels.train.options.fields import targets_of

ENDS_SOON = True
UNITS = {"": 1, "B": 1, "GB": 10**9, "GIB": 2**30, "MB": 10**6, "MIB": 2**20, "TB": 10**12}
SEQ_LEN = 1024
MACHINES = ("H200", "H100-80GB")
EPILOG = """\
exit codes: 0 planned, 1 nothing fits, or there is no plan for another reason
(the message says which), 2 an option is wrong. docs/plan.md says how far
predictions are from what was measured."""


def size(text: str) -> int:
    """Bytes of "80GB", "74.5GiB" or "80000000000"."""
    match = re.fullmatch(r"\s*([0-9.]+(?:e[0-9]+)?)\s*([A-Za-z]*)\s*", text)
    unit = UNITS.get(match[2].upper()) if match else None
    try:
        value = int(float(match[1]) * unit) if match and unit else 0
    except (ValueError, OverflowError):
        value = 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"expected a size such as 80GB or 74.5GiB, found {text!r}")
    return value


def count(text: str) -> int:
    """A positive whole number."""
    if not text.isascii() or not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"expected a positive whole number, found {text!r}")
    return int(text)


def machine(text: str) -> str:
    """A name of a machine that a plan knows."""
    if text not in MACHINES:
        raise argparse.ArgumentTypeError(
            f"expected {' or '.join(MACHINES)}, found {text!r}; --probe measures this machine's GPU instead"
        )
    return text


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.usage = "lorakernels plan --model DIR [--gpus N] [--seq-len S] [options]"
    parser.epilog = EPILOG
    add = parser.add_argument
    add(
        "--model",
        required=True,
        metavar="DIR",
        help="a folder with config.json; weights need not be there",
    )
    add("--gpus", type=count, default=1, metavar="N", help="of one host (default: 1)")
    add(
        "--seq-len", type=count, default=SEQ_LEN, metavar="S",
        help=f"tokens of a sequence (default: {SEQ_LEN}, as finetune's)",
    )  # fmt: skip
    add(
        "--batch-size",
        type=count,
        default=1,
        metavar="B",
        help="sequences of a microbatch (default: 1)",
    )
    add(
        "--cp",
        type=count,
        default=1,
        metavar="N",
        help="GPUs that share each sequence, by context parallel; with --pp, of each stage (default: 1)",
    )
    add(
        "--tp",
        type=count,
        default=1,
        metavar="N",
        help="GPUs that hold each layer together, by tensor parallel; with --cp, N times as many share a row. Not with "
        "--pp, --host-memory or --sharded-optimizer (default: 1)",
    )
    add("--pp", type=count, default=1, metavar="N", help="pipeline stages (default: 1)")
    add(
        "--microbatches",
        type=count,
        metavar="M",
        help="of a step, through the stages (default: --pp)",
    )
    add(
        "--memory",
        type=size,
        metavar="SIZE",
        help="of one GPU, such as 80GB (default: the machine's)",
    )
    add(
        "--machine",
        type=machine,
        default=MACHINES[0],
        metavar="NAME",
        help=f"{' or '.join(MACHINES)}, by constants of docs/plan.md (default: {MACHINES[0]})",
    )
    add("--probe", action="store_true", help="measure this machine's GPU for a second instead")
    add(
        "--host-memory",
        type=size,
        metavar="SIZE",
        help="that may be pinned on the host (default: none, with --probe the limit of its control groups)",
    )
    add("--r", type=count, default=16, help="rank of the adapters (default: 16)")
    add(
        "--target-modules", nargs="+", default=["all-linear"], metavar="NAME",
        help="modules that get an adapter (default: all-linear)",
    )  # fmt: skip
    add(
        "--fp8-recipe", choices=("delayed", "block"), default="delayed",
        help="of the base: one scale for each tensor, or one for each block (default: delayed)",
    )  # fmt: skip
    add(
        "--sharded-optimizer", action="store_true",
        help="split AdamW's state over the GPUs, by ShardedAdamW in a loop of your own",
    )  # fmt: skip
    add(
        "--allow-exposed", action="store_true",
        help="accept gathers and copies that take longer than the layers they overlap with",
    )  # fmt: skip


def run(args: argparse.Namespace) -> int:
    """Print the plan. Every expected failure becomes one line on stderr and an exit code."""
    try:
        folder = Path(args.model)
        if (why := why_no_model(folder)) is not None:
            return _fail(why, 1)
        axes = PlanAxes(
            args.gpus, args.cp, args.pp, args.microbatches, args.sharded_optimizer, args.tp
        )
        host_memory = args.host_memory or (None if args.probe else 0)
        axes.check(args.seq_len, host_memory)  # what is wrong so far is said without torch
        print(_plan(folder, args, axes, host_memory))
    except OptionError as error:
        return _fail(str(error), 2)
    except (FinetuneError, ValueError, TypeError) as error:
        return _fail(str(error), 1)
    return 0


def _plan(
    folder: Path, args: argparse.Namespace, axes: PlanAxes, host_memory: int | None
) -> object:
    from lorakernels import BlockScaling, DelayedScaling, LoRAConfig, ShardPlan
    from lorakernels.train.model.preflight import check_length, read_config

    config = read_config(folder)
    check_length(config.get_text_config(), args.seq_len)
    fp8 = BlockScaling() if args.fp8_recipe == "block" else DelayedScaling()
    lora = LoRAConfig(r=args.r, target_modules=targets_of(args.target_modules), fp8=fp8)
    return ShardPlan.of(
        config,
        args.memory,
        (args.batch_size, args.seq_len),
        axes,
        lora=lora,
        machine="probe" if args.probe else args.machine,
        host_memory=host_memory,
        allow_exposed=args.allow_exposed,
    )


def _fail(message: str, code: int) -> int:
    print(f"lorakernels plan: error: {message}", file=sys.stderr)
    return code
