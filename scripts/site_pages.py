"""Puts the pages of the repository where a site of it has them; mkdocs calls it (mkdocs.yml, hooks).

mkdocs knows one folder of pages. Here README, docs and benchmarks link each other as they stand in the repository, and
the site has the same folders, so that the links are right in both. Other files that a page links to (the Dockerfile, a
batch script) come along as they are.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
PAGES = ("*.md", "docs/**/*.md", "benchmarks/**/*.md", "tests/durations.md")
_LINK = re.compile(r"\]\(([^)#:\s]+)(?:#[^)\s]*)?\)")


def pages() -> list[Path]:
    """Every page, as a path in the repository."""
    return sorted(path.relative_to(ROOT) for pattern in PAGES for path in ROOT.glob(pattern))


def linked_files(page: Path) -> Iterator[Path]:
    """Files that are no pages and that a page links to, as paths in the repository."""
    for target in _LINK.findall((ROOT / page).read_text(encoding="utf-8")):
        path = (ROOT / page.parent / target).resolve()
        if path.is_file() and path.is_relative_to(ROOT) and path.suffix != ".md":
            yield path.relative_to(ROOT)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """All pages and what they link to, instead of the files of one folder."""
    theirs = [file for file in files if Path(config.docs_dir) not in Path(file.abs_src_path or "/").parents]
    ours = {*pages(), *(file for page in pages() for file in linked_files(page))}
    made = [File.generated(config, path.as_posix(), abs_src_path=str(ROOT / path)) for path in sorted(ours)]
    return Files([*theirs, *made])
