"""POST /v1/embeddings: a vector for each input, as OpenAI's API and vLLM's server give it.

An input is a request like others, with its prompt alone: admission, deadline, prefix cache and
metrics are the same. Tests: tests/integration/test_gateway_embeddings.py.
"""

from __future__ import annotations

import asyncio
import base64
import struct
from collections.abc import Sequence
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from kvmesh.core.types import FinishReason, SamplingParams, TokenLogprobs
from services.gateway.api.answers import Whole, dumps, placement_headers
from services.gateway.api.openai import ApiCall, Endpoint, prompts_of
from services.gateway.api.schema import Prompts
from services.gateway.config import LimitsConfig
from services.gateway.frontend import Frontend
from services.gateway.request.choice import Choice
from services.gateway.request.mesh import Placed

UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "embed_dtype": ("float32",),
    "messages": (),
    "normalize": (True,),
    "use_activation": (True,),
}
"""See `parse_body`: fields of vLLM's server that change the vectors."""


class EmbeddingBody(BaseModel):
    """POST /v1/embeddings."""

    model_config = ConfigDict(extra="ignore", hide_input_in_errors=True)

    model: str | None = None
    input: Prompts
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: int | None = Field(None, ge=1, lt=2**32)
    add_special_tokens: bool | None = None
    truncate_prompt_tokens: int | None = Field(None, ge=-1, lt=2**32)
    priority: int | None = Field(None, ge=-(2**31), lt=2**31)
    user: str | None = None
    request_id: str | None = None
    cache_salt: str | None = Field(None, max_length=256)


def embedding_call(body: EmbeddingBody, limits: LimitsConfig) -> ApiCall:
    """Converts the body of a request for embeddings.

    Raises:
        InvalidRequestError: no inputs, or too many.
    """
    special, truncate = body.add_special_tokens is not False, body.truncate_prompt_tokens
    return ApiCall(
        endpoint=Endpoint.EMBEDDING,
        model=body.model or "",
        prompts=prompts_of(body.input, "input", limits, add_special_tokens=special),
        sampling=SamplingParams(temperature=0.0, ignore_eos=True),
        seed=0,
        max_tokens=0,
        prompt_field="input",
        truncate_prompt=None if truncate in (None, -1) else truncate,
        priority=body.priority or 0,
        request_id=body.request_id or "",
        cache_salt=body.cache_salt or "",
        embedding=body.dimensions or 0,
    )


class Embeddings:
    """Computes the embeddings of one call.

    Args:
        choices: one for each input.
    """

    def __init__(self, frontend: Frontend, choices: Sequence[Choice]) -> None:
        self._frontend = frontend
        self._choices = choices
        self._sinks = [_VectorSink() for _ in choices]

    async def whole(self, body: EmbeddingBody) -> Whole:
        """The answer, made without stalling other requests."""
        await self._frontend.run(self._choices, self._sinks)
        data: list[str] = []
        for index, sink in enumerate(self._sinks):
            if index:
                await asyncio.sleep(0)  # a vector's numbers take a millisecond to write
            vector = _vector(sink.embedding, body.encoding_format)
            data.append(dumps({"object": "embedding", "index": index, "embedding": vector}))
        num_tokens = sum(len(choice.request.prompt_ids) for choice in self._choices)
        usage = {"prompt_tokens": num_tokens, "total_tokens": num_tokens}
        rest = dumps({"model": self._choices[0].model_name, "usage": usage})
        content = f'{{"object":"list","data":[{",".join(data)}],{rest[1:]}'
        return Whole(placement_headers(self._sinks[0].where), content.encode())


class _VectorSink:
    """The sink of one input; nothing is generated, and only the vector counts."""

    def __init__(self) -> None:
        self.embedding = b""
        self.where: Placed

    def placed(self, where: Placed) -> None:
        self.where = where

    def first(self, _: int, __: Sequence[TokenLogprobs], embedding: bytes) -> None:
        self.embedding = embedding

    def stopped(self, stop: str) -> None:
        pass  # there are no stop strings

    def push(
        self,
        text: str,
        token_ids: Sequence[int],
        logprobs: Sequence[TokenLogprobs],
        finish: FinishReason | None,
    ) -> None:
        pass  # the token that the engine generates is not part of the answer


def _vector(embedding: bytes, encoding: str | None) -> str | list[float]:
    if encoding == "base64":
        return base64.b64encode(embedding).decode()
    return list(struct.unpack(f"<{len(embedding) // 4}f", embedding))
