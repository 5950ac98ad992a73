from __future__ import annotations

import dataclasses
import random

from hypothesis import given
from hypothesis import strategies as st

from kvmesh.core.details import WorkerDetail
from kvmesh.core.empty_spare import EmptySpare, Origin
from kvmesh.core.health import Health
from kvmesh.core.types import Role, WorkerId, WorkerLoad
from kvmesh.policy.groups import GroupKey
from kvmesh.policy.substitute import (
    MAX_OF_A_SIDE,
    Means,
    Member,
    Paces,
    Place,
    substitutes,
)
from tests.unit.policy.fleet_examples import LAYOUT, worker_info

PACES = Paces({Means.SPARE: 0.1, Means.FLIP: 0.1, Means.SLACK: 0.1}, token_s=0.001)
LOST = worker_info("d0", Role.DECODE)


def member(name: str, role: Role, busy: float = 0.0, **changes: object) -> Member:
    """A worker of which this share of the slots is taken."""
    info = worker_info(name, role, **changes)
    load = WorkerLoad(
        blocks_free=info.num_blocks,
        prefill_active=round(busy * info.prefill_slots),
        decode_running=round(busy * info.decode_slots),
    )
    return Member(info, load)


def first(*members: Member, back_s: float | None = 5.0) -> tuple[Means, str]:
    best = substitutes(Place(LOST, back_s), members, PACES)[0]
    return best.means, best.worker_id


BUSY = (
    member("d1", Role.DECODE, 1.0),
    member("d2", Role.DECODE, 1.0),
    member("p0", Role.PREFILL, 1.0),
    member("p1", Role.PREFILL, 1.0),
)


def test_a_spare_costs_least() -> None:
    assert first(*BUSY, member("s", Role.SPARE)) == (Means.SPARE, "s")
    assert first(member("s", Role.SPARE)) == (Means.SPARE, "s"), "also where nobody is left"


def empty(name: str, cluster: str = "east") -> EmptySpare:
    return EmptySpare(WorkerId(name), 1, cluster, "kvmesh")


def order(place: Place, *members: Member) -> list[Means]:
    return [each.means for each in substitutes(place, members, PACES, [empty("e")])]


def test_an_empty_spare_costs_what_its_load_takes() -> None:
    lost = dataclasses.replace(LOST, origin=Origin("/m"))
    place = Place(lost, back_s=5.0, new_s=6.0, load_s=2.0)
    spare, idle = member("s", Role.SPARE), [member(f"p{n}", Role.PREFILL) for n in range(2)]
    loaded_first = [Means.SPARE, Means.EMPTY, Means.RETURN, Means.PROCESS]
    assert order(place, *BUSY[:2], spare) == loaded_first
    slow = dataclasses.replace(place, load_s=5.5)
    assert order(slow, *BUSY[:2]) == [Means.RETURN, Means.EMPTY, Means.PROCESS]
    same = dataclasses.replace(place, load_s=5.0)
    assert order(same, *BUSY[:2])[0] is Means.RETURN, "the spare is kept where it gains nothing"
    gone = dataclasses.replace(slow, back_s=None)
    assert order(gone, *BUSY[:2], *idle)[0] is Means.EMPTY, "nobody helps for 300 s"
    best = substitutes(place, BUSY[:2], PACES, [empty("w", "west"), empty("b"), empty("a")])[0]
    assert (best.worker_id, best.cost_s) == ("a", 2.0)
    assert best.reason == "an empty spare that loads the model costs 2.00 s (missed 2.00 s)"


def test_where_all_are_busy_its_own_return_is_awaited() -> None:
    assert first(*BUSY) == (Means.RETURN, "d0")


def test_an_idle_side_gives_a_worker_unless_it_is_the_last() -> None:
    decoders = BUSY[:2]
    idle = [member(f"p{n}", Role.PREFILL) for n in range(2)]
    assert first(*decoders, *idle) == (Means.FLIP, "p0")
    assert first(*decoders, idle[0]) == (Means.RETURN, "d0")
    assert substitutes(Place(LOST), [*decoders, idle[0]], PACES) == []


