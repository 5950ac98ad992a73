from __future__ import annotations

import json
from typing import Any

import pytest

from services.gateway.api.json_input import MAX_LEVELS, json_value


def nested(levels: int, begin: str, end: str) -> str:
    return begin * levels + "1" + end * levels


@pytest.mark.parametrize(("begin", "end"), [("[", "]"), ('{"a":', "}"), ('[{"a":', "}]")])
def test_levels_are_limited(begin: str, end: str) -> None:
    most = MAX_LEVELS // (begin.count("[") + begin.count("{"))
    text = nested(most, begin, end)
    assert json_value(text) == json.loads(text)
    for levels in (most + 1, 3 * MAX_LEVELS, 5_000, 30_000, 1_000_000):
        with pytest.raises(ValueError, match="more than 256 objects and lists"):
            json_value(nested(levels, begin, end))


@pytest.mark.parametrize(
    "value",
    [[{"a": [each]} for each in range(MAX_LEVELS)], {"code": "{[" * MAX_LEVELS}, "[", 1, None],
)
def test_many_are_not_deep(value: Any) -> None:
    assert json_value(json.dumps(value)) == value


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("", json.JSONDecodeError),
        ("{", json.JSONDecodeError),
        ("[1,]", json.JSONDecodeError),
        ('"\\ud800"', UnicodeEncodeError),
        ('{"\\udfff": 1}', UnicodeEncodeError),
    ],
)
def test_what_is_no_json_or_no_text_is_refused(text: str, error: type[ValueError]) -> None:
    with pytest.raises(error):
        json_value(text)
