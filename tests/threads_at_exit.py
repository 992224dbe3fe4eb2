# SPDX-License-Identifier: Apache-2.0
"""`python threads_at_exit.py SCRIPT …` or `… -m MODULE …` is python's, and fails if groups of gloo's outlive Python.

The exit code is 9, and the last line says why: a thread of gloo's is left after all that is done as Python ends, or
there never was one.
"""

from __future__ import annotations

import atexit
import os
import runpy
import sys
from pathlib import Path


def threads() -> list[str]:
    """Names of this process's threads of gloo's."""
    names = [(task / "comm").read_text().strip() for task in Path("/proc/self/task").iterdir()]
    return [name for name in names if "gloo" in name]


found: list[str] = []


@atexit.register  # before any other, so that it runs after them
def look() -> None:
    left = threads()
    if left or not found:
        print(f"threads of gloo's: {left}, before the groups ended: {found}", file=sys.stderr)
        sys.stderr.flush()
        os._exit(9)


def main() -> None:
    import torch.distributed as dist

    real = dist.destroy_process_group

    def destroy(*args: object) -> None:
        found[:] = threads()
        real(*args)

    dist.destroy_process_group = destroy
    _, name, *_ = sys.argv
    if name == "-m":
        sys.path[0] = ""
        del sys.argv[:2]
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    else:
        sys.path[0] = str(Path(name).parent)
        del sys.argv[0]
        runpy.run_path(name, run_name="__main__")


if __name__ == "__main__":
    main()
