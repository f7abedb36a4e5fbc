"""Hooks of mkdocs that place the repository's pages on a site (mkdocs.yml, hooks).

mkdocs expects one folder of pages. README, docs and benchmarks link to each other by paths in the repository. The site
has the same folders, so the links work in the repository and on the site. Other files that a page links to (the
Dockerfile, a batch script) are included unchanged. On the site, a link shows the title of the linked page instead of
the file name. Diagrams are inlined, so that their text color follows the theme.
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
    """Return every page, as a path relative to the repository."""
    return sorted(path.relative_to(ROOT) for pattern in PAGES for path in ROOT.glob(pattern))


def linked_files(page: Path) -> Iterator[Path]:
    """Yield the files other than pages that a page links to, as paths relative to the repository."""
    for target in _LINK.findall((ROOT / page).read_text(encoding="utf-8")):
        path = (ROOT / page.parent / target).resolve()
        if path.is_file() and path.is_relative_to(ROOT) and path.suffix != ".md":
            yield path.relative_to(ROOT)


def named_by_title(markdown: str, folder: Path) -> str:
    """Return the text of a page of ``folder``, in which links show titles of pages instead of file names."""

    def rename(link: re.Match[str]) -> str:
        page = folder / link[1]
        return f"[{_title(page)}]({link[1]}{link[2] or ''})" if page.is_file() else link[0]

    return _NAMED_BY_FILE.sub(rename, markdown)


def inline_diagrams(html: str, folder: Path) -> str:
    """Return a page of ``folder`` as HTML with SVG files inlined. Alternative texts become labels of the diagrams."""

    def inline(image: re.Match[str]) -> str:
        path = folder / unescape(image[2])
        if not path.is_file():
            return image[0]
        svg = path.read_text(encoding="utf-8")
        svg = re.sub(r"<style.*?</style>", "", svg[svg.index("<svg") :], flags=re.DOTALL)
        return svg.replace("<svg ", f'<svg class="diagram" role="img" aria-label="{escape(unescape(image[1]))}" ', 1)

    return _DIAGRAM.sub(inline, html)


def on_config(config: MkDocsConfig) -> None:
    """Set the version in the footer of each page."""
    config.copyright = f"Version {__version__}, Apache-2.0"


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Return all pages and the files that they link to, instead of the files of one folder."""
    generated = [file for file in files if Path(config.docs_dir) not in Path(file.abs_src_path or "/").parents]
    assets = (path.relative_to(ROOT) for path in ASSETS.iterdir())
    wanted = {*pages(), *assets, *(file for page in pages() for file in linked_files(page))}
    files_of_repository = [
        File.generated(config, path.as_posix(), abs_src_path=str(ROOT / path)) for path in sorted(wanted)
    ]
    return Files([*generated, *files_of_repository])


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Replace file names in the text of links by titles of pages."""
    return named_by_title(markdown, _folder(page))


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Inline the diagrams of the page."""
    return inline_diagrams(html, _folder(page))


def _folder(page: Page) -> Path:
    return (ROOT / page.file.src_uri).parent


def _title(page: Path) -> str:
    first = next(line for line in page.read_text(encoding="utf-8").splitlines() if line.startswith("# "))
    return first.removeprefix("# ")
