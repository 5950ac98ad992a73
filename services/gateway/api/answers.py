"""Answers one call: as one body, or as server-sent events.

Tests: tests/integration/test_gateway_http.py, tests/integration/test_gateway_streams.py.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from json.encoder import encode_basestring
from typing import Protocol

from kvmesh.core.errors import KvMeshError
from kvmesh.core.types import FinishReason, TokenLogprobs
from services.gateway.api.responses import Body, ChoiceText, Responses, usage_body
from services.gateway.errors import answer_for
from services.gateway.frontend import Frontend, usage_of
from services.gateway.request.choice import Behind, Choice
from services.gateway.request.delivery import delivered_text
from services.gateway.request.event_ids import MAX_CHOICES
from services.gateway.request.journal import Entry
from services.gateway.request.mesh import Placed
from services.gateway.tools.reasoning import thinking_at
from services.gateway.tools.thinking_count import ThinkingCount

SSE_HEADERS = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",  # keeps proxies from buffering the stream
}


DONE = b"data: [DONE]\n\n"

SEED_HEADER = "x-kvmesh-seed"
RESUMABLE_HEADER = "x-kvmesh-resumable"


class EventSink(Protocol):
    """Sends a stream of events to a client over HTTP. Only `sent` waits."""

    @property
    def has_begun(self) -> bool:
        """Whether the answer's head was sent."""
        ...

    def begin(self, headers: Mapping[str, str], data: bytes) -> None:
        """Sends the answer's head, status 200, and the first events."""
        ...

    def write(self, data: bytes) -> None:
        """Sends events."""
        ...

    def end(self, data: bytes) -> None:
        """Sends the last events."""
        ...

    async def sent(self) -> None:
        """Waits until the client has taken all data."""
        ...


@dataclass(frozen=True, slots=True)
class Whole:
    """An answer as one body of JSON, status 200."""

    headers: Mapping[str, str]
    content: bytes


dumps = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode
"""Compact JSON."""

_NO_SCORE = TokenLogprobs(0.0, (), ())

_MARK = "\0text\0"
_MARK_AS_JSON = json.dumps(_MARK)


class EventTemplate:
    """A server-sent event in which only the text changes.

    Args:
        body_with: makes the event's body with a given text, which occurs in it once.
    """

    def __init__(self, body_with: Callable[[str], Body | None]) -> None:
        # No field after the text comes from the caller, so the last mark is the text's own.
        head, mark, self._tail = dumps(body_with(_MARK)).rpartition(_MARK_AS_JSON)
        assert mark, "the text is part of the body"
        self._head = "data: " + head
        self._tail += "\n\n"

    def event(self, text: str, id_line: str = "") -> bytes:
        """The event with this text."""
        return f"{id_line}{self._head}{encode_basestring(text)}{self._tail}".encode()


@lru_cache(maxsize=1024)
def placement_headers(placed: Placed) -> Mapping[str, str]:
    """Headers that tell where a request ran. They are cached, since few placements occur."""
    return {
        "x-kvmesh-prefill-worker": placed.prefill_worker,
        "x-kvmesh-decode-worker": placed.decode_worker,
        "x-kvmesh-placement": placed.placement.value,
        "x-kvmesh-decision": placed.decision,
    }


