"""The state of one request on the prefill side of a worker.

Tests: tests/integration/test_worker.py.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from kvmesh.core.types import PrefixSource, RequestId, Reservation
from kvmesh.engine.sequence import Emission, Sequence
from kvmesh.policy.transfer_mode import TransferMode
from kvmesh.runtime.layer_progress import LayerProgress
from kvmesh.runtime.local_start import PrefillOutbox
from kvmesh.telemetry.tracing import Span
from kvmesh.transfer.device import Moment


class Ending(Protocol):
    """A part of an attempt that must be closed at its end."""

    def close(self) -> None:
        """Closes it; may be called again."""
        ...


@dataclass(eq=False, slots=True)
class PrefillAttempt:
    """One request on this worker, from acceptance until its KV is taken.

    Attributes:
        source: the worker to fetch a prefix from first, or the worker that computes the beginning.
        is_part: the receiver of the KV computes the rest of the prompt at the same time.
        upstream: the prompt's beginning, while another worker computes it.
        waits: its sequence starts only after its prefix was fetched, or brought up from a tier.
        report_s: seconds between two reports of progress to the gateway; 0 sends none.
        num_advances: steps that computed this prompt further, or one ahead of it on this worker.
        reports: reports the progress, if the gateway asked for it.
        outcome: its outcome, or the outcome if it were cancelled now.
    """

    outbox: PrefillOutbox
    request_id: RequestId
    attempt: int
    reservation: Reservation
    span: Span
    source: PrefixSource | None = None
    is_part: bool = False
    waits: bool = False
    report_s: float = 0.0
    num_advances: int = 0
    reports: Ending | None = None
    upstream: Ending | None = None
    sequence: Sequence | None = None
    first: Emission | None = None
    progress: asyncio.Event = field(default_factory=asyncio.Event)
    work: asyncio.Task[None] | None = None
    outcome: str = "cancelled"
    sent_bytes: int = 0
    sent_calls: int = 0
    sending_s: float = 0.0
    sent_parts: int = 0
    mode: TransferMode = TransferMode.WHOLE
    layers: LayerProgress = field(default_factory=LayerProgress)

    def watch_layers(self, moment: Callable[[], Moment]) -> None:
        """Makes the engine wake the attempt when layers of the last chunk are computed.

        Args:
            moment: returns the position of a device's queue; called in the engine's thread.
        """
        assert self.sequence is not None
        loop = asyncio.get_running_loop()

        def computed(num_layers: int, behind: Moment) -> None:
            self.layers.computed(num_layers, behind)
            self.progress.set()

        def on_layers(num_layers: int) -> None:  # in the engine's thread
            loop.call_soon_threadsafe(computed, num_layers, moment())

        self.sequence.on_layers = on_layers
