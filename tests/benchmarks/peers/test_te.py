# SPDX-License-Identifier: Apache-2.0
"""peers/te.py: a process either imports Transformer Engine first or does not find it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

TE_THAT_BREAKS = 'raise OSError("libcudnn_cnn.so.9: undefined symbol")'
IMPORTS = """
import sys
from benchmarks.peers.te import te_first_or_hidden
with te_first_or_hidden({wanted}):
    print("hidden" if sys.modules.get("transformer_engine", 1) is None else "there")
    import peft
assert "transformer_engine" not in sys.modules
print("imported")
"""


@pytest.mark.parametrize(("wanted", "said"), [(False, "hidden\nimported\n"), (True, "there\n")])
def test_peft_does_not_meet_a_te_that_another_worker_is_for(
    tmp_path: Path, wanted: bool, said: str
) -> None:
    """PEFT imports TE where there is one; one that breaks breaks PEFT, unless it is hidden."""
    pytest.importorskip("peft")
    (tmp_path / "transformer_engine").mkdir()
    (tmp_path / "transformer_engine" / "__init__.py").write_text(TE_THAT_BREAKS)
    root = Path(__file__).parents[3]
    path = os.pathsep.join([str(tmp_path), str(root), os.environ.get("PYTHONPATH", "")])
    code = IMPORTS.format(wanted=wanted)
    found = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
    )
    assert found.stdout == said, found.stderr
    assert (found.returncode == 0) != wanted and ("libcudnn_cnn" in found.stderr) == wanted
