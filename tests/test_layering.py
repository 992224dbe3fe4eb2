# SPDX-License-Identifier: Apache-2.0
"""Imports go one way: a module imports from its own package or from a layer below."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

import lorakernels

ROOT = Path(__file__).parents[1]
# Lowest first. "" is `import lorakernels`: the public names.
LAYERS = (
    ("field_checks", "peft_config"),
    ("recipes",),
    ("_C", "config", "graphs", "installed", "lazy", "values"),
    ("device",),
    ("numerics",),
    ("kernels",),
    ("ops",),
    ("state", "recorded"),
    ("autograd",),
    ("modules",),
    ("fusion",),
    ("parallel",),
    ("checkpoints", "loops", "planner"),
    ("",),
    ("integrations",),
    ("train",),
    ("cli",),
    ("__main__",),
)
RANK = {name: rank for rank, names in enumerate(LAYERS) for name in names}
TRAIN = "errors progress files options ranks data model optimizer layouts run model_card jobs adapted job demo"
# Rooms of a package, its folders and the files beside them, lowest first. Its __init__ may import from all.
ROOMS = {
    "autograd": (
        ("attention", "bias_dropout_add", "experts", "lent", "linear"),
        ("compiled", "decoder", "loss"),
    ),
    "checkpoints": (("base",), ("adapters",), ("loading",), ("export",)),
    "modules": (("marks",), ("linear",), ("order",), ("experts",), ("model",), ("batch",)),
    "parallel": (("ranks",), ("base", "tensor"), ("context",), ("pipeline",), ("optimizer",)),
    "train": tuple((room,) for room in TRAIN.split()),
}
LONGEST_FOLDER = 20  # Python files
TOOLS = {"cli/doctor.py"}  # shows what is inside
RECORD = "modules/marks.py"  # has fields of types of all floors
SCRIPT = 'if __name__ == "__main__":'


def imports(text: str, package: str) -> Iterator[str]:
    """Absolute names of what `text`, a module of `package`, imports, function bodies included."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parents = package.split(".")[: len(package.split(".")) - node.level + 1]
            base = ".".join([*(parents if node.level else []), *filter(None, [node.module])])
            yield from (f"{base}.{alias.name}" for alias in node.names)


def layer(name: str) -> str | None:
    """The part of lorakernels that the absolute name belongs to, None for other packages."""
    parts = name.split(".")
    if parts[0] != "lorakernels":
        return None
    return parts[1] if len(parts) > 1 and parts[1] in RANK else ""


def upward(text: str, path: str) -> list[str]:
    """Imports of `path` (relative to lorakernels/) that its layer may not make."""
    here = path.split("/")[0].removesuffix(".py").replace("__init__", "")
    package = ".".join(["lorakernels", *path.split("/")[:-1]])
    names = [name for name in imports(text, package) if name.split(".")[0] == "lorakernels"]
    if here in ("cli", "train") and path not in TOOLS:
        return [n for n in names if layer(n) not in ("", "graphs", "train", here)]
    return [n for n in names if layer(n) != here and RANK[layer(n) or ""] >= RANK[here]]


SOURCES = sorted(
    p.relative_to(ROOT / "lorakernels").as_posix() for p in ROOT.glob("lorakernels/**/*.py")
)


def judged(path: str) -> str:
    """The text of a source; of the record, the imports that are not for types alone."""
    text = (ROOT / "lorakernels" / path).read_text()
    if path == RECORD:
        return "\n".join(map(ast.unparse, at_import(ast.parse(text).body)))
    return text


def test_integrations_take_public_names_from_the_package() -> None:
    """As users do, so that these names' places can change."""
    paths = [path for path in SOURCES if path.startswith("integrations/")]
    assert paths
    for path in paths:
        text = (ROOT / "lorakernels" / path).read_text()
        names = [n.split(".") for n in imports(text, "lorakernels.integrations")]
        parts = [n for n in names if n[0] == "lorakernels" and len(n) > 2]
        assert [n for n in parts if n[-1] in lorakernels.__all__] == [], path


def test_every_module_has_a_layer() -> None:
    tops = {path.split("/")[0].removesuffix(".py").replace("__init__", "") for path in SOURCES}
    assert tops <= set(RANK), f"give {sorted(tops - set(RANK))} a place in LAYERS"


def test_imports_go_down() -> None:
    wrong = {path: upward(judged(path), path) for path in SOURCES}
    assert {path: names for path, names in wrong.items() if names} == {}


