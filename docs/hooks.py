# SPDX-License-Identifier: Apache-2.0
"""mkdocs hooks: pages and pictures that lie outside of docs/ are part of the site, and links to them lead there.

A link to any other file of the repository becomes its name, since the site does not hold the source.
"""

from __future__ import annotations

import re
from pathlib import Path, PurePosixPath
from typing import Any

from mkdocs.structure.files import File

ROOT = Path(__file__).resolve().parents[1]
PAGES = {
    "README.md": "index.md",
    "graphs/README.md": "graphs.md",
    "CONTRIBUTING.md": "contributing.md",
    "benchmarks/results/README.md": "results.md",
}
RESULTS = "benchmarks/results/h200"
LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\((?!\w+://|#)([^)#\s]+)(#[^)\s]*)?\)")


def site_path(path: str) -> str | None:
    """Where a file of the repository is in the site, or None.

    Args:
        path: from the repository's root, with slashes.
    """
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    if path.startswith(f"{RESULTS}/") and path.endswith(".png"):
        return f"results/{PurePosixPath(path).name}"
    return PAGES.get(path)


def resolved(source: str, link: str) -> str:
    """The repository's path of a relative link in the file `source`.

    Raises:
        ValueError: the file is not there.
    """
    path = (ROOT / source).parent / link
    if not path.exists():
        raise ValueError(f"{source} links to {link}, which is not in the repository")
    return path.resolve().relative_to(ROOT).as_posix()


def rewritten(markdown: str, source: str) -> str:
    """`markdown` of the repository's file `source` with its links as the site needs them."""
    own = site_path(source)
    up = "../" * (PurePosixPath(own or "").parts.__len__() - 1)

    def link(match: re.Match[str]) -> str:
        picture, words, target, anchor = match.groups()
        path = site_path(resolved(source, target))
        return words if path is None else f"{picture}[{words}]({up}{path}{anchor or ''})"

    return LINK.sub(link, markdown)


def on_files(files: Any, config: Any) -> Any:
    for outside, page in PAGES.items():
        files.append(File.generated(config, page, abs_src_path=str(ROOT / outside)))
    for picture in sorted((ROOT / RESULTS).glob("*.png")):
        files.append(File.generated(config, f"results/{picture.name}", abs_src_path=str(picture)))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    outside = {page: source for source, page in PAGES.items()}
    uri = page.file.src_uri
    return rewritten(markdown, outside.get(uri, f"docs/{uri}"))
