"""One suite for every home of MetadataStore and FleetStore: memory and a real Redis."""

from __future__ import annotations

import random

import pytest

from kvmesh.core.block_names import (
    TELLS_STATES,
    TELLS_TIERS,
    in_disk,
    in_host,
    saved_state,
)
from kvmesh.core.errors import ConfigError
from kvmesh.core.slots import PrefixMatch, Slot
from kvmesh.core.types import WorkerId
from kvmesh.metadata.redis_client import RedisClient, RedisConfig
from kvmesh.metadata.redis_store import APPLY_SLICE_BLOCKS, RedisMetadataStore, apply_slices
from kvmesh.metadata.scripts import MOST_MATCHED
from kvmesh.metadata.store import (
    ApplyResult,
    FleetStore,
    MetadataStore,
    StoreStatistics,
    StoreUnavailableError,
)
from tests.contract.metadata_homes import (
    EVERYTHING,
    LEASE_S,
    NAMESPACE,
    Home,
    Memory,
    Redis,
    block,
    blocks,
    publisher,
)
from tests.redis_server import redis_process


@pytest.fixture
def store(home: Home) -> MetadataStore:
    return home.store


@pytest.fixture
def fleet(home: Home) -> FleetStore:
    return home.fleet


async def lengths(store: MetadataStore, hashes: bytes, namespace: str = NAMESPACE) -> list[object]:
    return [(m.worker_id, m.num_blocks) for m in await store.match(namespace, hashes)]


async def renews(store: MetadataStore, slot: Slot, sequence: int) -> bool:
    [is_renewed] = await store.renew([(slot, sequence)])
    return is_renewed


async def test_match_is_the_longest_run_from_the_start_per_worker(store: MetadataStore) -> None:
    a = (await store.register(publisher("a"))).slot
    b = (await store.register(publisher("b", incarnation=7))).slot
    c = (await store.register(publisher("c"))).slot
    assert await store.apply_events(a, 1, blocks(0, 1, 3), b"") is ApplyResult.APPLIED
    assert await store.apply_events(b, 1, blocks(2, 1, 0), b"") is ApplyResult.APPLIED
    assert await store.apply_events(c, 1, blocks(1, 2, 3), b"") is ApplyResult.APPLIED
    assert await store.match(NAMESPACE, blocks(0, 1, 2, 3)) == [
        PrefixMatch(WorkerId("b"), 7, "east", 3),
        PrefixMatch(WorkerId("a"), 1, "east", 2),
    ]
    assert await store.match(NAMESPACE, blocks(9)) == []
    assert await store.match(NAMESPACE, b"") == []


async def test_holders_are_told_block_by_block(store: MetadataStore) -> None:
    total = 300  # across slices
    asked = blocks(*range(total))
    a = (await store.register(publisher("a"))).slot
    b = (await store.register(publisher("b"))).slot
    await store.register(publisher("c", namespace="another model"))
    gone = (await store.register(publisher("d"))).slot
    await store.apply_events(a, 1, asked, b"")
    await store.apply_events(b, 1, blocks(3, 299) + blocks(1000), b"")
    await store.apply_events(gone, 1, asked, b"")
    await store.forget(gone)
    held = await store.holders(NAMESPACE, asked)
    assert {worker: len(names) for worker, names in held.items() if names} == {"a": total, "b": 2}
    assert held[WorkerId("b")] == {block(3), block(299)}
    assert await store.holders(NAMESPACE, b"") == {}


async def test_a_match_says_in_which_tiers_its_blocks_are(store: MetadataStore) -> None:
    total = 300  # across slices of a script
    asked = blocks(*range(total))
    a = (await store.register(publisher("a"))).slot
    lower = [in_host(block(n)) for n in range(100, 180)] + [in_disk(block(n)) for n in (180, 299)]
    await store.apply_events(a, 1, asked + b"".join((TELLS_TIERS, *lower)), b"")
    b = (await store.register(publisher("b"))).slot
    await store.apply_events(b, 1, blocks(*range(total - 1)), b"")
    assert await store.match(NAMESPACE, asked) == [
        PrefixMatch(WorkerId("a"), 1, "east", total, 80, 2),
        PrefixMatch(WorkerId("b"), 1, "east", total - 1),
    ]
    await store.apply_events(a, 2, b"", b"".join(lower[:70]))
    assert (await store.match(NAMESPACE, blocks(*range(181))))[0].host_blocks == 10