def test_a_folder_has_at_most_twenty_files() -> None:
    """Then it shows what it is about. ops/ has a file for each op."""
    counts = Counter(path.rpartition("/")[0] for path in SOURCES)
    assert {f: n for f, n in counts.items() if n > LONGEST_FOLDER and f != "ops"} == {}


def room_of(path: str) -> str:
    """The folder of the package that has `path` (relative to lorakernels/), or the file beside the folders."""
    return path.split("/")[1].removesuffix(".py")


def upward_in_package(text: str, path: str) -> list[str]:
    """Imports of `path` from rooms of its own package that its room may not make, the package itself included."""
    package, here = path.split("/")[0], room_of(path)
    rank = {room: i for i, rooms in enumerate(ROOMS[package]) for room in rooms}
    home = f"lorakernels.{package}."
    names = imports(text, ".".join(["lorakernels", *path.split("/")[:-1]]))
    rooms = {name: name.split(".")[2] for name in names if name.startswith(home)}
    return [
        name
        for name, room in rooms.items()
        if room != here and rank.get(room, len(rank)) >= rank[here]
    ]


@pytest.mark.parametrize("package", ROOMS)
def test_imports_between_rooms_go_down(package: str) -> None:
    paths = [path for path in SOURCES if path.startswith(f"{package}/")]
    paths.remove(f"{package}/__init__.py")
    rooms = [room for rank in ROOMS[package] for room in rank]
    assert {room_of(path) for path in paths} == set(rooms), f"every room has a place in {package}"
    wrong = {p: upward_in_package(judged(p), p) for p in paths}
    assert {path: names for path, names in wrong.items() if names} == {}


def at_import(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """The import statements that run when a module with this body is imported."""
    for node in body:
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            yield node
        elif isinstance(node, (ast.If, ast.Try, ast.With, ast.ClassDef)):
            checked = isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
            yield from at_import([] if checked else node.body)
            yield from at_import(getattr(node, "orelse", []))
            for handler in getattr(node, "handlers", []):
                yield from at_import(handler.body)


def circle(texts: dict[str, str]) -> list[str]:
    """Modules that import each other when one of them is imported; none without a circle. `texts`: by module name."""
    needs = {}
    for name, text in texts.items():
        code = "\n".join(map(ast.unparse, at_import(ast.parse(text).body)))
        names = set(imports(code, name.rpartition(".")[0]))
        needs[name] = {n if n in texts else n.rpartition(".")[0] for n in names} - {name}
    try:
        TopologicalSorter(needs).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def test_no_circle_of_files() -> None:
    texts = {}
    for path in SOURCES:
        name = path.removesuffix(".py").removesuffix("__init__").replace("/", ".").rstrip(".")
        texts[f"lorakernels.{name}".rstrip(".")] = (ROOT / "lorakernels" / path).read_text()
    assert circle(texts) == []


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("from p.a import x", ["p.a", "p.b", "p.a"]),
        ("try:\n    import p.a\nexcept ImportError:\n    pass", ["p.a", "p.b", "p.a"]),
        ("def f():\n    from p.a import x", []),
        ("if TYPE_CHECKING:\n    from p.a import x", []),
    ],
    ids=["plain", "tried", "in-function", "for-types"],
)
def test_the_check_of_circles(line: str, found: list[str]) -> None:
    assert circle({"p": "", "p.a": "from p import b", "p.b": line}) == found


@pytest.mark.parametrize(
    ("path", "line", "found"),
    [
        (
            "parallel/base/x.py",
            "def f():\n    from lorakernels.parallel.tensor.split import LayerCut",
            ["lorakernels.parallel.tensor.split.LayerCut"],
        ),
        (
            "parallel/ranks/x.py",
            "from lorakernels.parallel import Offload",
            ["lorakernels.parallel.Offload"],
        ),
        ("parallel/context/x.py", "from lorakernels.parallel.ranks import comm", []),
        ("parallel/ranks/x.py", "from lorakernels.parallel.ranks import comm", []),
    ],
    ids=["same-rank", "of-the-package", "down", "own-room"],
)
def test_the_check_of_rooms(path: str, line: str, found: list[str]) -> None:
    assert upward_in_package(line, path) == found


def test_graphs_knows_nothing_of_lorakernels() -> None:
    """Only the extension, which knows nothing of LoRA either: `lorakernels._C.Graph`, `.Watch`, `.flatten`."""
    paths = sorted(ROOT.glob("graphs/**/*.py"))
    assert paths
    for path in paths:
        package = ".".join(path.relative_to(ROOT).parts[:-1])
        names = {n for n in imports(path.read_text(), package) if n.split(".")[0] == "lorakernels"}
        assert names <= {"lorakernels._C"}, path


