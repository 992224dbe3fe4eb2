# SPDX-License-Identifier: Apache-2.0
"""Which folders are searched for data files: those that no save_to_disk of the datasets library has written."""

from __future__ import annotations

from pathlib import Path

ON_DISK = "state.json"  # what datasets' save_to_disk writes last into a folder
SPLITS = "dataset_dict.json"


def is_searched(path: Path) -> bool:
    """Whether an entry of --data means all data files in a folder, at any depth."""
    markers = (ON_DISK, SPLITS)  # a folder of the datasets library is read by that
    return path.is_dir() and not any((path / name).is_file() for name in markers)
