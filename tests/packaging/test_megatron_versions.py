"""Check that the page on Megatron's versions names every difference that the wheel of a version has."""

from __future__ import annotations

import re

import pytest

from scripts.megatron_versions import OUTPUT, VERSIONS, differences_of

pytestmark = pytest.mark.builds

IN_DEFAULT = ("0.18.2",)


@pytest.mark.parametrize(
    "version",
    [pytest.param(release, marks=[] if release in IN_DEFAULT else [pytest.mark.full]) for release in VERSIONS],
)
def test_the_page_says_how_a_version_differs(version: str) -> None:
    text = OUTPUT.read_text(encoding="utf-8")
    (count,) = re.findall(rf"^\| {re.escape(version)} \| (\w+) \|$", text, flags=re.MULTILINE)
    section = re.search(rf"^## {re.escape(version)}\n(.*?)(?=^## |\Z)", text, flags=re.MULTILINE | re.DOTALL)
    differences = differences_of(version)
    assert count == (str(len(differences)) if differences else "nothing")
    assert (section is not None) == bool(differences)
    for name, difference in differences.items():
        assert section is not None
        assert f"- `{name}` {difference}\n" in section[1]
