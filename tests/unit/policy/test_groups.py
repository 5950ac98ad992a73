from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvmesh.policy.groups import GroupKey, shares_of_groups
from tests.unit.policy.fleet_examples import LAYOUT, worker_info


def key(scenario: str = "", cluster: str = "east") -> GroupKey:
    return GroupKey("m", "fingerprint", scenario, cluster)


CHAT, DOC, ANY = key("chat"), key("doc"), key()


def test_workers_of_one_group_agree_in_everything_that_work_depends_on() -> None:
    here = worker_info("w", scenario="chat")
    assert GroupKey.of(here) == CHAT
    assert (CHAT.name, ANY.name) == ("chat@east", "any@east")
    other_layout = dataclasses.replace(LAYOUT, model_fingerprint="another")
    for change in ({"model": "n"}, {"layout": other_layout}, {"cluster": "west"}):
        assert GroupKey.of(dataclasses.replace(here, **change)) != CHAT


@pytest.mark.parametrize(
    ("askers", "sizes", "expected"),
    [
        ({"chat": 1, "doc": 3}, {CHAT: 2, DOC: 2}, {CHAT: 0.25, DOC: 0.75}),
        ({"doc": 5}, {CHAT: 2, DOC: 2}, {CHAT: 0.0, DOC: 1.0}),
        ({"other": 4, "chat": 4}, {CHAT: 2, ANY: 1}, {CHAT: 0.5, ANY: 0.5}),
        ({"": 4}, {CHAT: 3, DOC: 1}, {CHAT: 0.75, DOC: 0.25}),
        ({}, {CHAT: 3, DOC: 1}, {CHAT: 0.75, DOC: 0.25}),
        ({"chat": 1}, {CHAT: 1, key("chat", "west"): 3}, {CHAT: 0.25, key("chat", "west"): 0.75}),
        ({"chat": 1}, {}, {}),
    ],
    ids=["own", "one idles", "no group of its own", "no general group", "nobody", "two", "empty"],
)
def test_requests_count_where_routes_send_them(
    askers: dict[str, float], sizes: dict[GroupKey, int], expected: dict[GroupKey, float]
) -> None:
    assert shares_of_groups(askers, sizes) == pytest.approx(expected)


SCENARIOS = st.sampled_from(["", "chat", "doc", "other"])


@given(
    st.dictionaries(SCENARIOS, st.integers(0, 9).map(float)),
    st.dictionaries(
        st.builds(key, SCENARIOS, st.sampled_from(["east", "west"])),
        st.integers(1, 9),
        min_size=1,
    ),
)
def test_every_request_counts_once(askers: dict[str, float], sizes: dict[GroupKey, int]) -> None:
    shares = shares_of_groups(askers, sizes)
    assert shares.keys() == sizes.keys()
    assert sum(shares.values()) == pytest.approx(1.0)
    assert min(shares.values()) >= 0.0
