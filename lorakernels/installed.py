# SPDX-License-Identifier: Apache-2.0
"""Refuse a package that is not the installed one. The import of `lorakernels` imports this file before all others.

Python started in the source tree finds the folder lorakernels/ there first. After `pip install .` that folder lacks
what the build adds: `graphs` and `_C`.
"""

from importlib.util import find_spec
from pathlib import Path

HERE = Path(__file__).resolve().parent
_graphs = find_spec("lorakernels.graphs")
_folder = None if _graphs is None else Path(str(_graphs.origin)).resolve().parent
# The build puts graphs into this folder; an editable install maps its name to the folder beside this one.
if _folder not in (HERE / "graphs", HERE.parent / "graphs"):
    raise ImportError(
        f"lorakernels was imported from {HERE}, a source tree that is not the installed package: Python looks first in "
        "the folder that it is started in, and in PYTHONPATH. Start it in another folder, or install this tree by "
        "`pip install -e .`"
    )
