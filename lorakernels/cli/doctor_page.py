# SPDX-License-Identifier: Apache-2.0
"""The facts of `lorakernels doctor` as a page: machine, packages, build, what ops take, and what to install."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from typing import Any

from lorakernels.cli.costs import SLOWER

WIDTH = 120
OPTIONAL = {  # {package: (extra, what it is for)}
    "transformers": ("hf", "models of transformers, fused layers and `lorakernels finetune`"),
    "peft": ("hf", "PEFT's models over our layers"),
    "nvidia-cudnn-frontend": ("cudnn", "attention of packed rows by cuDNN, on Hopper"),
}
Facts = dict[str, Any]


def render(facts: Facts) -> str:
    """One section per topic, the verdict first."""
    gpus = [device for device in facts["devices"] if device["device"] != "cpu"]
    sections = {
        "This machine": _machine(facts),
        "Packages": list(_packages(facts)),
        "Build of lorakernels._C": _build(facts["extension"]),
    }
    for device in gpus or facts["devices"]:
        sections[f"What each op takes on {device['device']}"] = _ops(device["ops"])
    if hints := list(advice(facts)):
        sections["What would change that"] = [line for hint in hints for line in _wrapped(hint)]
    lines = [_verdict(facts, gpus)]
    for title, body in sections.items():
        lines += ["", title, *(f"  {line}" for line in body)]
    return "\n".join(lines)


def _verdict(facts: Facts, gpus: list[Facts]) -> str:
    if facts["extension"]["error"]:
        return "lorakernels cannot train here: its extension is missing."
    if gpus:
        count = "1 GPU" if len(gpus) == 1 else f"{len(gpus)} GPUs"
        return f"lorakernels can train here, on {count}."
    return "lorakernels can train here, on the CPU, which is for tests and small models."


def _machine(facts: Facts) -> list[str]:
    torch = facts["torch"]
    built = f"for CUDA {torch['cuda_build']}" if torch["cuda_build"] else "without CUDA"
    seen = "sees a GPU" if torch["cuda_available"] else "sees no GPU"
    return [
        f"{facts['platform']}, {facts['cpus']} CPUs, Python {facts['python']}",
        f"torch is built {built} and {seen}",
        *(_device(device) for device in facts["devices"]),
    ]


def _device(device: Facts) -> str:
    if device["device"] == "cpu":
        return f"cpu     {device['name']}"
    capability, as_on = (".".join(map(str, device[key])) for key in ("capability", "ops_as_on"))
    note = "" if capability == as_on else f"; LORAKERNELS_CAPABILITY={as_on}: ops as there"
    return (
        f"{device['device']:8}{device['name']}, compute capability {capability}, "
        f"{device['multiprocessors']} multiprocessors, {device['memory_gib']} GiB{note}"
    )


def _packages(facts: Facts) -> Iterator[str]:
    width = max(map(len, facts["packages"])) + 2
    for name, version in facts["packages"].items():
        note = f" ({facts[name]})" if name == "transformer_engine" and version else ""
        yield f"{name:{width}}{version or 'not installed'}{note}"


def _build(extension: Facts) -> list[str]:
    if extension["error"]:
        return [f"missing: {extension['error']}"]
    build, runtime = extension["build"], extension["cuda_runtime"]
    compiler = f"compiler {build['compiler']}"
    if not build["cuda"]:
        why = build.get("why_no_cuda") or "no nvcc was found"
        return [
            compiler,
            f"host part only ({why}, when it was built): a GPU runs Triton's and PyTorch's kernels",
        ]
    archs = build["cuda_archs"].replace(";", ", sm_")
    devices = f"{len(runtime['devices'])} GPUs" if not runtime["error"] else runtime["error"]
    return [
        compiler,
        f"CUDA compiled by nvcc {build['nvcc']} for sm_{archs}",
        f"CUDA runtime {runtime['runtime_version']}, driver {runtime['driver_version']}: {devices}",
    ]


def _ops(ops: dict[str, dict[str, str]]) -> list[str]:
    """One line per op, or a single line if all ops have the same implementation, as on a CPU."""
    rows = {op: (entry["implementation"], entry["reason"]) for op, entry in ops.items()}
    if len(set(rows.values())) == 1:
        rows = {f"all {len(rows)} ops": next(iter(rows.values()))}
    column, width = (
        max(map(len, names)) + 2
        for names in (rows, [implementation for implementation, _ in rows.values()])
    )
    lines = [
        f"{op:{column}}{implementation:{width}}{reason}{_cost(op, implementation)}"
        for op, (implementation, reason) in rows.items()
    ]
    if slower := [op for op in rows if (op, rows[op][0]) in SLOWER]:
        lines += [
            f"{len(slower)} of {len(rows)} ops have a faster implementation; × is the time of this one ÷ that one's, "
            "as an H200 has them"
        ]
    return lines


def _cost(op: str, implementation: str) -> str:
    factor = SLOWER.get((op, implementation))
    return "" if factor is None else f"  [{factor:g} ×]"


def advice(facts: Facts) -> Iterator[str]:
    """Advice on what to install or build, and why: a sentence with its command each."""
    gpus = [device for device in facts["devices"] if device["device"] != "cpu"]
    if facts["extension"]["error"]:
        yield "The extension: `pip install --force-reinstall --no-deps lorakernels`, or `pip install .` in its sources."
    elif gpus:
        yield from _builds(facts["extension"]["build"], gpus)
    if facts["torch"]["cuda_build"] is None:
        yield "On a machine with a GPU: a torch that is built for CUDA (https://pytorch.org/get-started)."
    for package, (extra, purpose) in OPTIONAL.items():
        needed = package != "nvidia-cudnn-frontend" or any(g["capability"][0] == 9 for g in gpus)
        if needed and not facts["packages"][package]:
            yield f'`pip install "lorakernels[{extra}]"`: {purpose}.'
    for gpu in gpus:
        why = gpu["cudnn_graph"]
        if facts["packages"]["nvidia-cudnn-frontend"] and why:
            yield f"{gpu['device']} runs no attention by cuDNN's graphs: {why}."


def _builds(build: Facts, gpus: list[Facts]) -> Iterator[str]:
    again = "`pip install --force-reinstall --no-deps .` in the sources of lorakernels"
    if not build["cuda"]:
        yield f"csrc's CUDA kernels: install nvcc, set CUDA_HOME, and run {again}."
        return
    slow = {
        ".".join(map(str, gpu["ops_as_on"]))
        for gpu in gpus
        if any("was built for" in entry["reason"] for entry in gpu["ops"].values())
    }
    for wanted in sorted(slow):
        archs = wanted.replace(".", "")
        yield f'csrc\'s kernels for compute capability {wanted}: LORAKERNELS_CUDA_ARCHS="{archs}" {again}.'


def _wrapped(text: str) -> list[str]:
    lines = textwrap.wrap(text, WIDTH - 4, break_on_hyphens=False, break_long_words=False)
    return [f"{'* ' if i == 0 else '  '}{line}" for i, line in enumerate(lines)]
