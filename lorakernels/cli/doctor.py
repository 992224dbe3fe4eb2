# SPDX-License-Identifier: Apache-2.0
"""`lorakernels doctor`: versions, devices, the extension's build, and the implementation of each op with the reason.

This file finds the facts, and doctor_page.py writes them as a page.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import subprocess
import sys
from typing import Any

from lorakernels.cli.doctor_page import render

ENDS_SOON = True
PACKAGES = (
    "lorakernels",
    "torch",
    "triton",
    "safetensors",
    "transformers",
    "peft",
    "tokenizers",
    "nvidia-cudnn-frontend",
    "transformer_engine",
)
PROBE_SECONDS = 120
PROBE = """
import transformer_engine.pytorch
from lorakernels.device import cudnn_folders
print("\\n".join(cudnn_folders()))
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object instead of a page"
    )


def run(args: argparse.Namespace) -> int:
    """Returns 0 if lorakernels can train here (this takes no GPU), 1 if the extension is missing."""
    facts = collect()
    print(json.dumps(facts, indent=2) if args.json else render(facts))
    return 0 if facts["extension"]["error"] is None else 1


def collect() -> dict[str, Any]:
    """All facts that doctor reports, as plain JSON values."""
    import torch

    from lorakernels import __version__

    # torch.__version__ names the build (+cpu, +cu130); the version of its package does not always.
    versions = {**{name: _version(name) for name in PACKAGES}, "torch": str(torch.__version__)}
    versions["lorakernels"] = versions["lorakernels"] or __version__  # found by PYTHONPATH alone
    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpus": os.cpu_count(),
        "packages": versions,
        "transformer_engine": _transformer_engine(versions["transformer_engine"]),
        "extension": _extension(),
        "torch": _torch(),
        "devices": _devices(),
    }


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _transformer_engine(version: str | None) -> str:
    """Import Transformer Engine in a separate process, because a library built for another torch may abort."""
    if version is None:
        return "not installed"
    command = [sys.executable, "-c", PROBE]
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=PROBE_SECONDS)
    except subprocess.TimeoutExpired:
        return f"import took more than {PROBE_SECONDS} s"
    if result.returncode == 0:
        folders = result.stdout.split()
        two = f", with parts of two cuDNNs ({' and '.join(folders)}): CUDNN_HOME and LD_LIBRARY_PATH help"
        return "imports" + (two if len(folders) > 1 else "")
    lines = result.stderr.strip().splitlines()
    return f"import fails: {lines[-1] if lines else f'exit code {result.returncode}'}"


def _extension() -> dict[str, Any]:
    from lorakernels.device import extension, extension_error

    if (error := extension_error()) is not None:
        return {"error": error, "build": None, "cuda_runtime": None}
    module = extension()
    return {"error": None, "build": module.build_info(), "cuda_runtime": module.cuda_runtime_info()}


def _torch() -> dict[str, Any]:
    import torch

    return {"cuda_build": torch.version.cuda, "cuda_available": torch.cuda.is_available()}


def _devices() -> list[dict[str, Any]]:
    import torch

    from lorakernels.device import capability

    devices: list[dict[str, Any]] = [
        {"device": "cpu", "name": platform.processor() or platform.machine(), "ops": _ops("cpu")}
    ]
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        devices.append(
            {
                "device": f"cuda:{index}",
                "name": properties.name,
                "capability": [properties.major, properties.minor],
                "ops_as_on": list(capability(index)),
                "memory_gib": round(properties.total_memory / 2**30, 1),
                "multiprocessors": properties.multi_processor_count,
                "ops": _ops("cuda", capability(index)),
                "cudnn_graph": _cudnn_graph(index),
            }
        )
    return devices


def _cudnn_graph(index: int) -> str:
    """Why `attention="cudnn_graph"` cannot be asked for, "" if it can."""
    import torch

    from lorakernels.autograd.attention.graphed import why_not_here

    return why_not_here(torch.device("cuda", index))


def _ops(device_type: str, capability: tuple[int, int] | None = None) -> dict[str, dict[str, str]]:
    from lorakernels.ops.choice import implementations
    from lorakernels.ops.hardware import LayerOnGPU

    place = LayerOnGPU(capability or (0, 0))
    table = implementations(device_type, place)
    in_blocks = implementations(device_type, place._replace(blocks=True))
    table |= {f"{op} (blocks)": how for op, how in in_blocks.items() if how != table[op]}
    return {op: {"implementation": impl, "reason": reason} for op, (impl, reason) in table.items()}
