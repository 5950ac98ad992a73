"""Finds a marker in text that arrives in pieces; holds back white space before a possible marker.

Held text is examined only once, so a long run of white space costs linear, not quadratic, time.
Pure. Tests: tests/unit/gateway/tools/test_held_text.py.
"""

from __future__ import annotations


def held_back(text: str, marker: str) -> int:
    """Length of the longest suffix of `text` that is a prefix of `marker`."""
    for length in range(min(len(marker) - 1, len(text)), 0, -1):
        if marker.startswith(text[-length:]):
            return length
    return 0


class HeldText:
    """Text up to a marker. White space directly before the marker is dropped.

    Args:
        marker: does not begin with white space.
    """

    def __init__(self, marker: str) -> None:
        assert not marker[0].isspace(), "white space is told apart from it"
        self._marker = marker
        self._space: list[str] = []
        self._begun = ""  # text that may be the start of the marker

    def push(self, text: str) -> tuple[str, str | None]:
        """Adds text. Returns text that may be sent, and the text after a complete marker."""
        text = self._begun + text
        before, found, after = text.partition(self._marker)
        if found:
            self._begun = ""
            shown = self._shown(before)
            self._space.clear()
            return shown, after
        sure = len(text) - held_back(text, self._marker)
        self._begun = text[sure:]
        return self._shown(text[:sure]), None

    def _shown(self, text: str) -> str:
        """The held text and this text, up to trailing white space, which is held instead."""
        bare = text.rstrip()
        shown = "".join((*self._space, bare)) if bare else ""
        if bare:
            self._space.clear()
        if len(bare) < len(text):
            self._space.append(text[len(bare) :])
        return shown

    def finish(self) -> str:
        """Returns the held text, if no marker arrived."""
        held = "".join((*self._space, self._begun))
        self._space.clear()
        self._begun = ""
        return held
