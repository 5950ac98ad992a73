"""What the configuration says about queries."""

from __future__ import annotations

import pytest

from kvmesh.core.errors import ConfigError
from kvmesh.runtime.prefix_queries import QueryMode, parse_query_mode


def test_modes_have_names() -> None:
    assert [parse_query_mode(mode.value) for mode in QueryMode] == list(QueryMode)


def test_another_word_is_an_error_that_says_which_are_known() -> None:
    with pytest.raises(ConfigError, match=r"fetch\.query must be auto, always or never"):
        parse_query_mode("sometimes")
