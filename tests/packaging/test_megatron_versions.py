"""What stops another version of Megatron is known by name, from its wheel."""

from __future__ import annotations

import re

import pytest

from scripts.megatron_versions import OUTPUT, VERSIONS, differences_of

pytestmark = pytest.mark.builds

IN_DEFAULT = ("0.18.2",)


@pytest.mark.parametrize(
    "version",
    [pytest.param(one, marks=[] if one in IN_DEFAULT else [pytest.mark.full]) for one in VERSIONS],
)
def test_the_page_says_how_a_version_differs(version: str) -> None:
    text = OUTPUT.read_text(encoding="utf-8")
    (count,) = re.findall(rf"^\| {re.escape(version)} \| (\w+) \|$", text, flags=re.MULTILINE)
    section = re.search(rf"^## {re.escape(version)}\n(.*?)(?=^## |\Z)", text, flags=re.MULTILINE | re.DOTALL)
    found = differences_of(version)
    assert count == (str(len(found)) if found else "nothing")
    assert (section is not None) == bool(found)
    for name, what in found.items():
        assert section is not None
        assert f"- `{name}` {what}\n" in section[1]
