# SPDX-License-Identifier: Apache-2.0
"""Builds lorakernels._C with ninja; everything else about the package is in pyproject.toml.

LORAKERNELS_CUDA        unset: compile csrc's .cu files if nvcc is found; 0: never; 1: fail if it is not found
LORAKERNELS_CUDA_ARCHS  "90a;100": default the local GPUs', or 90a
CUDA_HOME, CUDA_PATH, PATH are searched for nvcc in that order; CXX names the C++ compiler, CXXFLAGS is added to its
flags, MAX_JOBS limits how many files compile at once. LORAKERNELS_LOCAL_VERSION=cpu makes version 0.1.0 0.1.0+cpu.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path

from setuptools import Extension, find_packages, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent
CSRC = ROOT / "csrc"
CXX_FLAGS = "-std=c++17 -O3 -g0 -fPIC -fvisibility=hidden -Wall -Wextra -Wno-unused-parameter"
NVCC_FLAGS = (
    "-std=c++17 -O3 -lineinfo -Xcompiler=-fPIC,-fvisibility=hidden,-Wall"
    " --ptxas-options=-v,--warn-on-spills"
)
LINK_FLAGS = "-shared -Wl,--exclude-libs,ALL -Wl,--as-needed"


@dataclass(frozen=True)
class Cuda:
    nvcc: str
    version: str
    archs: tuple[str, ...]

    @property
    def gencode(self) -> str:
        return " ".join(f"-gencode=arch=compute_{a},code=sm_{a}" for a in self.archs)


def output_of(*command: str) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return ""


def find_nvcc() -> str | None:
    for variable in ("CUDA_HOME", "CUDA_PATH"):
        home = os.environ.get(variable)
        if home and (nvcc := shutil.which("nvcc", path=str(Path(home, "bin")))):
            return nvcc
    return shutil.which("nvcc")


def cuda_archs() -> tuple[str, ...]:
    named = os.environ.get("LORAKERNELS_CUDA_ARCHS", "")
    if not named.strip():
        found = output_of("nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader")
        local = [c.strip().replace(".", "") for c in found.splitlines() if re.match(r"\d+\.\d$", c)]
        # From Hopper on, the arch-specific target ("a") is the one with wgmma and its successors.
        named = ";".join(c + "a" if int(c) >= 90 else c for c in local) or "90a"
    archs = tuple(dict.fromkeys(filter(None, re.split(r"[;,\s]+", named))))
    for arch in archs:
        if not re.fullmatch(r"\d{2,3}[af]?", arch):
            sys.exit(f"LORAKERNELS_CUDA_ARCHS: {arch!r} is not an architecture like 90a or 100")
    return archs


def find_cuda() -> Cuda | None:
    wanted = os.environ.get("LORAKERNELS_CUDA", "auto")
    if wanted not in ("auto", "0", "1"):
        sys.exit(f"LORAKERNELS_CUDA must be 0, 1 or unset, got {wanted!r}")
    nvcc = None if wanted == "0" else find_nvcc()
    if nvcc is None:
        if wanted == "1":
            sys.exit("LORAKERNELS_CUDA=1, but no nvcc in CUDA_HOME, CUDA_PATH or on PATH")
        print(f"lorakernels: building the host part only ({why_no_cuda()})", flush=True)
        return None
    release = re.search(r"V(\d+\.\d+\.\d+)", output_of(nvcc, "--version"))
    if release is None:
        sys.exit(f"{nvcc} --version does not work")
    return Cuda(nvcc, release[1], cuda_archs())


def why_no_cuda() -> str:
    if os.environ.get("LORAKERNELS_CUDA") == "0":
        return "LORAKERNELS_CUDA=0 was set"
    return "no nvcc in CUDA_HOME, CUDA_PATH or PATH"


def find_cxx() -> list[str]:
    """The compiler, perhaps behind a launcher (CXX="ccache g++")."""
    for command in map(shlex.split, (os.environ.get("CXX", ""), "c++", "g++", "clang++")):
        if command and (path := shutil.which(command[0])):
            return [path, *command[1:]]
    sys.exit("no C++ compiler: install one (Debian: apt-get install g++) or set CXX")


def find_ninja() -> str:
    found = [shutil.which("ninja")]
    try:
        import ninja
    except ImportError:
        pass
    else:  # BIN_DIR is empty in a venv that sees the package through --system-site-packages
        scripts = Path(ninja.__file__).parents[4] / "bin"
        found += [
            shutil.which("ninja", path=str(folder)) for folder in (ninja.BIN_DIR, scripts) if folder
        ]
    return next(filter(None, found), None) or sys.exit("no ninja: pip install ninja")


def pybind11_include(build_dir: Path) -> Path:
    """A link inside the build folder: under build isolation the real path is new every time."""
    import pybind11

    link = build_dir / f"pybind11-{pybind11.__version__}"
    link.unlink(missing_ok=True)
    link.symlink_to(pybind11.get_include(), target_is_directory=True)
    return link


def esc(path: Path) -> str:
    """A path as ninja reads it in a build line."""
    return str(path).replace("$", "$$").replace(" ", "$ ").replace(":", "$:")


def words(*arguments: object) -> str:
    """Arguments as the shell reads them in a ninja command."""
    return shlex.join(map(str, arguments)).replace("$", "$$")


def build_info_defines(version: str, cuda: Cuda | None) -> str:
    values = {
        "VERSION": f'"{version}"',
        "CUDA": "1" if cuda else "0",
        "CUDA_ARCHS": f'"{";".join(cuda.archs) if cuda else ""}"',
        "NVCC": f'"{cuda.version if cuda else ""}"',
        "WHY_NO_CUDA": f'"{"" if cuda else why_no_cuda()}"',
    }
    return words(*(f"-DLORAKERNELS_BUILD_{k}={v}" for k, v in values.items()))


def ninja_rules(build_dir: Path, cuda: Cuda | None) -> list[str]:
    cxx = find_cxx()
    include = words("-I", CSRC)
    compile_cpp = f"{words(*cxx)} {CXX_FLAGS} {os.environ.get('CXXFLAGS', '')} {include}"
    for path in (sysconfig.get_paths()["include"], pybind11_include(build_dir)):
        compile_cpp += " " + words("-isystem", path)
    link = f"{words(*cxx)} {LINK_FLAGS}"
    if cuda:
        host_compiler = next(word for word in reversed(cxx) if not word.startswith("-"))
        nvcc = words(cuda.nvcc, "-ccbin", host_compiler)
        link = f"{nvcc} -cudart=static {LINK_FLAGS.replace('-Wl,', '-Xlinker=')}"
    depfile = "-MMD -MF $out.d"
    deps = "  depfile = $out.d\n  deps = gcc"
    rules = [
        "ninja_required_version = 1.5",
        "rule cxx",
        f"  command = {compile_cpp} $defines {depfile} -c $in -o $out",
        deps,
        "rule link",
        f"  command = {link} $in -o $out",
    ]
    if cuda:
        compile_cu = f"{nvcc} {NVCC_FLAGS} {cuda.gencode} {include}"
        # ptxas' report stays beside the object: tests/csrc/test_compile.py reads it
        keep = "2> $out.log; code=$$?; cat $out.log >&2; exit $$code"
        rules += ["rule nvcc", f"  command = {compile_cu} {depfile} -c $in -o $out {keep}", deps]
    return rules


def units(build_dir: Path, cuda: Cuda | None) -> list[Path]:
    """Two C++ files that include all others, because pybind11's headers take most of the time of each."""
    sources = sorted(CSRC.rglob("*.cpp"))
    if cuda:  # no_cuda.cpp stands in for the .cu files beside it
        sources = [source for source in sources if source.name != "no_cuda.cpp"]
    ops = [source for source in sources if CSRC / "ops" in source.parents]
    files = []
    for name, parts in (("ops", ops), ("rest", [s for s in sources if s not in ops])):
        file = build_dir / f"{name}.cpp"
        text = "".join(f'#include "{part.relative_to(CSRC)}"\n' for part in parts)
        if not file.exists() or file.read_text() != text:  # ninja compiles what is newer
            file.write_text(text)
        files.append(file)
    return files


