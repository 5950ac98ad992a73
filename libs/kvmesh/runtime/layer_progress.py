"""Chooses the layers of a prompt's last chunk that can be sent. Pure.

On the host, a reported layer has been written. On a device, its work has only been queued, maybe
for all layers at once. Then the layers that the device has passed leave next. If it has passed
none, the first queued ones leave, and the transfer waits for the device.
Tests: tests/unit/runtime/test_layer_progress.py.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from kvmesh.transfer.device import DevicePool, Moment

IsPast = Callable[[Moment], bool]


class LayerProgress:
    """The progress of one prompt's layers.

    Attributes:
        num_sent: number of layers that have arrived at the receiver.
        is_refused: the receiver takes only whole blocks.
    """

    def __init__(self) -> None:
        self.num_sent = 0
        self.is_refused = False
        self._computed: deque[tuple[int, Moment]] = deque()

    def computed(self, num_layers: int, moment: Moment) -> None:
        """Notes that `num_layers` layers are written once a device has passed `moment`."""
        if not self._computed or num_layers > self._computed[-1][0]:
            self._computed.append((num_layers, moment))

    def next(self, is_past: IsPast) -> tuple[int, Moment] | None:
        """The end of the layers to send now, and the moment to wait for; None if there are none."""
        while self._computed and self._computed[0][0] <= self.num_sent:
            self._computed.popleft()
        if self.is_refused or not self._computed:
            return None
        while len(self._computed) > 1 and is_past(self._computed[1][1]):
            self._computed.popleft()
        return self._computed[0]


def past_of(memory: object) -> IsPast:
    """The function that tells whether memory has passed a moment; host memory always has."""
    return memory.is_past if isinstance(memory, DevicePool) else lambda _: True


def moment_of(memory: object) -> Callable[[], Moment]:
    """The function that returns the present moment of memory; host memory has no moments."""
    return memory.moment if isinstance(memory, DevicePool) else lambda: None
