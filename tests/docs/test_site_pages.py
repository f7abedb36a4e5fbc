"""The site names links by the titles of their pages, and puts diagrams into the page."""

from __future__ import annotations

from pathlib import Path

from scripts.site_pages import inline_diagrams, named_by_title

ICON = """<?xml version="1.0"?>
<svg width="1pt"><style>* {}</style>
<style>svg { color: red }</style><text>a</text></svg>
"""


def test_a_link_that_is_named_by_its_file_gets_the_title_of_the_page(tmp_path: Path) -> None:
    (tmp_path / "there.md").write_text("# The title\n")
    assert named_by_title("[docs/there.md](there.md#part)", tmp_path) == "[The title](there.md#part)"
    for text in ("[words](there.md)", "[there.md](https://example.org/there.md)", "[nothing.md](nothing.md)"):
        assert named_by_title(text, tmp_path) == text


def test_a_diagram_stands_in_the_page_with_its_text_and_without_its_styles(tmp_path: Path) -> None:
    (tmp_path / "a.svg").write_text(ICON)
    html = inline_diagrams('<p><img alt="1 &lt; 2" src="a.svg" /> <img alt="b" src="b.svg" /></p>', tmp_path)
    assert '<svg class="diagram" role="img" aria-label="1 &lt; 2" width="1pt">' in html
    assert "<text>a</text>" in html
    assert '<img alt="b" src="b.svg" />' in html
    assert "style" not in html
    assert "<?xml" not in html
