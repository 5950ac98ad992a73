from __future__ import annotations

from kvmesh.cli.keeper import MAX_PAUSE_S, MAX_WORKER_PAUSE_S, restart_pause_s


def test_the_first_restart_is_at_once_and_the_others_become_rarer() -> None:
    pauses = [restart_pause_s(number, MAX_WORKER_PAUSE_S) for number in range(1, 20)]
    assert pauses[:5] == [0.0, 0.2, 0.4, 0.8, 1.6]
    assert pauses[-1] == MAX_WORKER_PAUSE_S


def test_control_plane_and_gateway_wait_less() -> None:
    assert restart_pause_s(10**6, MAX_PAUSE_S) == MAX_PAUSE_S < MAX_WORKER_PAUSE_S
