from __future__ import annotations

import pytest

from kvmesh.policy.offload import (
    AdjustReason,
    LinkState,
    OffloadReason,
    Reach,
    Threshold,
    adjust_threshold,
    choose_cluster,
)

ABUNDANT = Reach(bandwidth_abundant=True)


class TestCluster:
    @pytest.mark.parametrize(
        ("total", "remote_cached", "local_cached", "remote"),
        [(100, 0, 0, False), (101, 0, 0, True), (150, 100, 0, True), (150, 0, 50, False)],
    )
    def test_scarce_bandwidth_looks_at_the_local_prefix(
        self, total: int, remote_cached: int, local_cached: int, remote: bool
    ) -> None:
        choice = choose_cluster(total, remote_cached, local_cached, 100, Reach())
        assert choice.remote is remote
        assert choice.moved_tokens == 0
        assert choice.uncached_tokens == total - (remote_cached if remote else local_cached)

    def test_abundant_bandwidth_moves_the_longer_prefix(self) -> None:
        choice = choose_cluster(150, 100, 20, 100, ABUNDANT)
        assert not choice.remote
        assert (choice.moved_tokens, choice.uncached_tokens) == (80, 50)

    def test_the_longer_prefix_may_be_where_the_prompt_is_computed(self) -> None:
        choice = choose_cluster(500, 100, 20, 100, ABUNDANT)
        assert choice.remote
        assert (choice.moved_tokens, choice.uncached_tokens) == (0, 400)

    @pytest.mark.parametrize(
        ("total", "reach", "remote", "reason"),
        [
            (50, Reach(local=False), True, OffloadReason.LOCAL_DOWN),
            (500, Reach(remote=False), False, OffloadReason.REMOTE_DOWN),
            (50, Reach(remote=False), False, OffloadReason.SHORT),
            (500, Reach(local=False), True, OffloadReason.LONG),
        ],
    )
    def test_a_cluster_that_is_down_is_not_named(
        self, total: int, reach: Reach, remote: bool, reason: OffloadReason
    ) -> None:
        choice = choose_cluster(total, 0, 0, 100, reach)
        assert (choice.remote, choice.reason) == (remote, reason)


class TestThreshold:
    BASE = Threshold(1000.0, 1000.0)

    @pytest.mark.parametrize(
        ("link", "reason"),
        [
            (LinkState(0.95), AdjustReason.LINK_FULL),
            (LinkState(0.1, remote_queue=3.0), AdjustReason.REMOTE_SURGE),
        ],
    )
    def test_remote_congestion_raises_it(self, link: LinkState, reason: AdjustReason) -> None:
        raised = adjust_threshold(self.BASE, link)
        assert raised.tokens > 1000
        assert raised.reason is reason

    def test_it_stays_while_a_request_waits_at_home(self) -> None:
        kept = adjust_threshold(self.BASE, LinkState(0.95, local_queue=0.5))
        assert (kept.tokens, kept.reason) == (1000, AdjustReason.FAR_FULL)

    def test_local_congestion_lowers_it_while_the_link_has_room(self) -> None:
        lowered = adjust_threshold(self.BASE, LinkState(0.1, local_queue=3.0))
        assert lowered.tokens < 1000
        assert lowered.reason is AdjustReason.LOCAL_SURGE
        assert adjust_threshold(self.BASE, LinkState(0.8, local_queue=3.0)).tokens == 1000

    @pytest.mark.parametrize("link", [LinkState(0.1, 5.0, 5.0), LinkState(1.0, 0.0, 5.0)])
    def test_with_both_sides_full_the_base_is_the_best_there_is(self, link: LinkState) -> None:
        held = adjust_threshold(self.BASE, link)
        assert (held.tokens, held.reason) == (1000.0, AdjustReason.BOTH_FULL)
        for start in (200.0, 5000.0):
            back = adjust_threshold(Threshold(1000.0, start), link)
            assert abs(back.tokens - 1000) < abs(start - 1000)

    def test_a_full_link_moves_nothing_home_where_requests_wait_already(self) -> None:
        held = adjust_threshold(self.BASE, LinkState(1.0, 3.0, 1.0))
        assert held.tokens == self.BASE.tokens

    @pytest.mark.parametrize(
        ("link", "reason"),
        [
            (LinkState(1.0, 0.0, 1.0), AdjustReason.FAR_FULL),
            (LinkState(0.1, 3.0, 1.0), AdjustReason.FAR_FULL),
            (LinkState(0.1, 1.0, 3.0), AdjustReason.NEAR_FULL),
            (LinkState(0.1, 1.0, 1.0), AdjustReason.CALM),
        ],
    )
    def test_a_side_that_is_full_without_relief_is_named(
        self, link: LinkState, reason: AdjustReason
    ) -> None:
        assert adjust_threshold(self.BASE, link) == Threshold(1000.0, 1000.0, reason)
        back = adjust_threshold(Threshold(1000.0, 200.0), link)
        assert 200 < back.tokens < 1000
        assert back.reason is (AdjustReason.RECOVERING if reason is AdjustReason.CALM else reason)

    @pytest.mark.parametrize(
        ("start", "link"),
        [(5000.0, LinkState(0.1, 0.0, 9.0)), (200.0, LinkState(1.0, 9.0, 0.0))],
    )
    def test_a_surge_of_the_other_side_brings_it_back_no_slower_than_calm(
        self, start: float, link: LinkState
    ) -> None:
        surge = adjust_threshold(Threshold(1000.0, start), link).tokens
        calm = adjust_threshold(Threshold(1000.0, start), LinkState(0.1)).tokens
        assert abs(surge - 1000) <= abs(calm - 1000) < abs(start - 1000)

    @pytest.mark.parametrize("start", [200.0, 5000.0])
    def test_it_returns_to_the_base(self, start: float) -> None:
        threshold = Threshold(1000.0, start)
        distances = []
        while threshold.tokens != 1000:
            threshold = adjust_threshold(threshold, LinkState(0.1))
            assert threshold.reason is AdjustReason.RECOVERING
            distances.append(abs(threshold.tokens - 1000))
        assert distances == sorted(distances, reverse=True)
        assert len(distances) > 5, "slower than at once"
        assert adjust_threshold(threshold, LinkState(0.1)).reason is AdjustReason.CALM

    @pytest.mark.parametrize(
        ("start", "link"),
        [
            (2000.0, LinkState(0.8)),
            (2000.0, LinkState(0.1, 1.0)),
            (500.0, LinkState(0.1, 0.0, 1.0)),
        ],
    )
    def test_what_still_presses_holds_it(self, start: float, link: LinkState) -> None:
        held = adjust_threshold(Threshold(1000.0, start), link)
        assert (held.tokens, held.reason) == (start, AdjustReason.HOLD)

    @pytest.mark.parametrize(
        ("link", "bound"), [(LinkState(1.0), 8000.0), (LinkState(0.0, 0.0, 9.0), 125.0)]
    )
    def test_it_is_bounded(self, link: LinkState, bound: float) -> None:
        threshold = self.BASE
        for _ in range(100):
            threshold = adjust_threshold(threshold, link)
        assert threshold.tokens == bound
