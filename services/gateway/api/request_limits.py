"""Checks one call's limits before any expensive work is done for it.

Pure. Tests: tests/unit/gateway/api/test_request_limits.py.
"""

from __future__ import annotations

import json

from kvmesh.core.errors import InvalidRequestError
from services.gateway.api.openai import ApiCall, ChatPrompt, TextPrompt
from services.gateway.config import LimitsConfig

_PLAIN_MESSAGE = {"role", "content"}


def check_limits(call: ApiCall, limits: LimitsConfig) -> None:
    """Refuses a call that would be too expensive to process.

    Raises:
        InvalidRequestError: names the field and what is allowed.
    """
    num_sequences = len(call.prompts) * call.n
    if num_sequences > limits.max_sequences:
        raise InvalidRequestError(
            f"n times the number of prompts must be at most {limits.max_sequences}, "
            f"got {num_sequences}",
            "n",
        )
    longest = max((len(text) for text in call.stop), default=0)
    if longest > limits.max_stop_chars:
        raise InvalidRequestError(
            f"a stop string may have {limits.max_stop_chars} characters, got {longest}", "stop"
        )
    # Tokenising takes about a second per 10 MB, so a prompt that cannot fit is refused first.
    num_chars = prompt_chars(call)
    if num_chars > limits.max_prompt_chars:
        raise InvalidRequestError(
            f"{call.prompt_field}: at most {limits.max_prompt_chars} characters, got {num_chars}",
            call.prompt_field,
            "context_length_exceeded",
        )


def prompt_chars(call: ApiCall) -> int:
    """Number of characters to tokenise, of all prompts together."""
    total = 0
    for prompt in call.prompts:
        if isinstance(prompt, TextPrompt):
            total += len(prompt.text)
        elif isinstance(prompt, ChatPrompt):
            for message in prompt.messages:
                is_plain = message.keys() == _PLAIN_MESSAGE
                text = message["content"] if is_plain else json.dumps(message, default=str)
                total += len(text)
    return total