FOLDERS = ("device", "bindings", "host", "graphs", "ops")  # of csrc, lowest first


def includes(text: str, here: str) -> list[str]:
    """What `text`, a file of csrc's folder `here`, includes of csrc, but its own folder and lower ones."""
    found = re.findall(r'^#include "([^"]+)"', text, re.MULTILINE)
    rank = FOLDERS.index(here.split("/")[0])
    return [name for name in found if FOLDERS.index(name.split("/")[0]) > rank]


@pytest.mark.parametrize("folder", FOLDERS)
def test_includes_of_csrc_go_down(folder: str) -> None:
    """Of the ops, amax alone is part of others. graphs/ has no kernel of an op."""
    files = [p for p in (ROOT / "csrc" / folder).rglob("*.*") if p.suffix in (".h", ".cpp", ".cu")]
    assert files
    assert {p.name: found for p in files if (found := includes(p.read_text(), folder))} == {}
    for path in files if folder == "ops" else []:
        others = set(re.findall(r'^#include "ops/(\w+)/', path.read_text(), re.MULTILINE))
        assert others <= {path.parent.name, "amax"}, path


@pytest.mark.parametrize(
    ("here", "line", "found"),
    [
        ("device", '#include "host/launch.h"', ["host/launch.h"]),
        ("host", '#include "bindings/values.h"\n#include <string>', []),
    ],
)
def test_the_check_of_csrc(here: str, line: str, found: list[str]) -> None:
    assert includes(line, here) == found


BENCHMARKS = {
    p.relative_to(ROOT).with_suffix("").as_posix(): p.read_text(encoding="utf-8")
    for p in sorted(ROOT.glob("benchmarks/*/*.py"))
}


def wrong_way(path: str, text: str) -> list[str]:
    """Imports of `path`, a module of benchmarks/, of a script, or of a kind that is not its own, peers' or lib's."""
    kind = path.split("/")[1]
    allowed = {"peers"} if kind == "peers" else {"peers", "lib", kind}
    found = [
        n
        for n in imports(text, path.rpartition("/")[0].replace("/", "."))
        if n.startswith("benchmarks.")
    ]
    scripts = tuple(other.replace("/", ".") for other, code in BENCHMARKS.items() if SCRIPT in code)
    return [n for n in found if n.split(".")[1] not in allowed or n.startswith(scripts)]


def test_benchmarks_import_down_and_no_scripts() -> None:
    wrong = {path: wrong_way(path, text) for path, text in BENCHMARKS.items()}
    assert {path: names for path, names in wrong.items() if names} == {}


@pytest.mark.parametrize(
    ("path", "line", "found"),
    [
        ("peers/te", "from benchmarks.lib import rows", ["benchmarks.lib.rows"]),
        ("lib/x", "def f():\n    import benchmarks.models.quality", ["benchmarks.models.quality"]),
        (
            "ops/tune",
            "from benchmarks.ops.bench_philox import P",
            ["benchmarks.ops.bench_philox.P"],
        ),
        (
            "models/x",
            "from benchmarks.peers.base import Peer\nfrom benchmarks.lib import rows",
            [],
        ),
    ],
    ids=["peers-to-lib", "lib-to-models", "of-a-script", "down"],
)
def test_the_check_of_benchmarks(path: str, line: str, found: list[str]) -> None:
    assert wrong_way(f"benchmarks/{path}", line) == found


@pytest.mark.parametrize(
    ("path", "line", "found"),
    [
        ("ops/x.py", "from lorakernels import state", ["lorakernels.state"]),
        ("kernels/x.py", "from ..autograd import f", ["lorakernels.autograd.f"]),
        (
            "state/fp8.py",
            "def f():\n    import lorakernels.modules.linear.lora",
            ["lorakernels.modules.linear.lora"],
        ),
        ("config.py", "from lorakernels import LoRALinear", ["lorakernels.LoRALinear"]),
        (
            "train/run/loop.py",
            "from lorakernels.modules.model.merge import x",
            ["lorakernels.modules.model.merge.x"],
        ),
        ("train/run/loop.py", "from lorakernels import apply_lora", []),
        ("modules/a.py", "from .b import c\nimport torch", []),
    ],
)
def test_the_check_itself(path: str, line: str, found: list[str]) -> None:
    assert upward(line, path) == found
