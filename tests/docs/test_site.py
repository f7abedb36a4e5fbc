"""The pages as a site: all of them, and every link leads somewhere."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.packaging.environments import source_copy
from tests.unit.monitoring import browser

pytestmark = pytest.mark.builds


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return source_copy(tmp_path_factory.mktemp("site") / "source")


def _build(source: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict"]  # as make docs
    return subprocess.run(command, cwd=source, capture_output=True, text=True, timeout=120)


def test_every_page_is_built(source: Path) -> None:
    built = _build(source)
    assert built.returncode == 0, built.stderr
    pages = [
        path for folder in (".", "docs", "benchmarks", "benchmarks/papers") for path in (source / folder).glob("*.md")
    ]
    assert len(pages) > 30
    for page in pages:
        name = "index.html" if page.name == "README.md" else page.with_suffix(".html").name
        assert (source / "site" / page.parent.relative_to(source) / name).is_file(), page


def test_a_reader_needs_no_network(source: Path) -> None:
    _build(source)
    for page in (source / "site").rglob("*.html"):
        text = page.read_text(encoding="utf-8")
        assert 'src="http' not in text, page
        assert '<link rel="stylesheet" href="http' not in text, page


def test_the_search_finds_a_word_on_a_site_that_is_opened_from_a_disk(source: Path, tmp_path: Path) -> None:
    _build(source)
    document = browser.find(tmp_path).document(f"{(source / 'site' / 'index.html').as_uri()}?q=glossary")
    found = document[document.index("md-search-result__list") :]
    assert "docs/glossary.html" in found[: found.index("</ol>")]


@pytest.mark.parametrize(
    "line", ["[x](docs/nothing.md)", "[x](docs/recovery.md#nothing)", "![x](docs/diagrams/nothing.svg)"]
)
def test_a_link_that_leads_nowhere_is_an_error(line: str, source: Path) -> None:
    readme = source / "README.md"
    before = readme.read_text(encoding="utf-8")
    try:
        readme.write_text(f"{before}\n{line}\n", encoding="utf-8")
        built = _build(source)
    finally:
        readme.write_text(before, encoding="utf-8")
    assert built.returncode != 0
    assert "nothing" in built.stderr


def test_a_page_that_no_menu_names_is_an_error(source: Path) -> None:
    page = source / "docs" / "nobody.md"
    try:
        page.write_text("# Nobody\n", encoding="utf-8")
        built = _build(source)
    finally:
        page.unlink()
    assert built.returncode != 0
    assert "nobody.md" in built.stderr
