from __future__ import annotations

import pytest

from kvmesh.core.errors import ConfigError
from kvmesh.core.named_values import listed, named_numbers, named_values


def test_words_are_stripped_and_empty_ones_left_out() -> None:
    assert listed(" b , a,,b, ") == ("b", "a", "b")
    assert listed("") == ()


def test_entries_keep_their_order() -> None:
    assert list(named_values(" b = /x=y , a=/z,", "o", "N=F").items()) == [
        ("b", "/x=y"),
        ("a", "/z"),
    ]
    assert named_values("", "o", "N=F") == {}


@pytest.mark.parametrize("text", ["a", "=b", "a=", "a=x,a=y"])
def test_what_is_no_list_of_names(text: str) -> None:
    with pytest.raises(ConfigError, match=r"^the\.option is N=F, comma-separated"):
        named_values(text, "the.option", "N=F")


def test_values_that_are_whole_numbers_above_0() -> None:
    assert named_numbers("b=20, a=3", "o", "N=F") == {"b": 20, "a": 3}


@pytest.mark.parametrize("value", ["0", "-1", "1.5", "x"])
def test_other_values_are_no_numbers(value: str) -> None:
    with pytest.raises(ConfigError, match=rf"^the\.option is N=F; got a={value}$"):
        named_numbers(f"a={value}", "the.option", "N=F")
