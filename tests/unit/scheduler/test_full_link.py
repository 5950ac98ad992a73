"""How often a link that remote workers keep in use is found to be full, and for how long after."""

from __future__ import annotations

import pytest

from kvmesh.policy.offload import AdjustReason
from tests.unit.scheduler.far_link import BASE_TOKENS, FarLink, Senders

CYCLES = 120


@pytest.mark.parametrize("configured_mb_s", [100, 300])
@pytest.mark.parametrize("seed", range(3))
async def test_a_link_that_two_workers_keep_in_use_is_nearly_always_full(
    configured_mb_s: float, seed: int
) -> None:
    """All that waits is a transfer of each, which leaves within a second."""
    link = FarLink(configured_mb_s, 100, Senders(pause_s=0.2), seed)
    await link.seconds(CYCLES)
    assert 0.92 < link.busy_share() < 0.97
    assert link.full_share(CYCLES - 5) > 0.8


@pytest.mark.parametrize("seed", range(3))
async def test_a_low_link_that_is_left_alone_for_a_half_is_hardly_ever_full(seed: int) -> None:
    link = FarLink(300, 100, Senders(pause_s=1.3), seed)
    await link.seconds(CYCLES)
    assert 0.4 < link.busy_share() < 0.6
    assert link.full_share(CYCLES) < 0.05


async def test_many_that_are_slower_than_the_link_do_not_fill_it_though_one_always_sends() -> None:
    link = FarLink(12_000, 12_000, Senders(pause_s=0.09, count=8, own_mb_s=1000))
    await link.seconds(CYCLES)
    assert min(link.sending_share(name) for name in link.senders) > 0.3
    assert AdjustReason.LINK_FULL not in link.reasons


async def test_a_link_that_falls_to_a_third_is_found_soon_and_so_is_that_it_has_room_again() -> (
    None
):
    link = FarLink(300, 300, Senders(pause_s=1.5, count=4))
    await link.seconds(30)
    assert link.tokens[-1] == BASE_TOKENS
    link.carry(100)
    await link.seconds(6)
    assert link.tokens[-1] > BASE_TOKENS
    await link.seconds(24)
    highest = max(link.tokens)
    link.carry(300)
    await link.seconds(6)
    assert link.tokens[-1] < highest
    await link.seconds(24)
    assert BASE_TOKENS in link.tokens[-24:]


async def test_who_vanishes_while_it_sends_leaves_no_share_behind() -> None:
    link = FarLink(300, 100, Senders(pause_s=0.15))
    await link.seconds(30)
    assert link.full_share(20) > 0.9
    link.vanish("far0")
    await link.seconds(60)
    assert link.sending_share("far1") > 0.6, "with the other's share that would be all the time"
    assert link.full_share(50) < 0.1
    assert BASE_TOKENS in link.tokens[-30:]


async def test_reports_that_are_lost_do_not_hide_that_a_link_is_full() -> None:
    link = FarLink(300, 100, Senders(pause_s=0.1, lost_share=0.4))
    await link.seconds(CYCLES)
    assert link.full_share(CYCLES - 5) > 0.8
