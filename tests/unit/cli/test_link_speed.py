from __future__ import annotations

from kvmesh.cli.link_speed import loopback_bytes_per_s, read_bytes_per_s


def test_speeds_are_those_of_a_machine() -> None:
    # Between a floppy disk and a cache.
    assert 1e5 < loopback_bytes_per_s(pieces=2) < 1e12
    assert 1e7 < read_bytes_per_s(num_bytes=8 << 20, repeats=1) < 1e13
