"""The site has every page, needs no network, and its build fails on a broken link."""

from __future__ import annotations

import re
import shutil
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
    command = [sys.executable, "-m", "mkdocs", "build", "--strict"]  # as in make docs
    return subprocess.run(command, cwd=source, capture_output=True, text=True, timeout=120)


@pytest.fixture(scope="module")
def site(source: Path) -> Path:
    """Build the site once for this file and return its folder."""
    built = _build(source)
    assert built.returncode == 0, built.stderr
    return source / "site"


def test_every_page_is_built(source: Path, site: Path) -> None:
    pages = [
        path for folder in (".", "docs", "benchmarks", "benchmarks/papers") for path in (source / folder).glob("*.md")
    ]
    assert len(pages) > 30
    for page in pages:
        name = "index.html" if page.name == "README.md" else page.with_suffix(".html").name
        assert (site / page.parent.relative_to(source) / name).is_file(), page


def test_a_reader_needs_no_network(site: Path) -> None:
    for page in site.rglob("*.html"):
        text = page.read_text(encoding="utf-8")
        assert 'src="http' not in text, page
        assert '<link rel="stylesheet" href="http' not in text, page


def test_the_search_finds_a_word_on_a_site_that_is_opened_from_a_disk(site: Path, tmp_path: Path) -> None:
    document = browser.find(tmp_path).document(f"{(site / 'index.html').as_uri()}?q=glossary")
    results = document[document.index("md-search-result__list") :]
    assert "docs/glossary.html" in results[: results.index("</ol>")]


NOWHERE = ("docs/nothing.md", "docs/recovery.md#nothing", "docs/diagrams/nothing.svg")
"""Link targets that do not exist: a page, a heading and a picture."""


def test_what_leads_nowhere_or_is_in_no_menu_is_an_error(source: Path, tmp_path: Path) -> None:
    """Check that each mistake has its own warning; strict mode turns any warning into a failure."""
    changed = shutil.copytree(source, tmp_path / "source", ignore=shutil.ignore_patterns("site"))
    with (changed / "README.md").open("a", encoding="utf-8") as readme:
        readme.writelines(f"\n[x]({target})\n" for target in NOWHERE)
    (changed / "docs" / "nobody.md").write_text("# Nobody\n", encoding="utf-8")
    built = _build(changed)
    assert built.returncode != 0
    warnings = re.findall(r"^WARNING.*(?:\n  - .*)*", built.stderr, flags=re.MULTILINE)
    for mistake in (*NOWHERE, "nobody.md"):
        assert any(mistake in warning for warning in warnings), built.stderr
