"""Delivers tokens to a client: pushes them through the detokenizer into a sink.

Each API has a sink that writes text in its own format. Nothing here waits: a sink writes to a
connection, or queues its pieces for a task that sends them (`pulled`).
Tests: tests/unit/gateway/request/test_delivery.py.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Coroutine, Sequence
from typing import Any, Protocol, TypeVar

from kvmesh.core.errors import GoneError
from kvmesh.core.types import FinishReason, TokenLogprobs
from services.gateway.request.choice import Choice
from services.gateway.request.ledger import Ledger
from services.gateway.request.mesh import Placed
from services.gateway.text.detokenizer import Detokenizer
from services.gateway.text.tokenizer import TextTokenizer

ItemT = TypeVar("ItemT")


class Sink(Protocol):
    """Receives the output of one choice."""

    def placed(self, where: Placed) -> None:
        """Notes the workers that generate from here on; called before their tokens."""
        ...

    def first(
        self, cached_tokens: int, prompt_logprobs: Sequence[TokenLogprobs], embedding: bytes
    ) -> None:
        """Called once, before the first piece.

        Args:
            cached_tokens: prompt tokens whose KV was cached.
            prompt_logprobs: of all prompt tokens but the first, if the client asked for them.
            embedding: the prompt's, as float32, little-endian; empty if not asked for.
        """
        ...

    def stopped(self, stop: str) -> None:
        """Called when a stop string ends the output; the last piece follows."""
        ...

    def push(
        self,
        text: str,
        token_ids: Sequence[int],
        logprobs: Sequence[TokenLogprobs],
        finish: FinishReason | None,
    ) -> None:
        """Takes a piece of output.

        Args:
            text: safe to send; may be empty.
            token_ids: the tokens of this piece.
            logprobs: one per token, if the client asked for them.
            finish: set with the last piece.
        """
        ...


class Delivery:
    """Turns one choice's tokens into text and pushes the text into a sink.

    Args:
        ledger: counts the delivered tokens.
    """

    def __init__(
        self, tokenizer: TextTokenizer, choice: Choice, ledger: Ledger, sink: Sink
    ) -> None:
        call = choice.call
        self._ledger = ledger
        self._only_echo = call.max_tokens == 0
        self._detokenizer = _detokenizer(tokenizer, choice)
        if choice.behind is not None:
            self._detokenizer.push(choice.behind.token_ids)
        # With neither stop strings nor echo alone, only the last token can end the generation.
        self._is_plain = not (call.stop or self._only_echo)
        # Called for every token, so looked up once.
        self._text_of = self._detokenizer.plain
        self._push = sink.push
        self._stopped = sink.stopped
        self._count = ledger.tokens
        self.placed = sink.placed
        self.first = sink.first

    def tokens(
        self,
        token_ids: Sequence[int],
        logprobs: Sequence[TokenLogprobs],
        finish: FinishReason | None,
        now: float,
    ) -> bool:
        """Delivers tokens, as `Receiver.tokens` says.

        The piece with a finish reason is the last one.
        """
        if finish is None and self._is_plain:
            self._push(self._text_of(token_ids), token_ids, logprobs, None)
            self._count(len(token_ids), now)
            return True
        piece = self._detokenizer.push(token_ids, ends_with_stop_token=finish is FinishReason.STOP)
        text, num_used = piece.text, piece.num_used
        if piece.stop is not None:
            finish = FinishReason.STOP
            self._stopped(piece.stop)
        elif finish is not None:
            text += self._detokenizer.finish()
        if self._only_echo:  # max_tokens 0: the client wants only the prompt
            finish, text, num_used = FinishReason.LENGTH, "", 0
        if finish is not None:
            self._ledger.ends(finish)
        self._push(text, token_ids[:num_used], logprobs[:num_used], finish)
        self._count(num_used, now)
        return finish is None


def delivered_text(tokenizer: TextTokenizer, choice: Choice, token_ids: Sequence[int]) -> str:
    """The text that a client already has of a choice.

    Args:
        token_ids: the tokens that another gateway delivered.

    Raises:
        GoneError: the answer ends within these tokens.
    """
    piece = _detokenizer(tokenizer, choice).push(token_ids)
    if piece.stop is not None:
        raise GoneError("the answer has ended: there is nothing to resume")
    return piece.text


def _detokenizer(tokenizer: TextTokenizer, choice: Choice) -> Detokenizer:
    call, request = choice.call, choice.request
    return Detokenizer(
        tokenizer.fast,
        request.prompt_ids,
        whole=tokenizer.whole,
        stops=call.stop,
        include_stop=call.include_stop,
        skip_special_tokens=call.skip_special_tokens,
        min_tokens=request.sampling.min_tokens,
    )


async def together(works: Sequence[Coroutine[Any, Any, None]]) -> None:
    """Runs the choices of a call concurrently; the first error cancels the others."""
    if len(works) == 1:
        await works[0]
        return
    tasks = [asyncio.get_running_loop().create_task(work) for work in works]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def pulled(
    work: Coroutine[Any, Any, None], pieces: asyncio.Queue[ItemT | None]
) -> AsyncGenerator[ItemT, None]:
    """Yields the pieces that `work` pushes to a queue. Closing the generator cancels the work.

    Args:
        pieces: the queue that `work` pushes to; this function adds None when the work is over.
    """
    task = asyncio.get_running_loop().create_task(work)
    task.add_done_callback(lambda _: pieces.put_nowait(None))
    try:
        while (piece := await pieces.get()) is not None:
            yield piece
        await task
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
