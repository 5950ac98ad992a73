"""A link between two network namespaces with the kernel's own rate limit, for a far cluster.

Needs root, `ip` and `tc`. What leaves the far side is held to a rate that may be changed at any
time; the way there is free unless it is held to a rate, too.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass

BURST, LATENCY = "64kb", "200ms"


def missing() -> str:
    """Why there can be no such link here; empty if there can."""
    if os.geteuid() != 0:
        return "needs root"
    absent = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if absent:
        return f"needs {' and '.join(absent)}"
    try:
        with far_link(1e6):
            return ""
    except subprocess.CalledProcessError as error:  # a sandbox in which root may not do all
        return f"{error.cmd[0]} may not: {error.stderr.strip()}"


@dataclass(frozen=True)
class FarLink:
    """A namespace behind a link; it has nothing else.

    Attributes:
        device: the near end.
        near, far: addresses of the two ends.
    """

    namespace: str
    device: str
    near: str
    far: str

    @property
    def prefix(self) -> tuple[str, ...]:
        """Put before a command."""
        return ("ip", "netns", "exec", self.namespace)

    def set_rate(self, bytes_per_s: float) -> None:
        """From now on so much leaves the far end."""
        _run(*self.prefix, *_held("far", bytes_per_s))

    def set_rate_there(self, bytes_per_s: float) -> None:
        """From now on so much leaves the near end."""
        _run(*_held(self.device, bytes_per_s))

    def set_up(self, is_up: bool) -> None:
        """Takes the far end down, so that nothing gets through and nobody is told, or up again."""
        _run(*self.prefix, *f"ip link set far {'up' if is_up else 'down'}".split())


def _held(device: str, bytes_per_s: float) -> list[str]:
    rate = f"rate {int(bytes_per_s * 8)}bit burst {BURST} latency {LATENCY}"
    return f"tc qdisc replace dev {device} root tbf {rate}".split()


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True)


@contextlib.contextmanager
def far_link(bytes_per_s: float) -> Iterator[FarLink]:
    """A link that is up inside; names and addresses are those of this process alone."""
    number = os.getpid() % 4000
    subnet = f"10.{96 + number // 250}.{number % 250}"
    device = f"kvl{number}"
    link = FarLink(f"kvmesh-live-{number}", device, f"{subnet}.1", f"{subnet}.2")
    _run("ip", "netns", "add", link.namespace)
    try:
        inside = f"peer name far netns {link.namespace}".split()
        _run("ip", "link", "add", device, "type", "veth", *inside)
        _run(*f"ip addr add {link.near}/24 dev {device}".split())
        _run(*f"ip link set {device} up".split())
        for command in ("ip link set lo up", f"ip addr add {link.far}/24 dev far",
                        "ip link set far up"):  # fmt: skip
            _run(*link.prefix, *command.split())
        link.set_rate(bytes_per_s)
        yield link
    finally:
        # First the pair of devices: with the namespace it would go later, when the kernel comes to
        # it, and a second link of this process would find the name taken.
        with contextlib.suppress(subprocess.CalledProcessError):  # it may never have been made
            _run("ip", "link", "del", device)
        _run("ip", "netns", "del", link.namespace)
