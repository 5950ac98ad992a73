from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from kvmesh.core.errors import InvalidRequestError
from kvmesh.core.types import SamplingParams
from services.gateway.api.openai import ApiCall, ChatPrompt, Endpoint, TextPrompt, TokenPrompt
from services.gateway.api.request_limits import check_limits, prompt_chars
from services.gateway.config import LimitsConfig

LIMITS = LimitsConfig(max_sequences=4, max_stop_chars=8, max_prompt_chars=100)
CALL = ApiCall(Endpoint.COMPLETION, "m", (TextPrompt("x" * 100),), SamplingParams())


def test_what_is_allowed_passes() -> None:
    check_limits(CALL, LIMITS)
    check_limits(replace(CALL, n=4, stop=("12345678",)), LIMITS)
    check_limits(replace(CALL, prompts=(TokenPrompt(tuple(range(1000))),)), LIMITS)


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"n": 5}, "n"),
        ({"n": 2, "prompts": (TextPrompt("x"),) * 3}, "n"),
        ({"stop": ("ok", "123456789")}, "stop"),
        ({"prompts": (TextPrompt("x" * 101),)}, "prompt"),
        ({"prompts": (TextPrompt("x" * 51),) * 2}, "prompt"),
        ({"prompts": (ChatPrompt(({"role": "user", "content": "x" * 101},)),)}, "prompt"),
        (
            {"prompts": (ChatPrompt(({"role": "u", "content": "", "tools": ["x" * 99]},)),)},
            "prompt",
        ),
    ],
)
def test_the_field_that_is_too_large_is_named(changes: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        check_limits(replace(CALL, **changes), LIMITS)
    assert caught.value.param == param


def test_characters_of_all_prompts_count() -> None:
    chat = ChatPrompt(({"role": "user", "content": "12345"},) * 2)
    assert prompt_chars(replace(CALL, prompts=(chat, TextPrompt("123")))) == 13