async def test_a_match_ends_where_a_state_is_saved(store: MetadataStore) -> None:
    a = (await store.register(publisher("a"))).slot
    states = [saved_state(block(n)) for n in (2, 200)]
    await store.apply_events(a, 1, blocks(*range(250)) + b"".join((TELLS_STATES, *states)), b"")
    b = (await store.register(publisher("b"))).slot
    await store.apply_events(b, 1, blocks(*range(10)) + TELLS_STATES, b"")
    assert await lengths(store, blocks(*range(300))) == [("a", 201)]
    assert await lengths(store, blocks(*range(200))) == [("a", 3)]
    assert await lengths(store, blocks(0, 1)) == []


async def test_of_many_holders_those_of_the_longest_prefixes_are_told(store: MetadataStore) -> None:
    for number in range(MOST_MATCHED + 20):
        slot = (await store.register(publisher(f"w{number}"))).slot
        length = 300 if number % 20 == 7 else 10
        await store.apply_events(slot, 1, blocks(*range(length)), b"")
    found = await store.match(NAMESPACE, blocks(*range(400)))
    assert len(found) >= MOST_MATCHED
    longest = [f"w{number}" for number in range(7, MOST_MATCHED + 20, 20)]
    assert [(m.worker_id, m.num_blocks) for m in found[: len(longest) + 1]] == [
        *((name, 300) for name in sorted(longest)),
        (found[len(longest)].worker_id, 10),
    ]


async def test_a_long_prefix_is_followed_across_slices(store: MetadataStore) -> None:
    total = APPLY_SLICE_BLOCKS + 300
    slot = (await store.register(publisher("a"))).slot
    assert await store.apply_events(slot, 1, blocks(*range(total)), b"") is ApplyResult.APPLIED
    for asked in (127, 128, 129, total):
        assert await lengths(store, blocks(*range(asked))) == [("a", asked)]
    assert await store.apply_events(slot, 2, b"", blocks(200)) is ApplyResult.APPLIED
    assert await lengths(store, blocks(*range(total))) == [("a", 200)]


async def test_removed_after_stored_and_unknown_hashes_are_harmless(store: MetadataStore) -> None:
    slot = (await store.register(publisher("a"))).slot
    await store.apply_events(slot, 1, blocks(0, 1, 2, 2), b"")
    await store.apply_events(slot, 2, blocks(3), blocks(3, 1, 77))
    assert await lengths(store, blocks(0, 1, 2)) == [("a", 1)]
    assert await lengths(store, blocks(2)) == [("a", 1)]
    assert await lengths(store, blocks(3)) == []
    assert await store.statistics() == StoreStatistics(1, 2)


async def test_a_block_of_two_workers_stays_with_the_other(store: MetadataStore) -> None:
    a = (await store.register(publisher("a"))).slot
    b = (await store.register(publisher("b"))).slot
    await store.apply_events(a, 1, blocks(0, 1), b"")
    await store.apply_events(b, 1, blocks(0, 1), b"")
    await store.apply_events(a, 2, b"", blocks(0, 1))
    assert await lengths(store, blocks(0, 1)) == [("b", 2)]


async def test_gap_and_repeat_change_nothing(store: MetadataStore) -> None:
    slot = (await store.register(publisher("a"))).slot
    await store.apply_events(slot, 1, blocks(0), b"")
    assert await store.apply_events(slot, 3, blocks(1), blocks(0)) is ApplyResult.GAP
    assert await store.apply_events(slot, 1, blocks(1), b"") is ApplyResult.GAP
    assert await lengths(store, blocks(0, 1)) == [("a", 1)]
    assert await store.apply_events(slot, 2, blocks(1), b"") is ApplyResult.APPLIED
    assert await lengths(store, blocks(0, 1)) == [("a", 2)]


