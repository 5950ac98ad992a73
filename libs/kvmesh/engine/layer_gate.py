"""How far the first part of a prompt has arrived, layer by layer, while another worker computes it.

The event loop reports arrivals; the thread that computes waits for them. No torch here.
Tests: tests/unit/engine/test_layer_gate.py.
"""

from __future__ import annotations

import threading


class LayerGate:
    """Layers of a prompt's first part whose KV is in this worker's blocks."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._num_layers = 0
        self._is_closed = False

    @property
    def num_layers(self) -> int:
        """Leading layers that have arrived."""
        return self._num_layers

    def arrived(self, num_layers: int) -> None:
        """Reports that so many leading layers are there."""
        with self._changed:
            self._num_layers = max(self._num_layers, num_layers)
            self._changed.notify_all()

    def close(self) -> None:
        """Says that no more will come. May be called again."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()

    def wait(self, num_layers: int) -> bool:
        """Waits until so many leading layers are there; False if they will not come.

        Whoever owns the gate closes it when arrivals stop, so that this ends.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._num_layers >= num_layers or self._is_closed)
            return self._num_layers >= num_layers
