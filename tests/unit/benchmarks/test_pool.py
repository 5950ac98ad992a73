from __future__ import annotations

from collections import Counter

from benchmarks.pool import PREFIX_TOKENS, PREFIXES, TAIL_TOKENS, arrivals


def test_prompts_share_prefixes_whose_popularity_is_skewed() -> None:
    load = arrivals(rate=50.0, seconds=10.0, seed=3)
    assert load == arrivals(rate=50.0, seconds=10.0, seed=3)
    assert 0.8 * 500 < len(load) < 1.2 * 500
    assert [each.at_s for each in load] == sorted(each.at_s for each in load)
    assert {len(each.prompt) for each in load} == {PREFIX_TOKENS + TAIL_TOKENS}
    counts = Counter(each.prompt[:PREFIX_TOKENS] for each in load).most_common()
    assert len(counts) <= PREFIXES
    assert counts[0][1] > len(load) / 2
    assert len({each.prompt[PREFIX_TOKENS:] for each in load}) == len(load), "no two ends alike"