class Answer:
    """Runs the choices of one call.

    Args:
        request_id: for the answer's `id`.
        created: seconds since the epoch.

    Attributes:
        call: the checked call.
        texts: the output of each choice so far.
        responses: makes the bodies.
    """

    def __init__(
        self,
        frontend: Frontend,
        choices: Sequence[Choice],
        request_id: str,
        created: int,
    ) -> None:
        self._frontend = frontend
        self._choices = choices
        self.call = call = choices[0].call
        self.texts = [ChoiceText(each.request.prompt_ids, echo=each.echo) for each in choices]
        tokenizer = frontend.tokenizer
        # Only chats have thinking, and a chat has a single prompt.
        prompt_ids = choices[0].request.prompt_ids
        thinking = thinking_at(call.reasoning, prompt_ids, tokenizer.token_text)
        self._counts: list[ThinkingCount] = []
        if thinking is not None:
            self._counts = [ThinkingCount(thinking, tokenizer.token_bytes) for _ in choices]
        self.responses = Responses(
            call,
            request_id,
            choices[0].model_name,
            created,
            tokenizer.token_bytes,
            thinking,
        )

    async def whole(self) -> Whole:
        """Runs the choices and returns the answer as one body."""
        sinks = [_WholeSink(self, index) for index in range(len(self.texts))]
        await self._frontend.run(self._choices, sinks)
        headers = self.headers(sinks[0].where)
        body = self.responses.whole(self.texts, self.usage())
        return Whole(headers, dumps(body).encode())

    async def stream(self, out: EventSink, entry: Entry | None = None) -> None:
        """Runs the choices and sends the answer as server-sent events.

        The status line waits for the first tokens, since a refusal is possible until then.

        Args:
            entry: the stream's journal entry, if another gateway may resume the stream.
        """
        stream = _Stream(self, out, entry)
        sinks = [_StreamSink(self, index, stream) for index in range(len(self.texts))]
        for choice, sink in zip(self._choices, sinks, strict=True):
            if choice.behind is None:
                continue
            if choice.behind.is_complete:
                sink.first(choice.behind.cached_tokens, (), b"")
                self.note(choice.index, choice.behind.token_ids, None)
                stream.was_complete(choice.index)
            else:
                token_ids = choice.behind.token_ids
                text = delivered_text(self._frontend.tokenizer, choice, token_ids)
                sink.resume(choice.behind, text)
        choices = [choice for choice in self._choices if choice.is_open]
        try:
            await self._frontend.run(choices, [sinks[each.index] for each in choices])
        except KvMeshError as error:
            if not stream.has_begun:
                raise
            stream.fail(_event(answer_for(error).body) + DONE)
        await stream.sent()

    def headers(self, where: Placed) -> Mapping[str, str]:
        """Headers of the answer: its seed, and the workers that run it."""
        return {SEED_HEADER: str(self.call.seed), **placement_headers(where)}

    def note(self, index: int, token_ids: Sequence[int], finish: FinishReason | None) -> None:
        """Adds a piece to its choice."""
        choice = self.texts[index]
        choice.token_ids.extend(token_ids)
        choice.finish_reason = finish
        if self._counts:  # per piece: counting thousands at the end would stall others
            self._counts[index].of(choice.token_ids)

    def usage(self) -> Body:
        """Token counts so far."""
        seen: set[int] = set()
        usages = []
        for index, (choice, text) in enumerate(zip(self._choices, self.texts, strict=True)):
            # Choices of one prompt share it, so its tokens count once.
            shared = choice.prompt_index in seen
            seen.add(choice.prompt_index)
            num_prompt = 0 if shared else len(text.prompt_ids)
            # `usage_of` limits cached tokens to the prompt's length, so they count once as well.
            reasoning = self._counts[index].of(text.token_ids) if self._counts else 0
            usages.append(usage_of(num_prompt, len(text.token_ids), text.cached_tokens, reasoning))
        return usage_body(usages, has_reasoning=bool(self._counts))


class _ChoiceSink:
    """The sink of one choice of an answer.

    Attributes:
        where: the workers that run it.
    """

    def __init__(self, answer: Answer, index: int) -> None:
        self._answer = answer
        self._index = index
        self._text = answer.texts[index]
        self.where: Placed

    def placed(self, where: Placed) -> None:
        self.where = where

    def first(self, cached_tokens: int, prompt_logprobs: Sequence[TokenLogprobs], _: bytes) -> None:
        self._text.cached_tokens = cached_tokens
        self._text.prompt_logprobs.extend(prompt_logprobs)

    def stopped(self, stop: str) -> None:
        pass  # OpenAI's format does not name the stop string


class _WholeSink(_ChoiceSink):
    """Gathers the output of a choice for one body."""

    def push(
        self,
        text: str,
        token_ids: Sequence[int],
        logprobs: Sequence[TokenLogprobs],
        finish: FinishReason | None,
    ) -> None:
        self._answer.note(self._index, token_ids, finish)
        self._text.text += text
        self._text.logprobs.extend(logprobs)


class _Stream:
    """The state that the choices of a stream share.

    Attributes:
        entry: the stream's journal entry; None without a journal.
        write: sends events.
        has_begun: something was sent.
    """

    def __init__(self, answer: Answer, out: EventSink, entry: Entry | None) -> None:
        self._answer = answer
        self._num_open = len(answer.texts)
        self._out = out
        self.entry = entry
        self.has_begun = False
        self.write: Callable[[bytes], None] = out.write

    def send(self, events: bytes, where: Placed) -> None:
        """Sends events of a choice. The first call sends the headers even without events."""
        if not self.has_begun:
            self.has_begun = True
            headers = {**SSE_HEADERS, **self._answer.headers(where)}
            if len(self._answer.texts) > MAX_CHOICES:
                headers[RESUMABLE_HEADER] = f"no; more than {MAX_CHOICES} choices"
            self._out.begin(headers, events)
        elif events:
            self.write(events)

    def ends(self, events: bytes, where: Placed) -> None:
        """Sends a choice's last events; after the last choice, ends the stream."""
        self.send(events, where)
        self._num_open -= 1
        if not self._num_open:
            self._end()

    def was_complete(self, index: int) -> None:
        """Notes that another gateway delivered a whole choice."""
        if self.entry is not None:
            self.entry.places[index].complete()
        self._num_open -= 1

    def fail(self, events: bytes) -> None:
        """Sends an error as the end of the stream."""
        self._out.end(events)

    async def sent(self) -> None:
        """Waits until the client has taken all data."""
        if not self.has_begun:  # another gateway delivered all choices
            self.has_begun = True
            headers = {**SSE_HEADERS, SEED_HEADER: str(self._answer.call.seed)}
            self._out.begin(headers, b"")
            self._end()
        await self._out.sent()

    def _end(self) -> None:
        answer, ending = self._answer, b""
        if answer.call.include_usage:
            id_line = "" if self.entry is None else self.entry.id_line(is_over=True)
            ending = _event(answer.responses.closing_usage(answer.usage()), id_line)
        self._out.end(ending + DONE)


