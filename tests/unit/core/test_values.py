from __future__ import annotations

import copy
import dataclasses
import inspect
import pickle
from dataclasses import dataclass, field
from typing import Any

import pytest

from kvmesh.core.values import changed, quick


@quick
@dataclass(frozen=True, slots=True)
class Point:
    x: int
    y: int = 2
    tags: list[str] = field(default_factory=list)


@quick
@dataclass(frozen=True, slots=True)
class Checked:
    x: int

    def __post_init__(self) -> None:
        if self.x < 0:
            raise ValueError("below 0")


@dataclass(frozen=True, slots=True)
class Plain:
    x: int
    y: int = 2
    tags: list[str] = field(default_factory=list)


@pytest.mark.parametrize(
    ("positional", "named"), [((1,), {}), ((1, 3), {}), ((1,), {"y": 4}), ((), {"x": 5, "y": 6})]
)
def test_it_is_made_as_the_plain_one_is(positional: Any, named: Any) -> None:
    quickly, plain = Point(*positional, **named), Plain(*positional, **named)
    assert dataclasses.astuple(quickly) == dataclasses.astuple(plain)
    assert dataclasses.fields(Point)[1].default == 2
    assert str(inspect.signature(Point).parameters["y"]) == "y: 'int' = 2"


def test_made_defaults_are_not_shared() -> None:
    assert Point(1).tags is not Point(1).tags
    given: list[str] = []
    assert Point(1, tags=given).tags is given


def test_it_is_a_value_still() -> None:
    point = Point(1)
    with pytest.raises(dataclasses.FrozenInstanceError):
        point.x = 3  # type: ignore[misc]
    assert dataclasses.replace(point, y=7) == changed(point, y=7) == Point(1, 7)
    assert changed(point) == point
    with pytest.raises(TypeError, match="z"):
        changed(point, z=1)
    with pytest.raises(ValueError, match="below 0"):
        changed(Checked(1), x=-1)
    assert copy.deepcopy(point) == point
    assert pickle.loads(pickle.dumps(point)) == point
    assert repr(point) == "Point(x=1, y=2, tags=[])"


@pytest.mark.parametrize("wrong", [(), (1, 2, [], 4)])
def test_wrong_arguments_are_errors(wrong: Any) -> None:
    with pytest.raises(TypeError, match="__init__"):
        Point(*wrong)


def test_what_comes_after_init_is_called() -> None:
    with pytest.raises(ValueError, match="below 0"):
        Checked(-1)
