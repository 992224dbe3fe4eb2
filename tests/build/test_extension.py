# SPDX-License-Identifier: Apache-2.0
"""The installed extension: what it exports, what it needs at run time, what it says about itself."""

from __future__ import annotations

import shutil
import subprocess

import pytest

from lorakernels import _C

needs_binutils = pytest.mark.skipif(shutil.which("readelf") is None, reason="no binutils")


def run(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


@needs_binutils
def test_needs_neither_torch_nor_a_driver() -> None:
    needed = [line for line in run("readelf", "-d", _C.__file__).splitlines() if "NEEDED" in line]
    assert needed
    for library in ("libcuda", "libcudart", "libtorch", "libc10", "libpython"):
        assert not [line for line in needed if library in line]


@needs_binutils
def test_exports_one_symbol() -> None:
    lines = run("nm", "-D", "--defined-only", _C.__file__).splitlines()
    strong = [line.split()[-1] for line in lines if line.split()[-2] in "TDB"]
    assert strong == ["PyInit__C"]


def test_build_info_says_what_was_compiled() -> None:
    info = _C.build_info()
    assert set(info) == {"version", "cuda", "cuda_archs", "nvcc", "why_no_cuda", "compiler"}
    assert (
        bool(info["nvcc"]) == bool(info["cuda_archs"]) == info["cuda"] != bool(info["why_no_cuda"])
    )
    assert info["compiler"].split()[0] in ("gcc", "clang")


def test_runtime_info_answers_without_a_driver() -> None:
    info = _C.cuda_runtime_info()
    assert info["compiled"] == _C.build_info()["cuda"]
    assert bool(info["error"]) == (not info["devices"])