class _StreamSink(_ChoiceSink):
    """Writes a choice as events."""

    def __init__(self, answer: Answer, index: int, stream: _Stream) -> None:
        super().__init__(answer, index)
        self._stream = stream
        self._entry = stream.entry
        self._is_opened = False
        self._event_with: Callable[[str, str], bytes] | None = None
        # Called for every token, so looked up once.
        self._keep = self._text.token_ids.extend
        call = answer.call
        # If plain, the events between first and last differ only in their text.
        self._is_plain = not (
            call.tools is not None
            or call.continuous_usage
            or call.return_token_ids
            or call.sampling.num_logprobs >= 0
        )

    def placed(self, where: Placed) -> None:
        super().placed(where)
        if self._entry is not None:
            self._entry.placed(self._index, where.checkpoint)

    def first(
        self, cached_tokens: int, prompt_logprobs: Sequence[TokenLogprobs], embedding: bytes
    ) -> None:
        super().first(cached_tokens, prompt_logprobs, embedding)
        if self._entry is not None and cached_tokens:
            self._entry.places[self._index].has_cached(cached_tokens)

    def resume(self, behind: Behind, text: str) -> None:
        """Continues after the part that another gateway sent; `text` is the text of its tokens."""
        sampling, token_ids = self._answer.call.sampling, behind.token_ids
        # Later events depend on the number of tokens with logprobs, not on their values.
        num_prompt = len(self._text.prompt_ids) - 1 if sampling.num_prompt_logprobs >= 0 else 0
        num_scores = len(token_ids) if sampling.num_logprobs >= 0 else 0
        self.first(behind.cached_tokens, [_NO_SCORE] * num_prompt, b"")
        self._answer.note(self._index, token_ids, None)
        self._events(text, token_ids, [_NO_SCORE] * num_scores, None)
        if self._entry is not None:
            self._entry.places[self._index].open()

    def push(
        self,
        text: str,
        token_ids: Sequence[int],
        logprobs: Sequence[TokenLogprobs],
        finish: FinishReason | None,
    ) -> None:
        entry = self._entry
        if finish is None and self._event_with is not None:
            self._keep(token_ids)  # the thinking is over, so `note` has nothing to count
            id_line = "" if entry is None else entry.after(self._index, token_ids)
            if text:
                self._stream.write(self._event_with(text, id_line))
            return
        self._answer.note(self._index, token_ids, finish)
        events = self._noted(text, token_ids, logprobs, finish)
        if finish is not None:
            self._stream.ends(events, self.where)
            return
        self._stream.send(events, self.where)
        if self._is_plain and self._answer.responses.is_answer(self._index):
            self._event_with = EventTemplate(self._body_with).event

    def _body_with(self, text: str) -> Body | None:
        return self._answer.responses.piece(self._index, text, (), (), None)

    def _noted(
        self,
        text: str,
        token_ids: Sequence[int],
        logprobs: Sequence[TokenLogprobs],
        finish: FinishReason | None,
    ) -> bytes:
        """Returns a piece as events; each id tells the stream's position after its event."""
        entry, was_opened = self._entry, self._is_opened
        bodies = self._events(text, token_ids, logprobs, finish)
        if entry is None:
            return b"".join(map(_event, bodies))
        place, events = entry.places[self._index], b""
        place.open()
        if not was_opened and len(bodies) > 1:
            events = _event(bodies.pop(0), entry.id_line())
        entry.after(self._index, token_ids)
        if finish is not None:
            place.complete()
        return events + b"".join([_event(body, entry.id_line()) for body in bodies])

    def _events(
        self,
        text: str,
        token_ids: Sequence[int],
        logprobs: Sequence[TokenLogprobs],
        finish: FinishReason | None,
    ) -> list[Body]:
        """Bodies of a piece's events; none if there is nothing to send yet."""
        responses, index = self._answer.responses, self._index
        bodies: list[Body | None] = []
        if not self._is_opened:
            self._is_opened = True
            bodies.append(responses.opening(index, self._text))
        bodies.append(responses.piece(index, text, token_ids, logprobs, finish))
        found = [body for body in bodies if body is not None]
        if self._answer.call.continuous_usage:
            for body in found:
                body["usage"] = self._answer.usage()
        return found


def _event(body: Body, id_line: str = "") -> bytes:
    return f"{id_line}data: {dumps(body)}\n\n".encode()
