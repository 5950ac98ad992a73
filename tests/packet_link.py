"""A link between two network namespaces whose packets are lost, late or out of order.

Two TUN devices, each in a network namespace of its own, and a relay in user space that carries IP
packets between them: TCP of the kernel on both sides sees true loss, delay and reordering, also on
kernels without `tc netem`. Rates are the kernel's own (`tc tbf`). Needs root and /dev/net/tun.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import heapq
import os
import random
import select
import struct
import subprocess
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_TUNSETIFF, _IFF_TUN, _IFF_NO_PI = 0x400454CA, 0x0001, 0x1000
_CLONE_NEWNET = 0x40000000
_MTU = 1500
_libc = ctypes.CDLL(None, use_errno=True)

NEAR, FAR = "10.99.0.1", "10.99.0.2"


@dataclass
class Weather:
    """What happens to packets; may be changed while the link is up.

    Attributes:
        loss: share that is dropped, in each direction.
        delay_s: of every packet, one way.
        reorder: share that overtakes the delay.
        rate: of `tc tbf`, in its words; empty is no bound. Set before the link is made.
        is_cut: nothing passes, and nobody is told.
    """

    loss: float = 0.0
    delay_s: float = 0.0
    reorder: float = 0.0
    rate: str = ""
    is_cut: bool = False


def missing() -> str:
    """Why there can be no such link here; empty if there can."""
    if os.geteuid() != 0:
        return "needs root"
    if not Path("/dev/net/tun").exists():
        return "needs /dev/net/tun"
    return ""


class _End:
    """A namespace with one device in it."""

    def __init__(self, address: str, peer: str, rate: str) -> None:
        failures: list[BaseException] = []

        def make() -> None:
            try:
                self._make(address, peer, rate)
            except (OSError, subprocess.CalledProcessError) as error:
                failures.append(error)

        # A thread of its own: it moves into the new namespace and ends there.
        thread = threading.Thread(target=make)
        thread.start()
        thread.join()
        if failures:
            raise failures[0]

    def _make(self, address: str, peer: str, rate: str) -> None:
        if _libc.unshare(_CLONE_NEWNET) != 0:
            raise OSError(ctypes.get_errno(), "unshare")
        self.namespace = os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)
        self.device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
        name = struct.pack("16sH22x", b"kv0", _IFF_TUN | _IFF_NO_PI)
        fcntl.ioctl(self.device, _TUNSETIFF, name)
        commands = [
            "ip link set lo up",
            f"ip addr add {address} peer {peer} dev kv0",
            f"ip link set kv0 mtu {_MTU} up",
        ]
        if rate:
            commands.append(f"tc qdisc add dev kv0 root tbf rate {rate} burst 64kb latency 100ms")
        for command in commands:
            subprocess.run(command.split(), check=True, capture_output=True)

    def close(self) -> None:
        os.close(self.device)
        os.close(self.namespace)


class PacketLink:
    """Carries packets until it is closed.

    Attributes:
        weather: what happens to them now.
        dropped: packets that were lost on purpose.
    """

    def __init__(self, weather: Weather, seed: int = 1) -> None:
        self.weather = weather
        self.dropped = 0
        self._rng = random.Random(seed)
        self._near, self._far = _End(NEAR, FAR, weather.rate), _End(FAR, NEAR, weather.rate)
        self._other = {
            self._near.device: self._far.device,
            self._far.device: self._near.device,
        }
        self._home = os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)
        self._over = threading.Event()
        self._relay = threading.Thread(target=self._carry)
        self._relay.start()

    @contextlib.contextmanager
    def near(self) -> Iterator[None]:
        """This thread's new sockets are at the near end."""
        with self._inside(self._near):
            yield

    @contextlib.contextmanager
    def far(self) -> Iterator[None]:
        """This thread's new sockets are at the far end."""
        with self._inside(self._far):
            yield

    @contextlib.contextmanager
    def _inside(self, end: _End) -> Iterator[None]:
        _enter(end.namespace)
        try:
            yield
        finally:
            _enter(self._home)

    def close(self) -> None:
        """Takes the devices away."""
        self._over.set()
        self._relay.join()
        self._near.close()
        self._far.close()
        os.close(self._home)

    def _carry(self) -> None:
        poller = select.poll()
        for device in self._other:
            poller.register(device, select.POLLIN)
        late: list[tuple[float, int, int, bytes]] = []
        number = 0
        while not self._over.is_set():
            wait_s = min(0.02, max(0.0, late[0][0] - time.monotonic())) if late else 0.02
            for device, _ in poller.poll(wait_s * 1e3):
                for packet in _packets(device):
                    number += 1
                    due = self._due()
                    if due is not None:
                        heapq.heappush(late, (due, number, self._other[device], packet))
            now = time.monotonic()
            while late and late[0][0] <= now:
                _, _, device, packet = heapq.heappop(late)
                with contextlib.suppress(BlockingIOError, OSError):  # a full device drops, too
                    os.write(device, packet)

    def _due(self) -> float | None:
        """When a packet arrives; None if it is lost."""
        weather = self.weather
        if weather.is_cut or self._rng.random() < weather.loss:
            self.dropped += 1
            return None
        delay_s = weather.delay_s
        if weather.reorder and self._rng.random() < weather.reorder:
            delay_s = 0.0
        return time.monotonic() + delay_s


def _packets(device: int) -> Iterator[bytes]:
    for _ in range(64):
        try:
            yield os.read(device, 65536)
        except BlockingIOError:
            return


def _enter(namespace: int) -> None:
    if _libc.setns(namespace, _CLONE_NEWNET) != 0:
        raise OSError(ctypes.get_errno(), "setns")


@contextlib.contextmanager
def packet_link(weather: Weather) -> Iterator[PacketLink]:
    """A link that is up inside."""
    link = PacketLink(weather)
    try:
        yield link
    finally:
        link.close()
