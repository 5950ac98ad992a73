from __future__ import annotations

import ast
import dataclasses
from typing import Any

import pytest

from scripts.native_constructors import base_names, with_constructors

SOURCE = '''
from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Point:
    """A point."""

    x: int
    y: int = 2
    names: list[str] = field(default_factory=list)
    secret: bytes = field(repr=False, default=b"")

    def __post_init__(self) -> None:
        assert self.x >= 0, "negative"

    @property
    def total(self) -> int:
        return self.x + self.y


@dataclass(eq=False)
class Thing:
    mark: str = "a"
    """A field with a description."""


@dataclass
class Plain:
    x: int


@dataclass(frozen=True)
class Base:
    x: int


@dataclass(frozen=True)
class Derived(Base):
    y: int


@dataclass(frozen=True)
class Own:
    x: int

    def __init__(self) -> None:
        pass
'''


def made(source: str) -> dict[str, Any]:
    names: dict[str, Any] = {"__name__": __name__}
    exec(compile(source, "made", "exec"), names)
    return names


def test_values_stay_the_same() -> None:
    before = made(SOURCE)
    after = made(with_constructors(SOURCE, base_names([ast.parse(SOURCE)])))
    for arguments in ((1,), (1, 5), (1, 5, ["n"], b"s")):
        ours, theirs = after["Point"](*arguments), before["Point"](*arguments)
        assert dataclasses.astuple(ours) == dataclasses.astuple(theirs)
        assert repr(ours) == repr(theirs)
        assert "secret" not in repr(ours)
        assert ours == after["Point"](*arguments)
        assert ours.total == theirs.total
    one = after["Point"](1)
    assert dataclasses.replace(one, y=7) == after["Point"](1, 7)
    assert one.names is not after["Point"](1).names
    tuples = dataclasses.fields(after["Point"])
    assert [each.name for each in tuples] == ["x", "y", "names", "secret"]
    assert after["Thing"]() != after["Thing"]()
    assert after["Thing"]("b").mark == "b"


def test_those_that_check_themselves_still_do() -> None:
    point = made(with_constructors(SOURCE, {"Base"}))["Point"]
    with pytest.raises(AssertionError, match="negative"):
        point(-1)


def test_relatives_and_classes_with_their_own_stay_as_they_are() -> None:
    rewritten = with_constructors(SOURCE, base_names([ast.parse(SOURCE)]))
    for name in ("class Plain:\n    x: int\n", "class Derived(Base):\n    y: int\n"):
        assert name in rewritten
    assert rewritten.count("def __init__") == 3
    assert dataclasses.astuple(made(rewritten)["Derived"](1, 2)) == (1, 2)
    assert with_constructors(rewritten, {"Base"}) == rewritten
