"""The Markdown files of the repository, cut into what can be checked."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[3]

_FENCE = re.compile(r"^```(\w*)\n(.*?)^```", re.DOTALL | re.MULTILINE)
_LINK = re.compile(r"\[([^\]]*)\]\(([^()\s]+)\)")
_SPAN = re.compile(r"`([^`\n]+)`")
_HEADING = re.compile(r"^#+ (.*)$", re.MULTILINE)


class Link(NamedTuple):
    """A link to a file of the repository."""

    document: Path
    text: str
    target: str

    @property
    def file(self) -> Path:
        """The file that it names."""
        name = self.target.partition("#")[0]
        return (self.document.parent / name).resolve() if name else self.document

    @property
    def anchor(self) -> str:
        """The heading that it names; may be empty."""
        return self.target.partition("#")[2]

    def __str__(self) -> str:
        return f"{self.document.relative_to(ROOT)}: [{self.text}]({self.target})"


def documents() -> list[Path]:
    """All Markdown files that people read."""
    folders = ("bench", "deploy", "docs", "libs", "models", "services", "tests")
    found = [*ROOT.glob("*.md"), *(path for f in folders for path in (ROOT / f).rglob("*.md"))]
    return sorted(found)


def prose(document: Path) -> str:
    """The text without code blocks."""
    return _FENCE.sub("", document.read_text())


def links(document: Path) -> Iterator[Link]:
    """Links that stay in the repository."""
    for text, target in _LINK.findall(prose(document)):
        if "://" not in target and not target.startswith("mailto:"):
            yield Link(document, text, target)


def code_spans(document: Path) -> list[str]:
    """What stands between backticks in a line."""
    found: list[str] = _SPAN.findall(prose(document))
    return found


def slugs(document: Path) -> set[str]:
    """Anchors of a document's headings, as code hosts make them."""
    kept = (re.sub(r"[^\w\- ]", "", title.lower()) for title in _HEADING.findall(prose(document)))
    return {title.strip().replace(" ", "-") for title in kept}
