"""The decode side of a handoff as a state table: the writers of reserved blocks, and their rights.

A block has two lifetimes: the request's, and that of its current writer. They end independently,
and blocks go back to the pool only when both have ended.

    state      event                                   next        effect
    ---------  --------------------------------------  ----------  ------------------------------
    (none)     reserve                                 RESERVED    lease starts
    RESERVED   begin_write, current and free range     RESERVED    write granted, lease renewed
    RESERVED   begin_write, range is being written     RESERVED    refused BUSY
    RESERVED   end_write ok                            RESERVED    blocks count as written
    RESERVED   end_write not ok                        RESERVED    blocks stay unwritten
    RESERVED   commit, all written, nobody writing     COMMITTED   lease renewed
    RESERVED   commit, else                            RESERVED    awaited, lease renewed
    RESERVED   end_write ok of the last one, awaited   COMMITTED   lease renewed
    COMMITTED  commit                                  COMMITTED   the same answer
    COMMITTED  begin_write                             COMMITTED   nothing is left to write
    COMMITTED  take                                    (none)      TAKEN, caller owns the blocks
    (none)     the same, taken less than a lease ago   (none)      the same answers
    RES., COM. renew                                   same        lease renewed
    RES., COM. cancel / expire, nobody writing         (none)      CANCELLED / EXPIRED, released
    RESERVED   cancel / expire, a write in flight      FENCED      CANCELLED / EXPIRED, blocks held
    FENCED     end_write, not the last one             FENCED
    FENCED     end_write, the last one                 (none)      released
    FENCED     anything else                           FENCED      refused STALE

RESERVED with a write in flight is what the design calls WRITING; it is derived, not stored. Any
message with another incarnation or generation, or after the lease, is refused STALE; one with a
wrong capability INVALID. The generation is the attempt that reserved. The writer of a later attempt
gets a reservation of its own, with a secret that no earlier writer has. A grant is exclusive: while
one writer is in a block's memory, fenced or not, no other writer is admitted, so a late writer can
never tear a newer write. Writers of different parts of a block may be in it at once; the block
counts as written when its parts cover it. A commit that comes before the last block is awaited, so
decode starts when that block is there, not a round trip later. A piece that is sent again, because
its connection was lost before the answer, may then find the handoff complete.

No I/O and no clock: `now` is an argument, in seconds that never go back. One thread.
Why: docs/adr/0004-handoff.md. Tests: tests/unit/kv/test_handoff.py,
tests/property/test_handoff_machine.py.
"""

from __future__ import annotations

import hmac
from collections.abc import Sequence

from kvmesh.core.types import Refusal, RefusalReason, RequestId
from kvmesh.kv.block_parts import Part
from kvmesh.kv.handoff_types import (
    AllWritten,
    Awaited,
    BlockGrant,
    Committed,
    Entry,
    HandoffStatistics,
    Outcome,
    Released,
    Span,
    State,
    Taken,
    Write,
    WriteClaim,
)


def _stale(message: str) -> Refusal:
    return Refusal(RefusalReason.STALE, message)


def _span_of(indexes: Sequence[int], num_blocks: int) -> Span | None:
    """Converts indexes to a span; None if an index is outside or repeated, or there is none."""
    if isinstance(indexes, range):
        is_inside = 0 <= indexes.start < indexes.stop <= num_blocks and indexes.step == 1
        return indexes if is_inside else None
    span = frozenset(indexes)
    is_inside = bool(span) and min(span) >= 0 and max(span) < num_blocks
    return span if is_inside and len(span) == len(indexes) else None


def _told(indexes: Sequence[int]) -> str:
    if isinstance(indexes, range):
        return f"blocks {indexes.start}+{indexes.stop - indexes.start}"
    return f"{len(indexes)} blocks from {min(indexes, default=0)} to {max(indexes, default=0)}"


def _committed(entry: Entry) -> Committed:
    return Committed(entry.reservation_id, entry.request_id, entry.generation, len(entry.blocks))


