"""Holds back the output of a call's choices until workers have taken all of them.

Workers already generate the choices that they took, because idle reservations could keep the other
choices from finding room. If one choice finds no worker in time, all choices end. Nothing was sent
by then, so the client gets a single refusal (docs/adr/0026-all-choices-or-none.md).
Tests: tests/property/test_gate.py, tests/integration/test_gateway_choices.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from kvmesh.core.types import FinishReason, TokenLogprobs
from services.gateway.request.delivery import Sink
from services.gateway.request.mesh import Placed


class Gate:
    """The gate of one call.

    Args:
        sinks: one per choice, behind the gate.
        on_open: called once, before the held output goes to the sinks.

    Attributes:
        held: one sink per choice, in front of the gate.
        is_open: workers have taken all choices.
    """

    def __init__(self, sinks: Sequence[Sink], on_open: Callable[[], None]) -> None:
        self.held = [_Held(self, sink) for sink in sinks]
        self.is_open = False
        self._on_open = on_open

    def open_if_placed(self) -> None:
        """Opens if workers have taken all choices."""
        if self.is_open or not all(each.is_placed for each in self.held):
            return
        self.is_open = True
        self._on_open()
        for each in self.held:
            each.flush()


class _Held:
    """The sink of one choice in front of the gate: queues its calls while the gate is closed."""

    def __init__(self, gate: Gate, sink: Sink) -> None:
        self._gate = gate
        self._sink = sink
        self._queue: list[Callable[[], None]] = []
        self.is_placed = False

    def placed(self, where: Placed) -> None:
        self._pass(partial(self._sink.placed, where))
        self.is_placed = True
        self._gate.open_if_placed()

    def first(
        self, cached_tokens: int, prompt_logprobs: Sequence[TokenLogprobs], embedding: bytes
    ) -> None:
        self._pass(partial(self._sink.first, cached_tokens, prompt_logprobs, embedding))

    def stopped(self, stop: str) -> None:
        self._pass(partial(self._sink.stopped, stop))

    def push(
        self,
        text: str,
        token_ids: Sequence[int],
        logprobs: Sequence[TokenLogprobs],
        finish: FinishReason | None,
    ) -> None:
        self._pass(partial(self._sink.push, text, token_ids, logprobs, finish))

    def _pass(self, call: Callable[[], None]) -> None:
        if self._gate.is_open:
            call()
        else:
            self._queue.append(call)

    def flush(self) -> None:
        """Makes the queued calls, in their order."""
        queue, self._queue = self._queue, []
        for call in queue:
            call()
