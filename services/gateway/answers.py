"""One call answered: as one body, or as server-sent events.

Tests: tests/integration/test_gateway_http.py.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol

from kvmesh.core.errors import KvMeshError
from services.gateway.errors import answer_for
from services.gateway.frontend import Choice, Frontend, usage_of
from services.gateway.merge import merge
from services.gateway.mesh import Placed
from services.gateway.openai import ApiCall
from services.gateway.reasoning import thinking_at
from services.gateway.request_flow import Generation
from services.gateway.request_record import TextDelta
from services.gateway.responses import Body, ChoiceText, Responses, usage_body
from services.gateway.thinking_count import ThinkingCount
from services.gateway.token_lane import ChunkTemplate, Open, TokenLane, Writer

SSE_HEADERS = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",  # proxies must not collect the stream
}


DONE = b"data: [DONE]\n\n"


class EventSink(Protocol):
    """Where a stream of events goes; bytes in, HTTP out."""

    @property
    def writer(self) -> Writer | None:
        """For events that are whole HTTP chunks already; None if the client takes none."""
        ...

    @property
    def has_begun(self) -> bool:
        """Whether the answer's head was sent."""
        ...

    def opener(self, headers: Mapping[str, str]) -> Open | None:
        """Makes the head now; what is returned does what `start` does, without waiting."""
        ...

    async def start(self, headers: Mapping[str, str], data: bytes) -> None:
        """Sends the answer's head, status 200, and the first events."""
        ...

    async def write(self, data: bytes) -> None:
        """Sends events; waits while the client does not read."""
        ...

    async def end(self, data: bytes) -> None:
        """Sends the last events."""
        ...


@dataclass(frozen=True, slots=True)
class Whole:
    """An answer as one body of JSON, status 200."""

    headers: Mapping[str, str]
    content: bytes


dumps = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode
"""Compact JSON."""


@lru_cache(maxsize=1024)
def placement_headers(placed: Placed) -> Mapping[str, str]:
    """Where a request ran, for people who debug; the same places come again and again."""
    return {
        "x-kvmesh-prefill-worker": placed.prefill_worker,
        "x-kvmesh-decode-worker": placed.decode_worker,
        "x-kvmesh-placement": placed.placement.value,
        "x-kvmesh-decision": placed.decision,
    }


