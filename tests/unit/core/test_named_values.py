from __future__ import annotations

import pytest

from kvmesh.core.errors import ConfigError
from kvmesh.core.named_values import named_values


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
