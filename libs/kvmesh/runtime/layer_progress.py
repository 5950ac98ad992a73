"""Which layers of a prompt's last chunk can leave. Pure.

On the host a layer that is told of has been written. A device has then only been given it, maybe
all layers at once: what leaves next are the layers that it has come past, or, while it is at the
first of them, those, and the transfer waits for it.
Tests: tests/unit/runtime/test_layer_progress.py.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from kvmesh.transfer.device import DevicePool, Moment

IsPast = Callable[[Moment], bool]


class LayerProgress:
    """How far the layers of one prompt are.

    Attributes:
        num_sent: layers that have arrived at the receiver.
        is_refused: the receiver takes whole blocks only.
    """

    def __init__(self) -> None:
        self.num_sent = 0
        self.is_refused = False
        self._computed: deque[tuple[int, Moment]] = deque()

    def computed(self, num_layers: int, moment: Moment) -> None:
        """So many layers are written once a device has come past this moment."""
        if not self._computed or num_layers > self._computed[-1][0]:
            self._computed.append((num_layers, moment))

    def next(self, is_past: IsPast) -> tuple[int, Moment] | None:
        """Up to which layer to send now, and behind which moment; None when there is nothing."""
        while self._computed and self._computed[0][0] <= self.num_sent:
            self._computed.popleft()
        if self.is_refused or not self._computed:
            return None
        while len(self._computed) > 1 and is_past(self._computed[1][1]):
            self._computed.popleft()
        return self._computed[0]


def past_of(memory: object) -> IsPast:
    """How to ask a pool; whatever a pool in host memory tells has been written."""
    return memory.is_past if isinstance(memory, DevicePool) else lambda _: True


def moment_of(memory: object) -> Callable[[], Moment]:
    """What a pool says where it is now; one in host memory has no moments."""
    return memory.moment if isinstance(memory, DevicePool) else lambda: None
