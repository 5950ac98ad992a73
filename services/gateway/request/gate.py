"""All or none: what the choices of a call say is held until workers have taken every one of them.

A choice that was taken is worked on meanwhile: blocks that only waited for a sibling would be
missing to it. If one finds no worker in time, all of them end, and nothing was sent: the client
gets one refusal (docs/adr/0026-all-choices-or-none.md).
Tests: tests/property/test_gate.py, tests/integration/test_gateway_choices.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from kvmesh.core.types import FinishReason, TokenLogprobs
from services.gateway.request.delivery import Sink
from services.gateway.request.mesh import Placed


class Gate:
    """Of the choices of one call.

    Args:
        sinks: where they go.
        on_open: called before the first of them goes there.

    Attributes:
        held: the same number of sinks, to be used instead.
        is_open: all choices were taken.
    """

    def __init__(self, sinks: Sequence[Sink], on_open: Callable[[], None]) -> None:
        self.held = [_Held(self, sink) for sink in sinks]
        self.is_open = False
        self._on_open = on_open

    def look(self) -> None:
        """Opens if all choices were taken."""
        if self.is_open or not all(each.is_placed for each in self.held):
            return
        self.is_open = True
        self._on_open()
        for each in self.held:
            each.go_on()


class _Held:
    """One choice."""

    def __init__(self, gate: Gate, sink: Sink) -> None:
        self._gate = gate
        self._sink = sink
        self._said: list[Callable[[], None]] = []
        self.is_placed = False

    def placed(self, where: Placed) -> None:
        self._say(partial(self._sink.placed, where))
        self.is_placed = True
        self._gate.look()

    def first(self, cached_tokens: int, prompt_logprobs: Sequence[TokenLogprobs]) -> None:
        self._say(partial(self._sink.first, cached_tokens, prompt_logprobs))

    def stopped(self, stop: str) -> None:
        self._say(partial(self._sink.stopped, stop))

    def push(
        self,
        text: str,
        token_ids: Sequence[int],
        logprobs: Sequence[TokenLogprobs],
        finish: FinishReason | None,
    ) -> None:
        self._say(partial(self._sink.push, text, token_ids, logprobs, finish))

    def _say(self, word: Callable[[], None]) -> None:
        if self._gate.is_open:
            word()
        else:
            self._said.append(word)

    def go_on(self) -> None:
        """Says what was held."""
        said, self._said = self._said, []
        for word in said:
            word()
