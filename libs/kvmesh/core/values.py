"""Faster construction of frozen dataclasses that are created for every request.

Tests: tests/unit/core/test_values.py.
"""

from __future__ import annotations

import dataclasses
from types import FunctionType
from typing import Any, TypeVar

ClassT = TypeVar("ClassT", bound=type)
ValueT = TypeVar("ValueT")

_ABSENT = object()


def quick(cls: ClassT) -> ClassT:
    """Gives a frozen dataclass with slots an `__init__` that takes about half the time.

    The `__init__` of `dataclass` looks up `object.__setattr__` and the slot for every field, which
    takes 0.2 us each, and a request creates about a hundred values. This one calls the slots
    directly. Its arguments and its effect are the same.

    Args:
        cls: a class made by `@dataclass(frozen=True, slots=True)`; it is changed in place.
    """
    fields = [field for field in dataclasses.fields(cls) if field.init]
    assert len(fields) == len(dataclasses.fields(cls)), "all fields are arguments"
    assert not any(field.kw_only for field in fields), "arguments have places"
    names: dict[str, Any] = {"_absent": _ABSENT}
    arguments, lines = ["self"], []
    for field in fields:
        name = field.name
        names[f"_set_{name}"] = cls.__dict__[name].__set__
        value = name
        if field.default is not dataclasses.MISSING:
            names[f"_default_{name}"] = field.default
            arguments.append(f"{name}=_default_{name}")
        elif field.default_factory is not dataclasses.MISSING:
            names[f"_make_{name}"] = field.default_factory
            arguments.append(f"{name}=_absent")
            value = f"_make_{name}() if {name} is _absent else {name}"
        else:
            arguments.append(name)
        lines.append(f"    _set_{name}(self, {value})\n")
    if hasattr(cls, "__post_init__"):
        lines.append("    self.__post_init__()\n")
    # `exec` as in `dataclasses`; the source contains no external input.
    source = f"def __init__({', '.join(arguments)}):\n{''.join(lines) or '    pass'}"
    exec(source, names)
    made, plain = names["__init__"], cls.__dict__["__init__"]
    if isinstance(plain, FunctionType):  # a compiled one is quicker still
        made.__qualname__, made.__annotations__ = plain.__qualname__, plain.__annotations__
        type.__setattr__(cls, "__init__", made)
    type.__setattr__(cls, "_changed", _change_of(cls, [field.name for field in fields]))
    return cls


def changed(value: ValueT, **changes: Any) -> ValueT:
    """Same as `dataclasses.replace`, for a value of a `quick` class, in a tenth of the time."""
    made: ValueT = value._changed(**changes)  # type: ignore[attr-defined]
    return made


def _change_of(cls: type, fields: list[str]) -> Any:
    names: dict[str, Any] = {"_absent": _ABSENT, "_make": cls}
    arguments = "".join(f", {name}=_absent" for name in fields)
    values = ", ".join(f"self.{name} if {name} is _absent else {name}" for name in fields)
    exec(f"def _changed(self, *{arguments}):\n    return _make({values})\n", names)
    return names["_changed"]