def ninja_file(build_dir: Path, target: Path, version: str, cuda: Cuda | None) -> str:
    lines = ninja_rules(build_dir, cuda)
    objects = []
    for source in [*units(build_dir, cuda), *(sorted(CSRC.rglob("*.cu")) if cuda else ())]:
        folder = CSRC if source.suffix == ".cu" else build_dir
        obj = esc(build_dir / f"{source.relative_to(folder)}.o")
        rule = "nvcc" if source.suffix == ".cu" else "cxx"
        lines.append(f"build {obj}: {rule} {esc(source)}")
        if source.name == "rest.cpp":  # with host/build_info.cpp
            lines.append(f"  defines = {build_info_defines(version, cuda)}")
        objects.append(obj)
    lines.append(f"build {esc(target)}: link {' '.join(objects)}")
    return "\n".join(lines) + "\n"


class NinjaBuild(build_ext):
    """Compiles in build/, which outlives the temporary folders pip gives to setuptools."""

    def build_extension(self, ext: Extension) -> None:
        cuda = find_cuda()
        build_dir = ROOT / "build" / str(sys.implementation.cache_tag)
        build_dir.mkdir(parents=True, exist_ok=True)
        target = build_dir / Path(self.get_ext_filename("_C")).name
        script = build_dir / "build.ninja"
        script.write_text(ninja_file(build_dir, target, self.distribution.get_version(), cuda))
        command = [find_ninja(), "-f", str(script), *(["-v"] if self.verbose > 1 else [])]
        if jobs := os.environ.get("MAX_JOBS"):
            command += ["-j", jobs]
        if subprocess.run(command, cwd=build_dir).returncode != 0:
            sys.exit("lorakernels: compiling csrc failed, see the compiler's message above")
        installed = Path(self.get_ext_fullpath(ext.name))
        installed.parent.mkdir(parents=True, exist_ok=True)
        self.copy_file(str(target), str(installed))


def version() -> str:
    """lorakernels.__version__, which is written there alone, with the local part that the environment names."""
    text = (ROOT / "lorakernels" / "__init__.py").read_text(encoding="utf-8")
    found = re.search(r'^__version__ = "([^"]+)"$', text, re.MULTILINE)
    if found is None:
        sys.exit("lorakernels/__init__.py has no __version__")
    local = os.environ.get("LORAKERNELS_LOCAL_VERSION", "")
    return f"{found[1]}+{local}" if local else found[1]


GRAPHS = ["lorakernels.graphs", *(f"lorakernels.graphs.{p}" for p in find_packages("graphs"))]

setup(
    version=version(),
    packages=[*find_packages(include=["lorakernels", "lorakernels.*"]), *GRAPHS],
    package_dir={"lorakernels": "lorakernels", "lorakernels.graphs": "graphs"},
    ext_modules=[Extension("lorakernels._C", sources=[])],
    cmdclass={"build_ext": NinjaBuild},
)
