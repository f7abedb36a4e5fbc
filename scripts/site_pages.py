"""Puts the pages of the repository where a site of it has them; mkdocs calls it (mkdocs.yml, hooks).

mkdocs knows one folder of pages. Here README, docs and benchmarks link each other as they stand in the repository, and
the site has the same folders, so that the links are right in both. Other files that a page links to (the Dockerfile, a
batch script) come along as they are. On the site a link is named by the title of its page rather than by its file, and
diagrams stand in the page, where their ink follows the theme.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from html import escape, unescape
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

from moevement_core import __version__

ROOT = Path(__file__).parents[1]
PAGES = ("*.md", "docs/**/*.md", "benchmarks/**/*.md", "tests/durations.md")
ASSETS = ROOT / "docs" / "assets"
_LINK = re.compile(r"\]\(([^)#:\s]+)(?:#[^)\s]*)?\)")
_NAMED_BY_FILE = re.compile(r"\[[\w./]+\.md\]\(([^)#:\s]+\.md)(#[^)\s]*)?\)")
_DIAGRAM = re.compile(r'<img alt="([^"]*)" src="([^"]+\.svg)"\s*/?>')


def pages() -> list[Path]:
    """Every page, as a path in the repository."""
    return sorted(path.relative_to(ROOT) for pattern in PAGES for path in ROOT.glob(pattern))


def linked_files(page: Path) -> Iterator[Path]:
    """Files that are no pages and that a page links to, as paths in the repository."""
    for target in _LINK.findall((ROOT / page).read_text(encoding="utf-8")):
        path = (ROOT / page.parent / target).resolve()
        if path.is_file() and path.is_relative_to(ROOT) and path.suffix != ".md":
            yield path.relative_to(ROOT)


def named_by_title(markdown: str, folder: Path) -> str:
    """Return the text of a page of ``folder`` with each link whose text is a file name renamed to its page's title."""

    def rename(link: re.Match[str]) -> str:
        page = folder / link[1]
        return f"[{_title(page)}]({link[1]}{link[2] or ''})" if page.is_file() else link[0]

    return _NAMED_BY_FILE.sub(rename, markdown)


def inline_diagrams(html: str, folder: Path) -> str:
    """Return the content of a page of ``folder`` with its SVG files in place, labelled by their alternative text."""

    def inline(image: re.Match[str]) -> str:
        path = folder / unescape(image[2])
        if not path.is_file():
            return image[0]
        svg = path.read_text(encoding="utf-8")
        svg = re.sub(r"<style.*?</style>", "", svg[svg.index("<svg") :], flags=re.DOTALL)
        return svg.replace("<svg ", f'<svg class="diagram" role="img" aria-label="{escape(unescape(image[1]))}" ', 1)

    return _DIAGRAM.sub(inline, html)


def on_config(config: MkDocsConfig) -> None:
    """Name the version at the foot of each page."""
    config.copyright = f"Version {__version__}, Apache-2.0"


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Return all pages and what they link to, instead of the files of one folder."""
    theirs = [file for file in files if Path(config.docs_dir) not in Path(file.abs_src_path or "/").parents]
    assets = (path.relative_to(ROOT) for path in ASSETS.iterdir())
    ours = {*pages(), *assets, *(file for page in pages() for file in linked_files(page))}
    made = [File.generated(config, path.as_posix(), abs_src_path=str(ROOT / path)) for path in sorted(ours)]
    return Files([*theirs, *made])


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Name links by the titles of their pages."""
    return named_by_title(markdown, _folder(page))


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Put diagrams into the page."""
    return inline_diagrams(html, _folder(page))


def _folder(page: Page) -> Path:
    return (ROOT / page.file.src_uri).parent


def _title(page: Path) -> str:
    first = next(line for line in page.read_text(encoding="utf-8").splitlines() if line.startswith("# "))
    return first.removeprefix("# ")
