"""A host of an engine that is gone without a word: the kernel ends its line at both ends."""

from __future__ import annotations

import contextlib
import socket
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from kvmesh.core.mesh_secret import MeshSecret, new_secret
from kvmesh.engine.rank_lines import LOSS_S, LineKind, RankAccess, RankGate, dial
from tests.packet_link import NEAR, Weather, missing, packet_link

pytestmark = pytest.mark.skipif(bool(missing()), reason=missing())


def seconds_until_it_ends(line: socket.socket) -> float:
    """How long a line that says nothing stays."""
    began = time.monotonic()
    with contextlib.suppress(OSError):
        line.recv(1)
    return time.monotonic() - began


def test_a_line_whose_packets_are_lost_ends_in_time() -> None:
    access = RankAccess(secret=MeshSecret(new_secret()))
    with packet_link(Weather(delay_s=0.001)) as link, ThreadPoolExecutor(2) as threads:
        with link.near():
            gate = RankGate(NEAR, 0, access, num_hosts=2, host_ranks=1)
        with link.far():
            there, _ = dial(NEAR, gate.port, access, LineKind.HOST, 1)
        here = gate.take(LineKind.HOST, 1, 5.0)
        assert here is not None
        with here, there:
            ends = [threads.submit(seconds_until_it_ends, end) for end in (here, there)]
            time.sleep(LOSS_S + 1.5)  # a line that only says nothing stays
            assert not any(end.done() for end in ends)
            cut_at = LOSS_S + 1.5
            link.weather.is_cut = True
            for end in ends:
                assert end.result(30.0) - cut_at < LOSS_S + 1.5
        gate.close()
