"""HTML and SVG elements of a page, built as a tree. Text from a run is escaped, so it is never markup."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from xml.etree import ElementTree

Element = ElementTree.Element
Child = Element | str


def element(tag: str, *children: Child, **attributes: str | float) -> Element:
    """Return an element of HTML or SVG.

    Args:
        tag: tag name of the element.
        children: elements and text, in their order.
        attributes: attributes of the element. ``_`` in a name stands for ``-``; a trailing ``_`` is dropped
            (``class_``). Numbers are rounded to hundredths, which is finer than a pixel.
    """
    built = Element(tag, {name.rstrip("_").replace("_", "-"): _value(value) for name, value in attributes.items()})
    last: Element | None = None
    for child in children:
        if isinstance(child, Element):
            built.append(last := child)
        elif last is None:
            built.text = (built.text or "") + child
        else:
            last.tail = (last.tail or "") + child
    return built


def table(head: Sequence[str], rows: Iterable[Sequence[Child]], caption: str = "") -> Element:
    """Return a table with a header row, in a box that scrolls if the page is too narrow."""
    body = [element("tr", *(element("td", cell) for cell in row)) for row in rows]
    parts = [
        *([element("caption", caption)] if caption else ()),
        element("thead", element("tr", *(element("th", name, scope="col") for name in head))),
        element("tbody", *body),
    ]
    return element("div", element("table", *parts), class_="scrolls")


def rows_table(head: Sequence[str], rows: Iterable[Sequence[Child]]) -> Element:
    """Return a table with a header row; the first cell of each row is the row's name."""
    body = [element("tr", element("th", name, scope="row"), *(element("td", cell) for cell in cells))
            for name, *cells in rows]  # fmt: skip
    top = element("thead", element("tr", *(element("th", name, scope="col") for name in head)))
    return element("div", element("table", top, element("tbody", *body)), class_="scrolls")


def document(title: str, style: str, *body: Child) -> str:
    """Return a whole page as HTML. The page's policy forbids the browser to load other files."""
    page = element(
        "html",
        element(
            "head",
            element("meta", charset="utf-8"),
            _policy(),
            element("meta", name="viewport", content="width=device-width, initial-scale=1"),
            element("title", title),
            element("style", style),
        ),
        element("body", element("main", *body)),
        lang="en",
    )
    return "<!DOCTYPE html>\n" + ElementTree.tostring(page, encoding="unicode", method="html") + "\n"


def _policy() -> Element:
    policy = element("meta", content="default-src 'none'; style-src 'unsafe-inline'")
    policy.set("http-equiv", "Content-Security-Policy")
    return policy


def _value(value: str | float) -> str:
    return value if isinstance(value, str) else f"{value:.2f}".rstrip("0").rstrip(".")
