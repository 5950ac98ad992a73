"""Room for prefixes that arrive: what a holder gives is what a reader needs, in every group."""

from __future__ import annotations

import pytest

from kvmesh.core.errors import OutOfBlocksError
from kvmesh.core.kv_groups import KvGroups
from kvmesh.kv.block_pool import BlockPool
from kvmesh.kv.hashing import chain_hashes, root_hash
from kvmesh.kv.prefix_room import PrefixRooms
from kvmesh.kv.sequence_blocks import GroupCache, SequenceBlocks

SIZE = 4
GROUPS = {
    "full": KvGroups(),
    "window": KvGroups((0, 9)),
    "window alone": KvGroups((6,)),
    "state": KvGroups((0,), 3),
    "all": KvGroups((0, 9), 2),
}
TOKENS = list(range(100))
HASHES = chain_hashes(root_hash("test"), TOKENS, SIZE)


class Side:
    """One worker's blocks."""

    def __init__(self, groups: KvGroups, num_blocks: int = 200) -> None:
        self.pool = BlockPool(num_blocks, SIZE)
        self.cache = GroupCache(self.pool, groups, SIZE)
        self.rooms = PrefixRooms(self.cache, self.pool, groups)

    def compute(self, length: int) -> None:
        """A sequence of so many blocks ran here."""
        kv = self.cache.resume([])
        for end in range(SIZE, length * SIZE + 1, SIZE):
            self.cache.grow(kv, end - SIZE, end)
            self.cache.plan_saves(kv, end - SIZE, end, 1000, HASHES)
            self.cache.finish_step(kv, end, HASHES)
        self.cache.release(kv, HASHES)

    def resume(self) -> SequenceBlocks:
        return self.cache.resume(HASHES)

    def check_idle(self) -> None:
        self.pool.check_integrity()
        assert self.pool.is_idle


@pytest.fixture(params=list(GROUPS.values()), ids=list(GROUPS))
def groups(request: pytest.FixtureRequest) -> KvGroups:
    found = request.param
    assert isinstance(found, KvGroups)
    return found


@pytest.mark.parametrize("held", [0, 1, 7])
def test_a_reader_can_go_on_where_the_holder_could(groups: KvGroups, held: int) -> None:
    holder, reader = Side(groups), Side(groups)
    holder.compute(20)
    reader.compute(held)
    kv = reader.resume()
    num_held = kv.num_sealed
    assert num_held == held

    length, leased = holder.rooms.leased(HASHES, num_held, len(HASHES))
    assert length == 20
    room = reader.rooms.open(kv, length)
    assert len(room.blocks) == len(leased)
    assert len(set(room.blocks)) == len(room.blocks)
    assert reader.rooms.close(room, HASHES, len(room.blocks)) == 20
    assert kv.num_sealed == 20
    reader.cache.check_integrity(kv, 20 * SIZE)
    reader.cache.release(kv)
    holder.pool.release(leased)

    again = reader.resume()
    assert again.num_sealed == 20
    reader.cache.release(again)
    reader.check_idle()
    holder.check_idle()


def test_what_did_not_arrive_is_undone(groups: KvGroups) -> None:
    reader = Side(groups)
    reader.compute(3)
    kv = reader.resume()
    before = [list(table) for table in kv.tables]
    room = reader.rooms.open(kv, 12)
    assert reader.rooms.close(room, HASHES, 0) == 3
    assert kv.tables == before
    reader.cache.check_integrity(kv, 3 * SIZE)
    reader.cache.release(kv)
    reader.check_idle()


def test_leading_blocks_count_when_the_rest_is_lost_where_a_block_is_whole() -> None:
    for name, groups in GROUPS.items():
        reader = Side(groups)
        kv = reader.resume()
        room = reader.rooms.open(kv, 12)
        now_here = reader.rooms.close(room, HASHES, min(5, len(room.blocks) - 1))
        assert now_here == (5 if name == "full" else 0)
        assert kv.num_sealed == now_here
        reader.cache.release(kv)
        reader.check_idle()


def test_too_few_blocks_change_nothing(groups: KvGroups) -> None:
    reader = Side(groups, num_blocks=8 if 0 in groups.windows else 1)
    kv = reader.resume()
    with pytest.raises(OutOfBlocksError):
        reader.rooms.open(kv, 20)
    assert kv.is_empty
    reader.check_idle()


def test_who_has_as_much_is_given_nothing(groups: KvGroups) -> None:
    holder = Side(groups)
    holder.compute(5)
    for held in (5, 9):
        length, blocks = holder.rooms.leased(HASHES, held, len(HASHES))
        assert length <= held
        assert blocks == []
    holder.check_idle()


def test_a_prefix_is_leased_in_pieces_where_each_block_is_whole(groups: KvGroups) -> None:
    holder = Side(groups)
    holder.compute(20)
    is_whole = groups == KvGroups()
    assert holder.rooms.next_piece(HASHES, 4) == (HASHES[4:20] if is_whole else HASHES)
    length, blocks = holder.rooms.leased(HASHES, 4, 6)
    assert length == (10 if is_whole else 20)
    holder.pool.release(blocks)
    holder.check_idle()


def test_a_piece_is_what_fits_beside_requests() -> None:
    holder = Side(KvGroups())
    holder.compute(20)
    taken = holder.pool.allocate(holder.pool.num_free - 6)
    # Those 6 are the beginning, since the ends of prefixes are evicted first.
    assert holder.rooms.next_piece(HASHES, 0) == HASHES[:6]
    assert holder.rooms.next_piece(HASHES, 2) == HASHES[2:6]
    kept = holder.pool.match(HASHES)
    holder.pool.acquire(kept)
    assert holder.rooms.next_piece(HASHES, 0) == HASHES[:1]
    holder.pool.release(kept)
    holder.pool.release(taken)
    holder.check_idle()


@pytest.mark.parametrize("held", [0, 7])
def test_what_others_brought_takes_the_place_of_fresh_blocks(groups: KvGroups, held: int) -> None:
    reader = Side(groups)
    reader.compute(held)
    kv = reader.resume()
    reader.cache.reserve(kv, len(TOKENS), SIZE)  # as a reservation of its own
    taken = [len(table) for table in kv.tables]
    assert reader.rooms.adopt(kv, HASHES) == held, "nothing came"
    reader.compute(20)
    assert reader.rooms.adopt(kv, HASHES) == kv.num_sealed == 20
    assert [len(table) for table in kv.tables] == taken
    reader.cache.check_integrity(kv, 20 * SIZE)
    again = reader.resume()
    assert [table[-1] for table in again.tables] == [table[19] for table in kv.tables]
    for each in (kv, again):
        reader.cache.release(each)
    reader.check_idle()


def test_what_was_computed_while_it_arrived_is_kept_once(groups: KvGroups) -> None:
    reader = Side(groups)
    kv = reader.resume()
    room = reader.rooms.open(kv, 20)
    reader.compute(20)
    assert reader.rooms.close(room, HASHES, len(room.blocks)) == 20
    reader.cache.check_integrity(kv, 20 * SIZE)
    again = reader.resume()
    assert [table[-1] for table in again.tables] == [table[-1] for table in kv.tables]
    for each in (kv, again):
        reader.cache.release(each)
    reader.check_idle()