async def test_snapshot_replaces_everything_in_one_step(home: Home) -> None:
    store = home.store
    old = (await store.register(publisher("a"))).slot
    await store.apply_events(old, 1, blocks(0, 1, 2), b"")
    slot = await store.begin_snapshot(publisher("a"))
    part = await store.apply_snapshot_part(slot, 8, blocks(0, 10), last=False)
    assert part is ApplyResult.APPLIED
    # Until the last part lookups use what was known, and the new slot takes no events.
    assert await lengths(store, blocks(0, 1, 2)) == [("a", 3)]
    assert await lengths(store, blocks(10)) == []
    assert await store.apply_events(slot, 1, blocks(5), b"") is ApplyResult.UNKNOWN
    assert not await renews(store, slot, 0)
    part = await store.apply_snapshot_part(slot, 8, blocks(1), last=True)
    assert part is ApplyResult.APPLIED
    assert await lengths(store, blocks(0, 1, 2)) == [("a", 2)]
    assert await lengths(store, blocks(10)) == [("a", 1)]
    assert await store.apply_events(old, 2, blocks(2), b"") is ApplyResult.UNKNOWN
    assert await store.apply_events(slot, 9, blocks(2), b"") is ApplyResult.APPLIED
    assert (
        await store.apply_snapshot_part(slot, 9, blocks(3), last=True)
    ) is ApplyResult.UNKNOWN, "a live slot takes no snapshot"
    assert await store.sweep(EVERYTHING) == 3
    assert await lengths(store, blocks(0, 1, 2)) == [("a", 3)]
    assert await store.statistics() == StoreStatistics(1, 4)


async def test_empty_snapshot_means_no_blocks(store: MetadataStore) -> None:
    slot = (await store.register(publisher("a"))).slot
    await store.apply_events(slot, 1, blocks(0), b"")
    slot = await store.begin_snapshot(publisher("a"))
    assert await store.apply_snapshot_part(slot, 2, b"", last=True) is ApplyResult.APPLIED
    assert await lengths(store, blocks(0)) == []
    assert await renews(store, slot, 2)


async def test_same_life_goes_on_where_it_was(store: MetadataStore) -> None:
    first = await store.register(publisher("a"))
    await store.apply_events(first.slot, 1, blocks(0), b"")
    again = await store.register(publisher("a"))
    assert (again.slot, again.sequence) == (first.slot, 1)
    assert await lengths(store, blocks(0)) == [("a", 1)]


async def test_a_new_life_never_matches_what_the_old_one_held(store: MetadataStore) -> None:
    old = (await store.register(publisher("a", incarnation=1))).slot
    await store.apply_events(old, 1, blocks(0), b"")
    new = await store.register(publisher("a", incarnation=2))
    assert new.slot != old
    assert new.sequence == 0
    assert await lengths(store, blocks(0)) == []
    assert await store.apply_events(old, 2, blocks(1), b"") is ApplyResult.UNKNOWN
    await store.apply_events(new.slot, 1, blocks(0), b"")
    assert await store.match(NAMESPACE, blocks(0)) == [PrefixMatch(WorkerId("a"), 2, "east", 1)]


async def test_ended_lease_is_ignored_at_once_and_swept(home: Home) -> None:
    store = home.store
    slot = (await store.register(publisher("a"))).slot
    await store.apply_events(slot, 1, blocks(0, 1), b"")
    await home.expire(slot)
    assert await lengths(store, blocks(0)) == []
    assert await store.statistics() == StoreStatistics(0, 0)
    assert not await renews(store, slot, 1)
    assert await store.apply_events(slot, 2, blocks(2), b"") is ApplyResult.UNKNOWN
    again = await store.register(publisher("a"))
    assert again.slot != slot
    assert again.sequence == 0
    assert await store.sweep(EVERYTHING) == 2
    # The sweep of the old slot leaves the new one of the same worker alone.
    assert await store.apply_events(again.slot, 1, blocks(0), b"") is ApplyResult.APPLIED
    assert await lengths(store, blocks(0, 1)) == [("a", 1)]


async def test_each_renewal_starts_the_lease_anew() -> None:
    memory = Memory()
    store = memory.store
    slot = (await store.register(publisher("a"))).slot
    memory.clock.advance(LEASE_S - 1)
    assert await renews(store, slot, 0)
    memory.clock.advance(LEASE_S - 1)
    assert await store.apply_events(slot, 1, b"", b"") is ApplyResult.APPLIED
    memory.clock.advance(LEASE_S - 1)
    assert (await store.register(publisher("a"))).slot == slot
    memory.clock.advance(LEASE_S - 1)
    assert await renews(store, slot, 1)
    memory.clock.advance(LEASE_S)
    assert not await renews(store, slot, 1)


