from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvmesh.core.errors import InvalidRequestError
from services.gateway.api.messages import MAX_MESSAGES
from services.gateway.api.openai import ApiCall, chat_call
from services.gateway.api.plain_call import plain_chat_call
from services.gateway.api.schema import ChatBody, parse_body
from services.gateway.config import LimitsConfig

MESSAGES = [{"role": "system", "content": ""}, {"role": "user", "content": "Hi"}]
BODY: dict[str, Any] = {"model": "m", "messages": MESSAGES, "max_tokens": 4}


def judged(body: Any) -> ApiCall | str:
    """What the models of bodies say."""
    try:
        return chat_call(parse_body(ChatBody, body), LimitsConfig())
    except InvalidRequestError as error:
        return str(error)


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"stream": True},
        {"stream": True, "stream_options": {"include_usage": True}},
        {"stream": True, "stream_options": {}},
        {"temperature": 0, "top_p": 0.5, "seed": 2**63 - 1, "ignore_eos": True},
        {"temperature": 1.5, "top_p": 1},
        {"max_completion_tokens": None},
    ],
)
def test_a_plain_body_is_read_as_the_models_read_it(more: dict[str, Any]) -> None:
    call = plain_chat_call({**BODY, **more}, {})
    assert call is not None
    assert call == judged({**BODY, **more})


@pytest.mark.parametrize(
    "more",
    [
        {"n": 2},
        {"stop": "x"},
        {"tools": []},
        {"max_tokens": "4"},
        {"max_tokens": True},
        {"max_tokens": 0},
        {"max_completion_tokens": 3},
        {"temperature": 2.1},
        {"temperature": None},
        {"temperature": float("nan")},
        {"top_p": 0},
        {"seed": -1},
        {"seed": 1.0},
        {"stream": 1},
        {"stream_options": {"include_usage": True}},
        {"stream": True, "stream_options": {"continuous_usage_stats": True}},
        {"messages": []},
        {"messages": BODY["messages"] * (MAX_MESSAGES + 1)},
        {"messages": "Hi"},
        {"messages": [{"role": "", "content": "Hi"}]},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "Hi"}]}]},
        {"messages": [{"role": "user"}]},
        {"messages": [{"role": "user", "content": "Hi", "name": "n"}]},
        {"model": None},
    ],
)
def test_what_is_not_plain_is_left_alone(more: dict[str, Any]) -> None:
    assert plain_chat_call({**BODY, **more}, {}) is None


def test_nor_is_what_is_no_body_or_has_defaults_of_its_model() -> None:
    assert plain_chat_call([], {}) is None
    assert plain_chat_call({}, {}) is None
    assert plain_chat_call(BODY, {"temperature": 0.6}) is None


VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-2, 2**33),
    st.sampled_from([0.0, 0.5, 1.0, 2.0, 2.5, float("inf"), "m", "", "1"]),
    st.sampled_from([MESSAGES, [], {"include_usage": True}, {"include_usage": None}, {}]),
)


@settings(max_examples=150)
@given(
    st.dictionaries(
        st.sampled_from(
            [
                "model",
                "messages",
                "stream",
                "stream_options",
                "max_tokens",
                "max_completion_tokens",
                "temperature",
                "top_p",
                "seed",
                "ignore_eos",
                "stop",
                "unknown",
            ]
        ),
        VALUES,
        max_size=5,
    )
)
def test_two_readers_never_differ(more: dict[str, Any]) -> None:
    body = {**BODY, **more}
    call = plain_chat_call(body, {})
    assert call is None or call == judged(body)
