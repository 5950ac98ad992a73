"""Progress of the first part of a prompt, stage by stage, while another worker computes it.

The event loop reports arrivals; the computing thread polls. No torch here.
Tests: tests/unit/engine/test_layer_gate.py.
"""

from __future__ import annotations

from collections.abc import Callable


class LayerGate:
    """Stages of a prompt's first part whose KV is in this worker's blocks.

    Args:
        on_change: called on the event loop after each report.
    """

    def __init__(self, on_change: Callable[[], None] = lambda: None) -> None:
        self._on_change = on_change
        self._num_stages = 0
        self._is_closed = False

    @property
    def num_stages(self) -> int:
        """Number of leading stages that have arrived."""
        return self._num_stages

    def arrived(self, num_stages: int) -> None:
        """Reports that this many leading stages have arrived."""
        self._num_stages = max(self._num_stages, num_stages)
        self._on_change()

    def close(self) -> None:
        """Reports that no more stages will arrive. May be called again."""
        self._is_closed = True
        self._on_change()

    def passes(self, num_stages: int) -> bool | None:
        """Whether this many leading stages have arrived; None while they may still arrive.

        The gate's owner closes it when arrivals stop.
        """
        if self._num_stages >= num_stages:
            return True
        return False if self._is_closed else None