async def test_each_renewal_sets_the_time_to_live_in_redis(url: str) -> None:
    home = Redis(url)
    store, key = home.store, home.lease_key

    async def renewed(slot: Slot) -> bool:
        left = await home.raw.pttl(key(slot))
        await home.raw.pexpire(key(slot), 5_000)
        return bool(5_000 < left <= LEASE_S * 1000)

    slot = (await store.register(publisher("a"))).slot
    assert await renewed(slot)
    assert not await renewed(slot), "the check itself must be able to fail"
    assert await renews(store, slot, 0)
    assert await renewed(slot)
    await store.apply_events(slot, 1, b"", b"")
    assert await renewed(slot)
    await store.register(publisher("a"))
    assert await renewed(slot)
    loading = await store.begin_snapshot(publisher("a"))
    assert await renewed(loading)
    await store.apply_snapshot_part(loading, 2, b"", last=False)
    assert await renewed(loading)
    await home.close()


async def test_renew_notices_a_batch_that_never_came(store: MetadataStore) -> None:
    slots = [(await store.register(publisher(name))).slot for name in "abc"]
    await store.apply_events(slots[1], 1, blocks(0), b"")
    unknown = Slot("f" * 14)
    told = await store.renew([(slots[0], 0), (slots[1], 0), (unknown, 0), (slots[1], 1)])
    assert told == [True, False, False, True]
    assert await store.renew([(slots[2], 1)]) == [False]
    assert await store.renew([]) == []


async def test_a_fleet_renews_its_leases_in_one_call(store: MetadataStore) -> None:
    slots = [(await store.register(publisher(f"w{number}"))).slot for number in range(300)]
    await store.forget(slots[7])
    told = await store.renew([(slot, 0) for slot in slots])
    assert [index for index, is_renewed in enumerate(told) if not is_renewed] == [7]


async def test_forget_ends_a_slot(store: MetadataStore) -> None:
    slot = (await store.register(publisher("a"))).slot
    await store.apply_events(slot, 1, blocks(0), b"")
    await store.forget(slot)
    await store.forget(slot)
    assert await lengths(store, blocks(0)) == []
    assert not await renews(store, slot, 1)


async def test_namespaces_are_apart(store: MetadataStore) -> None:
    a = (await store.register(publisher("a"))).slot
    b = (await store.register(publisher("b", namespace="model-b"))).slot
    await store.apply_events(a, 1, blocks(0), b"")
    await store.apply_events(b, 1, blocks(0, 1), b"")
    assert await lengths(store, blocks(0, 1)) == [("a", 1)]
    assert await lengths(store, blocks(0, 1), "model-b") == [("b", 2)]
    assert await lengths(store, blocks(0, 1), "model") == []


async def test_sweep_is_bounded_and_leaves_nothing(home: Home) -> None:
    store = home.store
    slots = []
    for worker in ("a", "b"):
        slot = (await store.register(publisher(worker))).slot
        await store.apply_events(slot, 1, blocks(*range(10)), b"")
        slots.append(slot)
    loading = await store.begin_snapshot(publisher("a"))
    await store.apply_snapshot_part(loading, 2, blocks(1, 2), last=False)
    assert await store.sweep(EVERYTHING) == 0
    for slot in (*slots, loading):
        await store.forget(slot)
    removed = [await store.sweep(4) for _ in range(7)]
    assert sum(removed) == 22
    assert max(removed) == 4
    assert await store.sweep(4) == 0
    assert await home.is_empty()


async def test_store_agrees_with_a_plain_model_over_random_batches(store: MetadataStore) -> None:
    rng = random.Random(7)
    names = ["a", "b", "c", "d"]
    slots = {name: (await store.register(publisher(name))).slot for name in names}
    sequence = dict.fromkeys(names, 0)
    held: dict[str, set[int]] = {name: set() for name in names}
    for _ in range(60):
        name = rng.choice(names)
        sequence[name] += 1
        stored = rng.sample(range(12), rng.randrange(8))
        removed = rng.sample(range(12), rng.randrange(4))
        if rng.random() < 0.2:
            slots[name] = await store.begin_snapshot(publisher(name))
            await store.apply_snapshot_part(slots[name], sequence[name], blocks(*stored), last=True)
            held[name] = set(stored)
        else:
            result = await store.apply_events(
                slots[name], sequence[name], blocks(*stored), blocks(*removed)
            )
            assert result is ApplyResult.APPLIED
            held[name] = (held[name] | set(stored)) - set(removed)
        if rng.random() < 0.3:
            await store.sweep(rng.randrange(1, 10))
        expected = {
            name: next((n for n in range(12) if n not in kept), 12) for name, kept in held.items()
        }
        found = await store.match(NAMESPACE, blocks(*range(12)))
        assert {m.worker_id: m.num_blocks for m in found} == {
            name: length for name, length in expected.items() if length
        }
    assert await store.statistics() == StoreStatistics(4, sum(map(len, held.values())))


