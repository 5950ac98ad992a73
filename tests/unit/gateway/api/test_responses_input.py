from __future__ import annotations

from typing import Any

import pytest

from kvmesh.core.errors import InvalidRequestError
from services.gateway.api.messages import MAX_MESSAGES
from services.gateway.api.responses_api import RESPONSES_UNSUPPORTED, ResponsesBody
from services.gateway.api.schema import parse_body

ITEM = {"role": "user", "content": "a"}


def test_the_items_of_an_input_are_bounded() -> None:
    def body(num_items: int) -> ResponsesBody:
        return parse_body(ResponsesBody, {"input": [ITEM] * num_items}, RESPONSES_UNSUPPORTED)

    assert len(body(MAX_MESSAGES).input) == MAX_MESSAGES
    with pytest.raises(InvalidRequestError) as caught:
        body(MAX_MESSAGES + 1)
    assert caught.value.param == "input"


def test_what_the_items_have_together_is_bounded() -> None:
    texts = [{"type": "input_text", "text": "a"}] * 101
    output = {"type": "function_call_output", "call_id": "a", "output": texts}
    with pytest.raises(InvalidRequestError, match="parts and calls"):
        parse_body(ResponsesBody, {"input": [output] * 100}, RESPONSES_UNSUPPORTED)


@pytest.mark.parametrize("options", [{}, {"include_obfuscation": False}, {"include_usage": True}])
def test_options_of_a_stream_that_change_nothing_are_taken(options: dict[str, Any]) -> None:
    body = {"input": "a", "stream": True, "stream_options": options}
    assert parse_body(ResponsesBody, body, RESPONSES_UNSUPPORTED).stream
    refused = {**body, "stream_options": {"include_obfuscation": True}}
    with pytest.raises(InvalidRequestError, match="stream_options"):
        parse_body(ResponsesBody, refused, RESPONSES_UNSUPPORTED)