class HandoffTable:
    """All reservations of one decode worker in one life of it.

    Args:
        incarnation: incarnation of this worker; messages that name another one are refused.
        lease_s: a reservation without progress or renewal ends after this many seconds.
        block_bytes: bytes of a block; needed only where writers write parts of blocks.
    """

    def __init__(self, incarnation: int, lease_s: float, block_bytes: int = 0) -> None:
        assert lease_s > 0, f"lease of {lease_s} s"
        self.incarnation = incarnation
        self.lease_s = lease_s
        self._block_bytes = block_bytes
        self._entries: dict[int, Entry] = {}
        self._writes: dict[int, Write] = {}
        self._released: list[Released] = []
        # Commits whose blocks were taken, for senders that lost the acknowledgement.
        self._taken: dict[int, Entry] = {}
        self._outcomes = dict.fromkeys(Outcome, 0)
        self._next_reservation_id = 1
        self._next_write_id = 1
        self._refused_total = 0

    # -- The decode worker's side: one owner per reservation -----------------------------------

    def reserve(
        self,
        request_id: RequestId,
        blocks: Sequence[int],
        num_cached: int,
        capability: bytes,
        generation: int,
        now: float,
    ) -> int:
        """Opens blocks of a sequence to one prefill.

        Args:
            blocks: all blocks of the prompt, in order. The caller holds a pool reference on each,
                which the table gives back through `take` or `drain_released`.
            num_cached: number of leading blocks that are filled and shared; never written.
            capability: secret that admits writers.
            generation: number of the request's attempt.

        Returns:
            The id of the reservation.
        """
        assert 0 <= num_cached <= len(blocks), f"{num_cached} cached of {len(blocks)} blocks"
        assert len(set(blocks)) == len(blocks), "a block occurs twice"
        assert capability, "empty capability"
        reservation_id = self._next_reservation_id
        self._next_reservation_id += 1
        self._entries[reservation_id] = Entry(
            reservation_id=reservation_id,
            request_id=request_id,
            blocks=tuple(blocks),
            num_cached=num_cached,
            capability=capability,
            generation=generation,
            deadline=now + self.lease_s,
        )
        return reservation_id

    def renew(self, reservation_id: int, now: float) -> bool:
        """Restarts the lease; False if the reservation has ended."""
        entry = self._live(reservation_id, now)
        if entry is None:
            return False
        entry.deadline = now + self.lease_s
        return True

    def take(self, reservation_id: int) -> Taken | Refusal:
        """Ends a complete handoff: decode starts and owns the blocks from here on.

        Succeeds exactly once per commit. STALE if it was not committed or has ended.
        """
        entry = self._entries.get(reservation_id)
        if entry is None or entry.state is not State.COMMITTED:
            return self._refuse(_stale(f"reservation {reservation_id} is not complete"))
        assert not entry.writes, f"reservation {reservation_id} was committed under a writer"
        del self._entries[reservation_id]
        entry.outcome = Outcome.TAKEN
        self._taken[reservation_id] = entry
        self._outcomes[Outcome.TAKEN] += 1
        return Taken(entry.request_id, entry.blocks, entry.num_cached)

    def forget(self, reservation_id: int) -> None:
        """Drops a taken commit before its lease ends: its sender has the acknowledgement."""
        self._taken.pop(reservation_id, None)

    def cancel(self, reservation_id: int) -> bool:
        """Ends a reservation in any state; False if it has ended before."""
        entry = self._entries.get(reservation_id)
        if entry is None or entry.state is State.FENCED:
            return False
        self._end(entry, Outcome.CANCELLED)
        return True

    def expire(self, now: float) -> list[RequestId]:
        """Ends reservations whose lease has expired and forgets old commits.

        Returns:
            The requests whose reservations this call ended.
        """
        for old in [entry for entry in self._taken.values() if entry.deadline <= now]:
            del self._taken[old.reservation_id]
        ended = [
            entry
            for entry in self._entries.values()
            if entry.state is not State.FENCED and not entry.is_live(now)
        ]
        for entry in ended:
            self._end(entry, Outcome.EXPIRED)
        return [entry.request_id for entry in ended]

    def is_open(self, reservation_id: int) -> bool:
        """Whether the reservation has neither ended nor been taken."""
        entry = self._entries.get(reservation_id)
        return entry is not None and entry.state is not State.FENCED

    def drain_released(self) -> list[Released]:
        """Returns reservations that ended unused and have no writers left, each exactly once.

        The caller gives their blocks back to the pool.
        """
        released, self._released = self._released, []
        return released

    # -- The data channel's side: untrusted until checked ---------------------------------------

    def begin_write(
        self,
        claim: WriteClaim,
        indexes: Sequence[int],
        now: float,
        part: Part | None = None,
    ) -> BlockGrant | AllWritten | Refusal:
        """Requests leave to write blocks, in this order; `end_write` must follow every grant.

        Args:
            indexes: at least one distinct index among the blocks to write; 0 is the first block
                after the cached ones. A range for consecutive blocks.
            part: the bytes to write, the same in each block; None for whole blocks.

        Returns:
            The grant; or `AllWritten` if the handoff is complete; or STALE, INVALID (capability or
            range), or BUSY while an earlier writer is still in one of these blocks.
        """
        entry = self._admit(claim, now)
        if isinstance(entry, Refusal):
            return self._refuse(entry)
        if entry.state is not State.RESERVED:
            return AllWritten(entry.reservation_id)
        span = _span_of(indexes, entry.num_to_write)
        if span is None:
            message = f"{_told(indexes)} of {entry.num_to_write}"
            return self._refuse(Refusal(RefusalReason.INVALID, message))
        if part is not None and not (
            part.size > 0 <= part.offset and part.end <= self._block_bytes
        ):
            message = f"{part} of blocks of {self._block_bytes} bytes"
            return self._refuse(Refusal(RefusalReason.INVALID, message))
        if any(self._writes[write_id].overlaps(span, part) for write_id in entry.writes):
            message = f"another writer is in {_told(indexes)}"
            return self._refuse(Refusal(RefusalReason.BUSY, message))
        write_id = self._next_write_id
        self._next_write_id += 1
        self._writes[write_id] = Write(entry, span, part)
        entry.writes.add(write_id)
        self._begin(entry, span, part)
        entry.deadline = now + self.lease_s
        if isinstance(span, range):
            start = entry.num_cached
            return BlockGrant(write_id, entry.blocks[start + span.start : start + span.stop])
        blocks = entry.blocks[entry.num_cached :]
        return BlockGrant(write_id, tuple([blocks[index] for index in indexes]))

    def end_write(self, write_id: int, ok: bool, now: float) -> Committed | None:
        """The writer has left the memory for good; `ok` if it wrote all of it.

        Returns:
            The commit, if it was awaited and this was the last block.
        """
        write = self._writes.pop(write_id)
        entry = write.entry
        entry.writes.remove(write_id)
        if entry.state is State.FENCED:
            self._release_if_quiet(entry)
        elif ok:
            self._count(entry, write)
            if entry.is_awaited and entry.is_live(now):
                return self._commit_if_whole(entry, now)
        return None

    def check_claim(self, claim: WriteClaim, now: float) -> Refusal | None:
        """Checks that a message may act on a reservation; None if it may."""
        entry = self._admit(claim, now)
        return self._refuse(entry) if isinstance(entry, Refusal) else None

    def commit(self, claim: WriteClaim, now: float) -> Committed | Awaited | Refusal:
        """Declares that all blocks are written, or will be. A repeated call gives the same answer.

        The caller starts decode through `take`, which succeeds once however often this is called.

        Returns:
            The commit if all blocks are written, else `Awaited`: the `end_write` of the last one
            returns the commit. Or STALE, or INVALID (capability).
        """
        entry = self._admit(claim, now)
        if isinstance(entry, Refusal):
            return self._refuse(entry)
        if entry.state is State.RESERVED:
            entry.is_awaited = True
            entry.deadline = now + self.lease_s
            return self._commit_if_whole(entry, now) or Awaited(entry.reservation_id)
        return _committed(entry)

    # -- Inside ---------------------------------------------------------------------------------

    def _commit_if_whole(self, entry: Entry, now: float) -> Committed | None:
        if entry.writes or len(entry.written) < entry.num_to_write:
            return None
        entry.state = State.COMMITTED
        entry.deadline = now + self.lease_s
        return _committed(entry)

    def _begin(self, entry: Entry, span: Span, part: Part | None) -> None:
        """Marks bytes that are about to be overwritten as unwritten."""
        if part is None:
            entry.partial.forget(span)
        else:
            for index in span:
                was_whole = index in entry.written
                size = self._block_bytes
                entry.partial.begin(index, part, was_whole=was_whole, block_bytes=size)
        entry.written.difference_update(span)

    def _count(self, entry: Entry, write: Write) -> None:
        """Marks the bytes of a successful write as written."""
        if write.part is None:
            entry.written.update(write.span)
            return
        for index in write.span:
            if entry.partial.add(index, write.part, self._block_bytes):
                entry.written.add(index)

    def _admit(self, claim: WriteClaim, now: float) -> Entry | Refusal:
        """Returns the reservation that a data-channel message may act on, or a taken one."""
        if claim.incarnation != self.incarnation:
            return _stale(f"incarnation {claim.incarnation}, this is {self.incarnation}")
        number = claim.reservation_id
        entry = self._live(number, now) or self._taken.get(number)
        if entry is None or entry.deadline <= now:
            return _stale(f"reservation {number} has ended")
        if not hmac.compare_digest(claim.capability, entry.capability):
            return Refusal(RefusalReason.INVALID, "wrong capability")
        if claim.generation != entry.generation:
            return _stale(f"generation {claim.generation}, not {entry.generation}")
        return entry

    def _live(self, reservation_id: int, now: float) -> Entry | None:
        entry = self._entries.get(reservation_id)
        return entry if entry is not None and entry.is_live(now) else None

    def _refuse(self, refusal: Refusal) -> Refusal:
        self._refused_total += 1
        return refusal

    def _end(self, entry: Entry, outcome: Outcome) -> None:
        assert entry.outcome is None, f"reservation {entry.reservation_id} ended twice"
        entry.outcome = outcome
        entry.state = State.FENCED
        self._outcomes[outcome] += 1
        self._release_if_quiet(entry)

    def _release_if_quiet(self, entry: Entry) -> None:
        if entry.writes:
            return
        assert entry.outcome is not None, f"reservation {entry.reservation_id} is in use"
        del self._entries[entry.reservation_id]
        released = Released(entry.reservation_id, entry.request_id, entry.blocks, entry.outcome)
        self._released.append(released)

    # -- Audit ----------------------------------------------------------------------------------

    @property
    def is_idle(self) -> bool:
        """Whether the table holds no block: nothing reserved, written or left to drain."""
        return not (self._entries or self._writes or self._released)

    def statistics(self) -> HandoffStatistics:
        """Returns the current counts."""
        states = [entry.state for entry in self._entries.values()]
        return HandoffStatistics(
            num_reserved=states.count(State.RESERVED),
            num_committed=states.count(State.COMMITTED),
            num_fenced=states.count(State.FENCED),
            num_writes=len(self._writes),
            reserved_total=self._next_reservation_id - 1,
            taken_total=self._outcomes[Outcome.TAKEN],
            cancelled_total=self._outcomes[Outcome.CANCELLED],
            expired_total=self._outcomes[Outcome.EXPIRED],
            refused_total=self._refused_total,
        )

    def check_integrity(self) -> None:
        """Raises AssertionError if the records contradict each other."""
        ended = sum(self._outcomes.values())
        fenced = sum(entry.state is State.FENCED for entry in self._entries.values())
        assert self._next_reservation_id - 1 == ended + len(self._entries) - fenced
        writers = {write_id for entry in self._entries.values() for write_id in entry.writes}
        assert writers == set(self._writes), "a write has no reservation"
        to_write: list[int] = []
        for entry in self._entries.values():
            entry.check_integrity(self._writes)
            to_write += entry.blocks[entry.num_cached :]
        assert len(set(to_write)) == len(to_write), "two reservations may write one block"
