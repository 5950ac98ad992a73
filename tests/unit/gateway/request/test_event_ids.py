"""What an event's id says is what the client brings back; other text is not taken for one."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvmesh.core.errors import InvalidRequestError
from services.gateway.request.event_ids import (
    MAX_CHOICES,
    MAX_TAIL,
    GivenPlace,
    Place,
    id_line,
    parse_id,
)

KEY = "Fh2bWq_-0123456789abcd"
TOKENS = st.lists(st.integers(0, 2**20), max_size=8)


@st.composite
def places(draw: st.DrawFn) -> tuple[Place, GivenPlace]:
    """A place as a stream comes to it, and what it means."""
    if draw(st.booleans()):
        return Place(), GivenPlace(0, (), None, is_opened=False, is_complete=False)
    tokens = draw(TOKENS)
    before = draw(st.integers(0, 1000))
    place = Place(before + len(tokens), tokens)
    place.open()
    cached = draw(st.none() | st.integers(0, 5000))
    if cached is not None:
        place.has_cached(cached)
    for piece in draw(st.lists(TOKENS, max_size=4)):
        place.add(piece)
        tokens += piece
    if kept := draw(st.integers(0, len(tokens))):
        place.kept(kept)
        cached = None
    if is_complete := draw(st.booleans()):
        place.complete()
    tail = tuple(tokens[kept:])
    return place, GivenPlace(before + kept, tail, cached, True, is_complete)


@given(st.lists(places(), min_size=1, max_size=4), st.booleans(), st.sampled_from(["", "e30_-"]))
def test_an_id_says_where_every_choice_is(
    both: list[tuple[Place, GivenPlace]], is_over: bool, start: str
) -> None:
    name = f"{KEY}.{start}" if start else KEY
    line = id_line(name, [place for place, _ in both], is_over=is_over)
    assert line.startswith("id: ")
    assert line.endswith("\n")
    given_id = parse_id(line[4:-1])
    assert given_id == (KEY, start, tuple(meant for _, meant in both), is_over)
    assert given_id.name == name
    assert given_id.is_whole == (start != "" and all(meant.num_kept == 0 for _, meant in both))


@pytest.mark.parametrize(
    "text",
    [
        *("1:2", "-1", "1.zz", "1!!", "1\n", " 1", "1.1f.", "1~", "$1", "1é"),
        *("9" * 10, f"1.{'f' * 9}", "," * MAX_CHOICES),
    ],
)
def test_anything_else_is_none(text: str) -> None:
    for given_id in (f"{KEY}:{text}", text, f"../{KEY}:1", f"{KEY}.:1", f"{KEY}.=:1"):
        with pytest.raises(InvalidRequestError, match="no id of an event"):
            parse_id(given_id)


def test_a_client_forgets_where_it_is_when_the_journal_is_too_far_behind() -> None:
    place = Place()
    place.add([7] * MAX_TAIL)
    assert len(id_line(KEY, [place])) > MAX_TAIL
    place.add([7])
    assert id_line(KEY, [place]) == "id:\n"
    place.kept(MAX_TAIL)
    assert id_line(KEY, [place]) == f"id: {KEY}:{MAX_TAIL}.7\n"