async def test_probe_answers(home: Home) -> None:
    await home.store.probe()
    assert await home.is_empty()


async def test_emptied_redis_hands_out_new_slots(url: str) -> None:
    home = Redis(url)
    before = (await home.store.register(publisher("a"))).slot
    await home.raw.delete(*await home.raw.keys(home.prefix + "*"))
    assert not await renews(home.store, before, 0)
    after = (await home.store.register(publisher("b"))).slot
    assert after > before
    await home.close()


async def test_unreachable_redis_is_one_kind_of_error() -> None:
    with redis_process() as process:
        store = RedisMetadataStore(RedisClient(RedisConfig(url=process.url)), LEASE_S)
        await store.probe()
    with pytest.raises(StoreUnavailableError, match="Connection"):
        await store.match(NAMESPACE, blocks(0))
    await store.close()


def test_bad_url_is_a_config_error() -> None:
    with pytest.raises(ConfigError, match=r"redis\.url"):
        RedisClient(RedisConfig(url="nonsense"))


def test_batches_are_cut_into_slices_stored_first() -> None:
    step = APPLY_SLICE_BLOCKS * 16
    stored, removed = bytes(step + 16), bytes(16)
    assert list(apply_slices(stored, removed)) == [
        (bytes(step), b"", False),
        (bytes(16), b"", False),
        (b"", bytes(16), True),
    ]
    assert list(apply_slices(b"", b"")) == [(b"", b"", True)]


async def test_fleet_lists_workers_until_their_time_is_over(home: Home) -> None:
    fleet = home.fleet
    await fleet.put_worker(WorkerId("a"), b"\x00one", 10.0)
    await fleet.put_worker(WorkerId("b"), b"two", 1000.0)
    await fleet.put_worker(WorkerId("a"), b"\x00uno", 10.0)
    assert await fleet.list_workers() == {"a": b"\x00uno", "b": b"two"}
    await home.pass_time(10.0, "worker:a")
    assert await fleet.list_workers() == {"b": b"two"}
    await fleet.remove_worker(WorkerId("b"))
    await fleet.remove_worker(WorkerId("b"))
    assert await fleet.list_workers() == {}
    assert await home.is_empty()


async def test_groups_stay_until_they_are_forgotten(home: Home) -> None:
    fleet: FleetStore = home.fleet
    await fleet.put_group("", b"\x00any")
    await fleet.put_group("chat", b"one")
    await fleet.put_group("chat", b"two")
    await home.pass_time(1000.0)
    assert await fleet.list_groups() == {"": b"\x00any", "chat": b"two"}
    for _ in range(2):
        await fleet.remove_group("chat")
    await fleet.remove_group("")
    assert await fleet.list_groups() == {}
    assert await home.is_empty()


async def test_adapters_are_stored_as_one(home: Home) -> None:
    fleet: FleetStore = home.fleet
    assert await fleet.adapters() == b""
    for wishes in (b"\x00one", b"two"):
        await fleet.put_adapters(wishes)
        await home.pass_time(1000.0)
        assert await fleet.adapters() == wishes


async def test_lease_has_one_holder_at_a_time(home: Home) -> None:
    fleet: FleetStore = home.fleet
    assert await fleet.acquire_lease("planner", "x", 10.0)
    assert await fleet.acquire_lease("planner", "x", 10.0)
    assert not await fleet.acquire_lease("planner", "y", 10.0)
    assert await fleet.acquire_lease("other", "y", 10.0)
    await fleet.release_lease("planner", "y")
    assert not await fleet.acquire_lease("planner", "y", 10.0)
    await fleet.release_lease("planner", "x")
    assert await fleet.acquire_lease("planner", "y", 10.0)


async def test_lease_ends_by_itself(home: Home) -> None:
    fleet = home.fleet
    assert await fleet.acquire_lease("planner", "x", 10.0)
    await home.pass_time(10.0, "planner_lease:planner")
    assert await fleet.acquire_lease("planner", "y", 10.0)