class Answer:
    """Runs the choices of one call.

    Args:
        request_id: goes into `id`.
        begun: the only choice, if a worker was told of it already.
    """

    def __init__(
        self,
        frontend: Frontend,
        call: ApiCall,
        choices: Sequence[Choice],
        request_id: str,
        begun: Generation | None = None,
    ) -> None:
        self._frontend = frontend
        self._call = call
        self._choices = choices
        self._request_id = request_id
        self._begun = begun
        self._texts: list[ChoiceText] = []
        self._counts: list[ThinkingCount] = []
        self._sink: EventSink | None = None
        self._lane: TokenLane | None = None

    def _prepare(self) -> None:
        """Makes what the answer needs when its first tokens come; workers have the call already."""
        call, choices, frontend = self._call, self._choices, self._frontend
        self._texts = [ChoiceText(each.request.prompt_ids, echo=each.echo) for each in choices]
        tokenizer = frontend.tokenizer
        # Where there is thinking, the call is a chat, which has one prompt.
        prompt_ids = choices[0].request.prompt_ids
        thinking = thinking_at(call.reasoning, prompt_ids, tokenizer.token_text)
        if thinking is not None:
            self._counts = [ThinkingCount(thinking, tokenizer.token_bytes) for _ in choices]
        self._responses = Responses(
            call,
            self._request_id,
            frontend.served_name,
            int(time.time()),
            tokenizer.token_bytes,
            thinking,
        )
        if self._lane is not None and thinking is None:
            self._lane.on_placed = self._prepare_lane

    def _prepare_lane(self, lane: TokenLane, placed: Placed) -> None:
        """Lets the first tokens go by the lane too, with the head before them."""
        assert self._sink is not None, "a lane leads to one"
        writer, send = (
            self._sink.writer,
            self._sink.opener({**SSE_HEADERS, **placement_headers(placed)}),
        )
        if writer is not None and send is not None:
            choice = self._texts[0]
            opening = self._responses.opening(0, choice)
            events = b"" if opening is None else _event(opening)
            lane.prepare(writer, ChunkTemplate(self._body_with), choice, send, events)

    async def whole(self) -> Whole:
        """The answer as one body."""
        headers: Mapping[str, str] = {}
        async with aclosing(self._deltas(whole=True)) as deltas:
            async for delta in deltas:
                choice = self._note(delta)
                choice.text += delta.text
                choice.logprobs.extend(delta.logprobs)
                if delta.index == 0:
                    headers = placement_headers(delta.placed)
        body = self._responses.whole(self._texts, self._usage())
        return Whole(headers, dumps(body).encode())

    async def stream(self, sink: EventSink) -> None:
        """The answer as server-sent events.

        The status line waits for the first tokens: until then a refusal is still possible.
        """
        self._sink = sink
        self._lane = TokenLane() if self._is_plain and sink.writer is not None else None
        try:
            async with aclosing(self._deltas(self._lane)) as deltas:
                # A client may go away between two chunks, before its handler is cancelled: that is
                # no error, and leaving the block cancels the work.
                with contextlib.suppress(ConnectionResetError):
                    await self._send_all(sink, deltas)
        finally:
            if self._lane is not None:
                self._lane.close()  # it knows this answer: a circle that only a collection frees

    async def _send_all(self, sink: EventSink, deltas: AsyncGenerator[TextDelta, None]) -> None:
        ending = b""
        try:
            async for delta in deltas:
                self._note(delta)
                events = self._events(delta)
                if not sink.has_begun:
                    await sink.start({**SSE_HEADERS, **placement_headers(delta.placed)}, events)
                elif events:
                    await sink.write(events)
                self._open_lane(sink)
            if self._call.include_usage:
                ending = _event(self._responses.closing_usage(self._usage()))
        except KvMeshError as error:
            if not sink.has_begun:
                raise
            ending = _event(answer_for(error).body)
        if self._lane is not None:
            self._lane.close()
        await sink.end(ending + DONE)

    def _open_lane(self, sink: EventSink) -> None:
        """Opens the lane after a piece that ends the thinking."""
        lane, writer = self._lane, sink.writer
        if lane is None or writer is None or lane.is_open or not self._responses.is_answer(0):
            return
        lane.open(writer, ChunkTemplate(self._body_with), self._texts[0])

    @property
    def _is_plain(self) -> bool:
        """Whether pieces in the middle differ in nothing but their text."""
        call = self._call
        return not (
            len(self._choices) > 1
            or call.stop
            or call.tools is not None
            or call.continuous_usage
            or call.return_token_ids
            or call.sampling.num_logprobs >= 0
        )

    def _body_with(self, text: str) -> Body | None:
        return self._responses.piece(0, text, (), (), None)

    def _deltas(
        self, lane: TokenLane | None = None, *, whole: bool = False
    ) -> AsyncGenerator[TextDelta, None]:
        """What is generated, piece by piece.

        Args:
            lane: of the only choice; what it takes does not come here.
            whole: pieces may come together, at the end.
        """
        if len(self._choices) == 1:
            (choice,) = self._choices
            begun, meanwhile = self._begun, self._prepare
            return self._frontend.run(choice, lane, begun=begun, whole=whole, meanwhile=meanwhile)
        self._prepare()
        return merge([self._frontend.run(choice, whole=whole) for choice in self._choices])

    def _note(self, delta: TextDelta) -> ChoiceText:
        """Adds a piece to what there is of its choice."""
        choice = self._texts[delta.index]
        choice.token_ids.extend(delta.token_ids)
        if self._counts:  # as they come: thousands at the end would hold up other streams
            self._counts[delta.index].of(choice.token_ids)
        choice.cached_tokens = delta.cached_tokens
        choice.finish_reason = delta.finish_reason
        choice.prompt_logprobs += delta.prompt_logprobs
        return choice

    def _events(self, delta: TextDelta) -> bytes:
        """A piece as events; empty if there is nothing to say yet."""
        choice = self._texts[delta.index]
        bodies: list[Body | None] = []
        if len(choice.token_ids) == len(delta.token_ids):  # the choice's first piece
            bodies.append(self._responses.opening(delta.index, choice))
        bodies.append(
            self._responses.piece(
                delta.index, delta.text, delta.token_ids, delta.logprobs, delta.finish_reason
            )
        )
        events = b""
        for body in bodies:
            if body is not None:
                if self._call.continuous_usage:
                    body["usage"] = self._usage()
                events += _event(body)
        return events

    def _usage(self) -> Body:
        seen: set[int] = set()
        usages = []
        for index, (choice, text) in enumerate(zip(self._choices, self._texts, strict=True)):
            # Choices of one prompt share it: it counts once.
            shared = choice.prompt_index in seen
            seen.add(choice.prompt_index)
            num_prompt = 0 if shared else len(text.prompt_ids)
            # `usage_of` limits cached tokens to the prompt's, so they count once as well.
            reasoning = self._counts[index].of(text.token_ids) if self._counts else 0
            usages.append(usage_of(num_prompt, len(text.token_ids), text.cached_tokens, reasoning))
        return usage_body(usages, has_reasoning=bool(self._counts))


def _event(body: Body) -> bytes:
    return b"data: " + dumps(body).encode() + b"\n\n"