def test_another_group_gives_what_it_can_spare_and_its_kv_counts() -> None:
    chat = [member(f"c{n}", Role.DECODE, scenario="chat") for n in range(2)]
    assert first(*BUSY, *chat) == (Means.SLACK, "c0")
    full = [dataclasses.replace(each, detail=WorkerDetail(blocks_cached=512)) for each in chat]
    assert first(*BUSY, *full) == (Means.RETURN, "d0"), "8,192 tokens take 8 s to compute"
    assert first(*BUSY, full[0], chat[1]) == (Means.SLACK, "c1")


def test_who_cannot_serve_the_group_is_not_asked() -> None:
    other = dataclasses.replace(LAYOUT, model_fingerprint="other")
    unfit = [
        member("a", Role.SPARE, cluster="west"),
        member("b", Role.SPARE, layout=other),
        member("c", Role.SPARE, model="n"),
        dataclasses.replace(member("d", Role.SPARE), health=Health.SUSPECT),
        dataclasses.replace(member("e", Role.SPARE), detail=WorkerDetail(cordoned=True)),
    ]
    assert substitutes(Place(LOST), unfit, PACES) == []


def test_the_reason_adds_up() -> None:
    (option,) = substitutes(Place(LOST, 5.0), [], PACES)
    assert option.reason == "its own return costs 5.00 s (missed 5.00 s)"


ROLES = st.sampled_from(list(Role))
FLEETS = st.lists(
    st.builds(
        lambda name, role, busy, scenario, blocks: dataclasses.replace(
            member(f"w{name}", role, busy, scenario=scenario),
            detail=WorkerDetail(blocks_cached=blocks),
        ),
        st.integers(0, 99),
        ROLES,
        st.floats(0, 1),
        st.sampled_from(["", "chat"]),
        st.integers(0, 512),
    ),
    max_size=12,
    unique_by=lambda each: each.info.worker_id,
)


@given(FLEETS, ROLES.filter(lambda role: role is not Role.SPARE), st.none() | st.floats(0, 100))
def test_the_first_is_the_cheapest_and_no_side_loses_its_last(
    fleet: list[Member], role: Role, back_s: float | None
) -> None:
    lost = worker_info("gone", role)
    found = substitutes(Place(lost, back_s), fleet, PACES)
    costs = [each.cost_s for each in found]
    assert costs == sorted(costs)
    assert all(min(each.wait_s, each.kv_s, each.taken_s) >= 0 for each in found)
    assert (back_s is not None) == any(each.means is Means.RETURN for each in found)
    by_name = {each.info.worker_id: each for each in fleet}
    spares = [each for each in found if each.means is Means.SPARE]
    assert len(spares) == sum(each.info.role is Role.SPARE for each in fleet)
    for option in found:
        if option.means in (Means.FLIP, Means.SLACK):
            taken = by_name[option.worker_id].info
            left = [
                each
                for each in fleet
                if (GroupKey.of(each.info), each.info.role) == (GroupKey.of(taken), taken.role)
            ]
            assert len(left) > 1


@given(FLEETS, st.floats(0.2, 100))
def test_a_spare_that_is_sooner_than_the_return_is_never_dearer(
    fleet: list[Member], back_s: float
) -> None:
    found = substitutes(Place(LOST, back_s), [*fleet, member("s", Role.SPARE)], PACES)
    assert found[0].means is not Means.RETURN


def test_of_thousands_the_least_busy_are_named() -> None:
    helpers = [member(f"p{n}", Role.PREFILL, n / 500, prefill_slots=1000) for n in range(500)]
    random.Random(1).shuffle(helpers)
    flips = [e for e in substitutes(Place(LOST), helpers, PACES) if e.means is Means.FLIP]
    assert [each.worker_id for each in flips] == [f"p{n}" for n in range(MAX_OF_A_SIDE)]
