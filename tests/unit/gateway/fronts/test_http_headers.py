from __future__ import annotations

import pytest

from kvmesh.core.errors import InvalidRequestError
from kvmesh.core.types import Placement
from services.gateway.frontend import MAX_REQUEST_ID_CHARS, clean_request_id, usage_of
from services.gateway.fronts.calls import parse_placement, parse_scenario, ttft_ms_of


def test_request_ids_can_go_into_logs_and_headers() -> None:
    assert clean_request_id(" my-id ") == "my-id"
    assert clean_request_id("x" * 500) == "x" * MAX_REQUEST_ID_CHARS
    for bad in ("", "a\nb", "ö", "  "):
        made = clean_request_id(bad)
        assert made != bad
        assert made.isalnum()


def test_placement() -> None:
    assert parse_placement("") is Placement.AUTO
    assert parse_placement("aggregated") is Placement.AGGREGATED
    with pytest.raises(InvalidRequestError, match="aggregated, auto, disaggregated"):
        parse_placement("Aggregated!")


def test_a_scenario_is_text() -> None:
    assert [parse_scenario(text) for text in ("", "chat", "ö")] == ["", "chat", "ö"]
    with pytest.raises(InvalidRequestError, match="UTF-8"):
        parse_scenario(b"chat\xff".decode(errors="surrogateescape"))


@pytest.mark.parametrize("text", ["0", "-1", "1.5", "x", "3600001", "\u0661"])
def test_bad_deadlines(text: str) -> None:
    with pytest.raises(InvalidRequestError, match="milliseconds"):
        ttft_ms_of({"x-slo-ttft-ms": text})


def test_deadlines() -> None:
    assert ttft_ms_of({}) == 0
    assert ttft_ms_of({"x-slo-ttft-ms": "250"}) == 250


def test_cached_tokens_never_exceed_the_prompt() -> None:
    assert usage_of(4, 2, 16).cached_tokens == 4
