# SPDX-License-Identifier: Apache-2.0
"""sdist → wheel, editable, without nvcc, for two architectures, and what an incremental build compiles again.

One copy of the tree, unpacked from its own sdist, is shared by all tests: they run in file order and build on each
other's objects, so that the C++ sources are compiled once.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from dataclasses import dataclass
from pathlib import Path

import pytest

import lorakernels

ROOT = Path(__file__).parents[2]
LEFT_OUT = (".git", ".venv", ".hypothesis", ".*_cache", "*.so", "*.egg-info", "__pycache__")
HOOK = "import sys; from setuptools import build_meta as b; print(getattr(b, sys.argv[1])(sys.argv[2]))"
CUDA = [Path(home, "bin") for name in ("CUDA_HOME", "CUDA_PATH") if (home := os.environ.get(name))]
NVCC = shutil.which("nvcc", path=os.pathsep.join([*map(str, CUDA), os.environ.get("PATH", "")]))

pytestmark = pytest.mark.slow


@dataclass
class Tree:
    """An unpacked sdist, and an environment in which no nvcc is found."""

    path: Path
    without_nvcc: dict[str, str]

    def python(self, *arguments: str, **changes: str) -> str:
        """Runs Python in the tree and returns both streams; fails with them if the command does."""
        result = self.attempt(*arguments, **changes)
        assert result.returncode == 0, result.stdout
        return result.stdout

    def attempt(self, *arguments: str, **changes: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, *arguments],
            cwd=self.path,
            env={**self.without_nvcc, **changes},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def hook(self, name: str, out: Path, **changes: str) -> tuple[Path, str]:
        """What pip calls: builds into `out`; returns the file and the log."""
        log = self.python("-c", HOOK, name, str(out), **changes)
        return out / log.strip().splitlines()[-1], log

    def build(self, **changes: str) -> set[str]:
        """Builds the extension in place; returns the objects that were written, by their paths in the build folder."""
        before = self.objects()
        self.python("setup.py", "-q", "build_ext", "--inplace", **changes)
        return {name for name, time in self.objects().items() if before.get(name) != time}

    def objects(self) -> dict[str, int]:
        folder = self.path / "build" / str(sys.implementation.cache_tag)
        return {str(p.relative_to(folder)): p.stat().st_mtime_ns for p in folder.rglob("*.o")}


def environment(bin_dir: Path) -> dict[str, str]:
    """A PATH with nothing but a C++ compiler, wherever nvcc is installed on this machine."""
    bin_dir.mkdir()
    compiler = next(filter(None, map(shutil.which, ("c++", "g++", "clang++"))))
    (bin_dir / "c++").write_text(
        f"#!/bin/sh\nPATH='{os.environ['PATH']}' exec '{compiler}' \"$@\"\n"
    )
    (bin_dir / "c++").chmod(0o755)
    dropped = (
        "CUDA_HOME",
        "CUDA_PATH",
        "CXX",
        "LORAKERNELS_CUDA",
        "LORAKERNELS_CUDA_ARCHS",
        "PYTHONPATH",
    )
    kept = {k: v for k, v in os.environ.items() if k not in dropped}
    return kept | {
        "PATH": str(bin_dir),
        "CXXFLAGS": "-O0",
    }  # what is optimized is the installed one


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Tree:
    if not any(map(shutil.which, ("c++", "g++", "clang++"))):
        pytest.skip("no C++ compiler")
    folder = tmp_path_factory.mktemp("a folder")
    without_nvcc = environment(folder / "bin")
    source = Tree(folder / "source", without_nvcc)
    source.path.mkdir()
    for name in ("lorakernels", "graphs", "csrc", "docs"):
        shutil.copytree(ROOT / name, source.path / name, ignore=shutil.ignore_patterns(*LEFT_OUT))
    for file in filter(Path.is_file, ROOT.iterdir()):
        shutil.copy(file, source.path)
    archive, _ = source.hook("build_sdist", folder)
    with tarfile.open(archive) as tar:
        tar.extractall(folder / "unpacked", filter="data")
    return Tree(next((folder / "unpacked").iterdir()), without_nvcc)


@pytest.fixture(scope="module")
def wheel(tree: Tree) -> tuple[Path, str]:
    out = tree.path.parent / "wheel"
    return tree.hook("build_wheel", out)


def test_wheel_from_sdist_without_nvcc_says_so_once(wheel: tuple[Path, str]) -> None:
    file, log = wheel
    assert file.name.startswith(f"lorakernels-{lorakernels.__version__}-cp")
    assert log.count("building the host part only (no nvcc in CUDA_HOME, CUDA_PATH or PATH)") == 1


def test_wheel_holds_the_package_and_nothing_else(wheel: tuple[Path, str]) -> None:
    names = zipfile.ZipFile(wheel[0]).namelist()
    suffix = sysconfig.get_config_var("EXT_SUFFIX")
    for name in (
        f"_C{suffix}",
        "_C.pyi",
        "py.typed",
        "graphs/__init__.py",
        "cli/__main__.py",
        "modules/__init__.py",
    ):
        assert f"lorakernels/{name}" in names
    assert {name.split("/")[0].split("-")[0] for name in names} == {"lorakernels"}
    assert not [name for name in names if name.endswith((".cu", ".cpp", ".h", ".pyc"))]


def test_installed_wheel_imports_from_itself(tree: Tree, wheel: tuple[Path, str]) -> None:
    site = tree.path.parent / "site"
    zipfile.ZipFile(wheel[0]).extractall(site)
    code = (
        "import lorakernels, lorakernels.graphs, lorakernels._C as c;"
        "files = lorakernels.__file__, lorakernels.graphs.__file__, c.__file__;"
        "print(*files, c.build_info()['cuda'], sep='\\n')"
    )
    result = tree.python("-I", "-c", f"import sys; sys.path.insert(0, {str(site)!r}); {code}")
    *files, cuda = result.splitlines()
    assert all(Path(file).is_relative_to(site) for file in files), files
    assert cuda == "False"


def test_sdist_holds_what_its_readme_links_to(tree: Tree) -> None:
    linked = set(re.findall(r"(?:docs|graphs)/[\w-]+\.md", (tree.path / "README.md").read_text()))
    assert "docs/getting-started.md" in linked
    assert not [name for name in linked if not (tree.path / name).is_file()]


def test_sdist_holds_csrc(tree: Tree) -> None:
    names = {str(path.relative_to(ROOT)) for path in (ROOT / "csrc").rglob("*.*")}
    assert {"csrc/bindings/register.h", "csrc/ops/fp8_gemm/params.h"} <= names
    assert not [name for name in names if not (tree.path / name).is_file()]


def test_a_user_s_type_checker_sees_our_types(tree: Tree, wheel: tuple[Path, str]) -> None:
    pytest.importorskip("mypy")
    home = tree.path.parent / "user"
    venv.create(home, with_pip=False)
    site = next(home.glob("lib/python*/site-packages"))
    zipfile.ZipFile(wheel[0]).extractall(site)
    script = home / "script.py"
    script.write_text(
        "from lorakernels import LoRAConfig\nreveal_type(LoRAConfig(r=4).r)\nLoRAConfig(r='four')\n"
    )
    options = (
        "--config-file=",
        "--ignore-missing-imports",
        f"--python-executable={home}/bin/python",
    )
    said = tree.attempt("-m", "mypy", *options, str(script)).stdout
    assert 'Revealed type is "builtins.int"' in said or 'Revealed type is "int"' in said, said
    assert 'script.py:3: error: Argument "r" to "LoRAConfig" has incompatible type' in said, said


def test_wheel_asks_for_no_library_that_a_bare_linux_lacks(
    tree: Tree, wheel: tuple[Path, str]
) -> None:
    """.ci/wheels gives it a manylinux tag as it is: auditwheel finds nothing to bundle."""
    pytest.importorskip("auditwheel")
    said = tree.python("-m", "auditwheel", "show", str(wheel[0]))
    assert 'constrains the platform tag to "manylinux_' in " ".join(said.split()), said


def test_wheel_requires_numpy(wheel: tuple[Path, str]) -> None:
    """safetensors.torch.save imports it, and neither torch nor safetensors requires it."""
    archive = zipfile.ZipFile(wheel[0])
    metadata = next(name for name in archive.namelist() if name.endswith("/METADATA"))
    assert "Requires-Dist: numpy\n" in archive.read(metadata).decode()


def test_editable_serves_the_tree_and_its_graphs(tree: Tree, wheel: tuple[Path, str]) -> None:
    before = tree.objects()
    out = tree.path.parent / "editable"
    file, _ = tree.hook("build_editable", out)
    assert tree.objects() == before, "pip's temporary folders made it compile again"
    site = out / "site"
    zipfile.ZipFile(file).extractall(site)
    # -S: without the .pth files of the installation these tests run from; torch may lie in an outer venv
    packages = [path for path in sys.path if path.endswith("-packages")]
    code = (
        f"import site, sys; site.addsitedir({str(site)!r}); sys.path += {packages!r};"
        "import lorakernels.graphs as g, lorakernels._C as c; print(g.__file__, c.__file__, sep='\\n')"
    )
    graphs, extension = tree.python("-I", "-S", "-c", code).splitlines()
    assert Path(graphs) == tree.path / "graphs" / "__init__.py"
    assert Path(extension).parent == tree.path / "lorakernels"


@pytest.mark.parametrize(
    ("changes", "rebuilt"),
    [
        ([], set()),
        (["csrc/graphs/no_cuda.cpp"], {"rest.cpp.o"}),
        (["csrc/ops/amax/bind.cpp"], {"ops.cpp.o"}),
        (["csrc/host/cuda_runtime_info.h"], {"rest.cpp.o"}),
    ],
    ids=["nothing", "a-source", "an-op", "a-header"],
)
def test_incremental(tree: Tree, wheel: object, changes: list[str], rebuilt: set[str]) -> None:
    tree.build(LORAKERNELS_CUDA="0")
    for name in changes:
        with (tree.path / name).open("a") as source:
            source.write("// changed\n")
    assert tree.build(LORAKERNELS_CUDA="0") == rebuilt


def test_a_header_that_moved_does_not_break_a_build_folder_that_knows_it(
    tree: Tree, wheel: object
) -> None:
    folder, source = tree.path / "csrc/host", tree.path / "csrc/host/build_info.cpp"
    tree.build(LORAKERNELS_CUDA="0")
    old = source.read_text()
    source.write_text(old.replace("host/build_info.h", "host/moved.h"))
    header = (folder / "build_info.h").rename(folder / "moved.h")
    assert tree.build(LORAKERNELS_CUDA="0") == {"rest.cpp.o"}
    header.rename(folder / "build_info.h")
    source.write_text(old)


def test_a_compile_error_fails_the_build_and_shows_the_compiler(tree: Tree, wheel: object) -> None:
    source = tree.path / "csrc" / "graphs" / "no_cuda.cpp"
    good = source.read_text()
    source.write_text(good + "int broken = nowhere;\n")
    result = tree.attempt("setup.py", "-q", "build_ext", "--inplace")
    source.write_text(good)
    assert result.returncode != 0
    assert "nowhere" in result.stdout and "compiling csrc failed" in result.stdout


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        (
            {"LORAKERNELS_CUDA": "1"},
            "LORAKERNELS_CUDA=1, but no nvcc in CUDA_HOME, CUDA_PATH or on PATH",
        ),
        ({"LORAKERNELS_CUDA": "yes"}, "LORAKERNELS_CUDA must be 0, 1 or unset, got 'yes'"),
    ],
    ids=["required", "misspelt"],
)
def test_cuda_switch_errors(tree: Tree, variables: dict[str, str], message: str) -> None:
    result = tree.attempt("setup.py", "-q", "build_ext", "--inplace", **variables)
    assert result.returncode != 0
    assert message in result.stdout


@pytest.mark.skipif(NVCC is None, reason="no nvcc in CUDA_HOME, CUDA_PATH or on PATH")
def test_cuda_for_other_architectures(tree: Tree, wheel: object) -> None:
    """Every kernel compiles for an A100, an L40, a B200 and an RTX 50; without optimization, to take half of the time.

    They are those of .ci/wheels. On the last two setup.py asks for 100a and 120a by itself, which take what 100 and 120
    take, and no file of csrc asks for either.
    """
    with_nvcc = {
        "PATH": os.pathsep.join([tree.without_nvcc["PATH"], str(Path(str(NVCC)).parent)]),
        "NVCC_APPEND_FLAGS": "-Xcicc -O0 -Xptxas -O0",
    }
    bad = tree.attempt(
        "setup.py", "-q", "build_ext", "--inplace", LORAKERNELS_CUDA_ARCHS="hopper", **with_nvcc
    )
    assert "LORAKERNELS_CUDA_ARCHS: 'hopper' is not an architecture" in bad.stdout
    wheels = re.search(r"CUDA_ARCHS:-([\da;]+)\}", (ROOT / ".ci" / "wheels").read_text())
    assert wheels is not None
    # 90a, which takes longest, is compiled as installed and by tests/csrc/test_compile.py
    others = [arch for arch in wheels[1].split(";") if arch != "90a"]
    assert others == ["80", "89", "100", "120"], "as docs/support.md says"
    archs = ";".join(others)
    written = tree.build(LORAKERNELS_CUDA_ARCHS=archs, **with_nvcc)
    csrc = tree.path / "csrc"
    sources = {f"{path.relative_to(csrc)}.o" for path in csrc.rglob("*.cu")}
    assert written == sources | {"ops.cpp.o", "rest.cpp.o"}  # without no_cuda.cpp
    assert tree.build(LORAKERNELS_CUDA_ARCHS=archs, **with_nvcc) == set()
    # The tree is no installed package, and refuses to be imported as one: the extension alone
    code = "import sys; sys.path.insert(0, 'lorakernels'); import _C; print(_C.build_info())"
    info = tree.python("-I", "-c", code)
    assert "'cuda': True" in info and f"'cuda_archs': '{archs}'" in info
    features = re.compile(r"ARCH_FEAT_SM(\d+)|ARCH_(?:FAMILY_)?SPECIFIC__")
    texts = [path.read_text() for path in csrc.rglob("*.*")]
    assert {found[1] for text in texts for found in features.finditer(text)} == {"90"}
