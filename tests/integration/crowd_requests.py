"""What the crowd asks for: sequences of all kinds, many with a prefix in common."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

from kvmesh.core.types import SamplingParams
from tests.integration.family_shapes import VOCAB_SIZE

LONGEST = 208
"""Tokens of a request with its answer, at most."""

_SAMPLINGS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    {"temperature": 1.0},
    {"temperature": 0.8, "top_k": 40, "top_p": 0.95},
    {"temperature": 1.3, "min_p": 0.02, "repetition_penalty": 1.2},
    {"temperature": 0.9, "presence_penalty": 0.5, "frequency_penalty": 0.3},
)


@dataclass(frozen=True, slots=True)
class Request:
    """What a client asks."""

    prompt: tuple[int, ...]
    sampling: SamplingParams


def some_requests(draw: random.Random, count: int) -> list[Request]:
    """Requests of all kinds; many share a prefix."""
    stems = [[draw.randrange(VOCAB_SIZE) for _ in range(120)] for _ in range(2)]
    return [_some_request(draw, draw.choice(stems)) for _ in range(count)]


def _some_request(draw: random.Random, stem: list[int]) -> Request:
    shared = stem[: draw.choice((0, 64, 96, 96, draw.randrange(120)))]
    tail = [draw.randrange(VOCAB_SIZE) for _ in range(draw.randrange(1, 40))]
    stops = tuple(draw.randrange(VOCAB_SIZE) for _ in range(draw.choice((0, 0, 0, 4))))
    sampling = SamplingParams(
        **draw.choice(_SAMPLINGS),
        seed=draw.randrange(1 << 20),
        max_tokens=draw.choice((1, 2, draw.randrange(3, 40), 40)),
        min_tokens=draw.choice((0, 0, 4)),
        stop_token_ids=stops,
        num_logprobs=draw.choice((-1, 0, 3)),
        num_prompt_logprobs=draw.choice((-1, -1, -1, -1, 1)),
    )
    return Request((*shared, *tail), sampling)
