"""Whom leases are counted for."""

from __future__ import annotations

import pytest

from kvmesh.kv.read_leases import Reader
from kvmesh.runtime.kv_pool import reader_of


@pytest.mark.parametrize(
    ("peer", "reader"),
    [
        ("ipv4:10.0.0.7:4711", "10.0.0.7"),
        ("ipv6:%5B2001:db8::7%5D:4711", "2001:db8::7"),
        ("ipv6:[fe80::7%25eth0]:4711", "fe80::7%eth0"),
        ("ipv4:127.0.0.1:4711", "r0"),
        ("ipv6:%5B::1%5D:4711", "r0"),
        ("ipv4:10.0.0.1:4711", "r0"),
        ("unix:", "r0"),
        ("ipv4:what is that", "r0"),
    ],
)
def test_a_reader_of_another_host_is_its_host_whatever_it_calls_itself(
    peer: str, reader: str
) -> None:
    assert reader_of("r0", peer, "10.0.0.1") == Reader(reader, "r0")


def test_the_neighbours_of_a_worker_at_an_ipv6_address_are_told_apart() -> None:
    for here in ("2001:db8::7", "[2001:db8::7]"):
        same, other = "ipv6:%5B2001:db8::7%5D:4711", "ipv6:%5B2001:db8::8%5D:4711"
        assert reader_of("r0", same, here) == Reader("r0", "r0")
        assert reader_of("r0", other, here) == Reader("2001:db8::8", "r0")
