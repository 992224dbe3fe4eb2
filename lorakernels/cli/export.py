# SPDX-License-Identifier: Apache-2.0
"""``lorakernels export``: merge a base and an adapter into the directory of a merged model, by `export_model`."""

from __future__ import annotations

import argparse
import signal
import sys
from pathlib import Path
from typing import Any

from lorakernels.train.model.folder import why_no_model

EPILOG = """\
exit codes: 0 done, 1 it failed (the message says why), 2 an option is wrong,
130 / 143 after SIGINT / SIGTERM. Unless it is 0, nothing is at --output, or
what was there before."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = EPILOG
    parser.add_argument(
        "--model",
        required=True,
        metavar="DIR",
        help="the base: config.json, safetensors, tokenizer files; plain or block FP8",
    )
    parser.add_argument(
        "--adapter",
        required=True,
        metavar="DIR",
        help="the adapter in PEFT's format, such as finetune's OUTPUT/adapter",
    )
    parser.add_argument(
        "--output", required=True, metavar="DIR", help="where the merged model goes: new or empty"
    )
    parser.add_argument(
        "--format",
        choices=("bf16", "fp8"),
        default="bf16",
        help="bf16, or fp8: e4m3 with a scale per 128x128 block in all linear layers but the head (default: bf16)",
    )
    parser.add_argument(
        "--overwrite", action="store_true", help="replace the model that --output holds, as a whole"
    )


def run(args: argparse.Namespace) -> int:
    """Run the export. Every expected failure becomes one line on stderr and an exit code."""
    before = signal.signal(signal.SIGTERM, _terminate)
    try:
        if (why := why_no_model(Path(args.model))) is not None:
            return _fail(f"error: {why}", 1)
        from lorakernels import export_model

        done = export_model(
            args.model,
            args.adapter,
            args.output,
            format=args.format,
            overwrite=args.overwrite,
            progress=_show if sys.stderr.isatty() else None,
        )
    except (ValueError, TypeError, OSError, ImportError) as error:
        return _fail(f"error: {_text(error)}", 1)
    except KeyboardInterrupt:
        return _fail("SIGINT: nothing was written", 130)
    except SystemExit as stop:
        return _fail("SIGTERM: nothing was written", int(stop.code or 143))
    finally:
        signal.signal(signal.SIGTERM, before)
    files = f"{done.shards} file{'s' if done.shards > 1 else ''}"
    print(
        f"{done.path}: {done.format}, {done.bytes / 1e9:.2f} GB in {files}, {done.merged} layers merged"
    )
    if done.plain:
        print(f"kept in bf16: {_short(done.plain)}")
    return 0


def _short(names: tuple[str, ...]) -> str:
    more = f" and {len(names) - 4} more" if len(names) > 4 else ""
    return ", ".join(names[:4]) + more


def _terminate(number: int, frame: Any) -> None:
    raise SystemExit(143)


def _show(done: int, total: int) -> None:
    end = "\n" if done == total else ""
    text = f"\rwriting {done / 1e9:.1f} of {total / 1e9:.1f} GB"
    print(text, end=end, file=sys.stderr, flush=True)


def _text(error: BaseException) -> str:
    if isinstance(error, OSError) and error.strerror:
        return f"{error.strerror}: {error.filename}" if error.filename else error.strerror
    return str(error)


def _fail(message: str, code: int) -> int:
    print(f"lorakernels export: {message}", file=sys.stderr, flush=True)
    return code
