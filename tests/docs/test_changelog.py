"""The changelog has a section for the version, from which the note of a release is taken."""

from __future__ import annotations

import re

from packaging.version import Version

from moevement_core import __version__
from tests.training import ROOT

UNRELEASED = "Unreleased"


def sections() -> dict[str, str]:
    """Return the text of each section, by its title without the date, in the order of the file."""
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    parts = re.split(r"^## (\S+)(?: \(20\d\d-\d\d-\d\d\))?$", text, flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def test_the_version_has_a_section_with_changes() -> None:
    assert re.search(r"^- \S", sections()[__version__], flags=re.MULTILINE)


def test_every_title_is_a_version_and_the_newest_is_first() -> None:
    titles = re.findall(r"^## (.*)$", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), flags=re.MULTILINE)
    known = list(sections())
    assert len(titles) == len(known)
    assert known[0] == UNRELEASED
    versions = [Version(title) for title in known[1:]]
    assert versions == sorted(set(versions), reverse=True)
    assert versions[0] == Version(__version__)


def test_the_readme_names_the_version() -> None:
    assert f"Version {__version__} " in (ROOT / "README.md").read_text(encoding="utf-8")
