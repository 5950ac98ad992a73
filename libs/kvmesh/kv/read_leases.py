"""Leases to read cached blocks of this worker: the holder's side of a prefix fetch.

A lease keeps blocks where they are. It ends when the reader gives it back, or has not read for the
lease time. The blocks are released when the lease has ended and no read of it is under way:

    state   event                              next    effect
    ------  ---------------------------------  ------  ---------------------------------------
    (none)  open, within the limits            OPEN    generation 1
    (none)  open, too many leases or blocks    (none)  refused BUSY
    (none)  open, its reader has its share     (none)  refused BUSY
    OPEN    begin_read, current and in range   OPEN    read granted, lease renewed
    OPEN    end_read                           OPEN    lease renewed
    OPEN    close / expire, nobody reading     (none)  released
    OPEN    close, a read under way            ENDED   blocks stay
    OPEN    expire, a read under way           OPEN    until all renewals are used up, then ENDED
    ENDED   end_read, the last one             (none)  released
    ENDED   anything else                      ENDED   refused STALE

A read renews its lease as it begins and ends, and one read may take longer than the lease time on a
slow link. A lease with reads therefore lives on, but no longer than `MAX_RENEWALS` lease times.
No I/O and no clock: `now` is an argument, in seconds that never go back. One thread.
Why: docs/adr/0014-prefix-fetch.md. Tests: tests/unit/kv/test_read_leases.py.
"""

from __future__ import annotations

import hmac
from collections import OrderedDict
from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass, field
from typing import NamedTuple, TypeVar

from kvmesh.core.types import Refusal, RefusalReason
from kvmesh.kv.handoff_types import WriteClaim

MAX_RENEWALS = 12
"""Maximum life of a lease in lease times; a slower reader holds room that others need."""

_GENERATION = 1
_RETRY_MS = 100


T = TypeVar("T")


class Reader(NamedTuple):
    """A reader, as the limits on leases count it.

    Attributes:
        host: address of the reader, which it cannot choose anew each time. All readers of one host
            share the host's part.
        name: tells readers of one host apart; the reader chooses it.
    """

    host: str
    name: str


class OpenedLease(NamedTuple):
    """A new lease."""

    lease_id: int
    generation: int


class ReadTicket(NamedTuple):
    """Permission to read these blocks, in this order, until `end_read`.

    Attributes:
        is_planned: whether the read is planned ahead, so that no request waits for the blocks.
    """

    read_id: int
    blocks: tuple[int, ...]
    is_planned: bool


@dataclass(frozen=True, slots=True)
class ReadLeaseStatistics:
    """Counts now, and totals since the start.

    Attributes:
        num_ended: leases that ended while a read is still under way.
        num_blocks: blocks held by all leases; a block counts once per lease.
    """

    num_open: int
    num_ended: int
    num_blocks: int
    num_reads: int
    opened_total: int
    expired_total: int
    refused_total: int


@dataclass(slots=True, eq=False)
class _Lease:
    lease_id: int
    reader: Reader
    blocks: tuple[int, ...]
    capability: bytes = field(repr=False)
    deadline: float
    last_deadline: float
    is_planned: bool
    num_reads: int = 0
    is_open: bool = True

    def is_over(self, now: float) -> bool:
        """Returns whether the lease has expired; reads under way extend it to `last_deadline`."""
        return now >= (self.last_deadline if self.num_reads else self.deadline)


class ReadLeaseTable:
    """All leases that one worker has given in one incarnation.

    Args:
        incarnation: incarnation of this worker; messages that name another one are refused.
        lease_s: seconds without a read after which a lease ends.
        max_leases: maximum number of leases at once.
        max_blocks: maximum number of blocks held at once by all leases.
    """

    def __init__(
        self, incarnation: int, lease_s: float, *, max_leases: int, max_blocks: int
    ) -> None:
        assert lease_s > 0
        self.incarnation = incarnation
        self.lease_s = lease_s
        self._max_leases = max_leases
        self._max_blocks = max_blocks
        self._leases: dict[int, _Lease] = {}
        self._reads: dict[int, _Lease] = {}
        self._released: list[tuple[int, ...]] = []
        self._refused_at: OrderedDict[Reader, float] = OrderedDict()
        self._num_blocks = 0
        self._next_lease_id = self._next_read_id = 1
        self._expired_total = self._refused_total = 0

    def open(
        self,
        reader: Reader,
        blocks: Sequence[int],
        capability: bytes,
        now: float,
        *,
        is_planned: bool = False,
    ) -> OpenedLease | Refusal:
        """Leases blocks on which the caller holds references; `drain_released` returns them.

        A host with leases gets at most half of all leases and blocks, so that one greedy reader
        cannot keep others out. While other hosts were refused within the last lease time, hosts
        get equal parts. The readers of one host likewise share its part equally, so that many
        workers behind one address do not starve each other.

        Args:
            is_planned: whether the read is planned ahead, so that no request waits for it.

        Returns:
            The lease, or BUSY; then the references stay the caller's.
        """
        self._forget_refused(now)
        if (excess := self._excess(reader, len(blocks))) is not None:
            self._refused_at[reader] = now
            self._refused_at.move_to_end(reader)
            if len(self._refused_at) > self._max_leases:  # names may be invented
                self._refused_at.popitem(last=False)
            return self._refuse(RefusalReason.BUSY, excess)
        self._refused_at.pop(reader, None)
        lease = _Lease(
            self._next_lease_id,
            reader,
            tuple(blocks),
            capability,
            now + self.lease_s,
            now + MAX_RENEWALS * self.lease_s,
            is_planned,
        )
        self._next_lease_id += 1
        self._leases[lease.lease_id] = lease
        self._num_blocks += len(blocks)
        return OpenedLease(lease.lease_id, _GENERATION)

    def begin_read(
        self,
        claim: WriteClaim,
        runs: Sequence[tuple[int, int]],
        now: float,
    ) -> ReadTicket | Refusal:
        """Admits a read; the blocks stay until its `end_read`.

        Args:
            runs: (first index, count) among the blocks of the lease.

        Returns:
            The ticket, or STALE (another incarnation or generation, or the lease has ended) or
            INVALID (capability, or outside of the lease).
        """
        lease = self._named(claim, now)
        if isinstance(lease, Refusal):
            return lease
        if any(first < 0 or first + count > len(lease.blocks) for first, count in runs):
            text = f"a run ends behind the {len(lease.blocks)} leased blocks"
            return self._refuse(RefusalReason.INVALID, text)
        if sum(count for _, count in runs) > len(lease.blocks):
            # Thousands of runs may name the same blocks: this bounds the work a peer can request.
            text = f"more than the {len(lease.blocks)} leased blocks at once"
            return self._refuse(RefusalReason.INVALID, text)
        lease.deadline = min(now + self.lease_s, lease.last_deadline)
        lease.num_reads += 1
        read_id = self._next_read_id
        self._next_read_id += 1
        self._reads[read_id] = lease
        chosen = (block for first, n in runs for block in lease.blocks[first : first + n])
        return ReadTicket(read_id, tuple(chosen), lease.is_planned)

    def claimed(self, claim: WriteClaim, now: float) -> tuple[int, ...] | Refusal:
        """Returns all blocks of a lease for a peer that queries them; renews the lease.

        The caller takes references of its own while it uses the blocks.

        Returns:
            The blocks, or STALE or INVALID as `begin_read`.
        """
        lease = self._named(claim, now)
        if isinstance(lease, Refusal):
            return lease
        lease.deadline = min(now + self.lease_s, lease.last_deadline)
        return lease.blocks

    def end_read(self, read_id: int, now: float) -> None:
        """Ends a read and renews its lease; called once for each ticket."""
        lease = self._reads.pop(read_id)
        lease.num_reads -= 1
        lease.deadline = min(now + self.lease_s, lease.last_deadline)
        self._release_if_quiet(lease)

    def close(self, lease_id: int, incarnation: int, capability: bytes, now: float) -> bool:
        """Ends a lease for its reader; False if there is none or the capability is wrong."""
        lease = self._admit(lease_id, incarnation, capability, now)
        if isinstance(lease, Refusal):
            return False
        self._end(lease)
        return True

    def expire(self, now: float) -> int:
        """Ends the leases that have expired; returns how many."""
        over = [each for each in self._leases.values() if each.is_open and each.is_over(now)]
        for lease in over:
            self._end(lease)
        self._expired_total += len(over)
        return len(over)

    def drain_released(self) -> list[tuple[int, ...]]:
        """Returns the blocks, by lease, whose references are the caller's again."""
        released, self._released = self._released, []
        return released

    @property
    def num_left(self) -> int:
        """Blocks that could still be leased, if no reader had more than its share."""
        return self._max_blocks - self._num_blocks

    @property
    def is_idle(self) -> bool:
        """Whether no block is leased."""
        return not (self._leases or self._reads or self._released)

    def statistics(self) -> ReadLeaseStatistics:
        """Returns the current counts."""
        num_open = sum(lease.is_open for lease in self._leases.values())
        return ReadLeaseStatistics(
            num_open=num_open,
            num_ended=len(self._leases) - num_open,
            num_blocks=self._num_blocks,
            num_reads=len(self._reads),
            opened_total=self._next_lease_id - 1,
            expired_total=self._expired_total,
            refused_total=self._refused_total,
        )

    def check_integrity(self) -> None:
        """Raises AssertionError if the records contradict each other."""
        held = sum(len(lease.blocks) for lease in self._leases.values())
        assert held == self._num_blocks, "blocks are counted wrong"
        readers = sum(lease.num_reads for lease in self._leases.values())
        assert readers == len(self._reads), "a read has no lease"
        for lease in self._leases.values():
            assert lease.is_open or lease.num_reads, "ended without a reader, and still here"

    def _excess(self, reader: Reader, num_blocks: int) -> str | None:
        """Returns why a reader gets no further lease; None if it gets one."""
        if len(self._leases) >= self._max_leases:
            return f"{len(self._leases)} leases are open"
        if self._num_blocks + num_blocks > self._max_blocks:
            return f"{self._num_blocks} of at most {self._max_blocks} blocks are leased"
        holders = [lease.reader for lease in self._leases.values()]
        hosts, waiting_hosts = _hosts(holders), _hosts(self._refused_at)
        parts = max(2, _equal_parts(reader.host, hosts, waiting_hosts))
        theirs = [lease for lease in self._leases.values() if lease.reader.host == reader.host]
        if (excess := self._beyond(reader.host, theirs, num_blocks, parts)) is not None:
            return excess
        neighbours = {lease.reader for lease in theirs}
        waiting = {each for each in self._refused_at if each.host == reader.host}
        parts *= _equal_parts(reader, neighbours, waiting)
        own = [lease for lease in theirs if lease.reader == reader]
        return self._beyond(reader.name, own, num_blocks, parts)

    def _beyond(
        self, who: str, leases: Sequence[_Lease], num_blocks: int, parts: int
    ) -> str | None:
        """Returns why a lease would exceed 1/`parts` of all; None if it fits.

        The first lease may have any size.
        """
        if not leases:
            return None
        held = sum(len(lease.blocks) for lease in leases)
        if parts * (len(leases) + 1) > self._max_leases:
            return f"{who} has {len(leases)} of {self._max_leases} leases, 1/{parts} is the most"
        if parts * (held + num_blocks) > self._max_blocks:
            return f"{who} has {held} of {self._max_blocks} blocks, 1/{parts} is the most"
        return None

    def _forget_refused(self, now: float) -> None:
        """Forgets refusals older than a lease time; those readers have asked elsewhere by now."""
        while self._refused_at:
            reader, at = next(iter(self._refused_at.items()))
            if now < at + self.lease_s:
                return
            del self._refused_at[reader]

    def _named(self, claim: WriteClaim, now: float) -> _Lease | Refusal:
        lease = self._admit(claim.reservation_id, claim.incarnation, claim.capability, now)
        if not isinstance(lease, Refusal) and claim.generation != _GENERATION:
            return self._refuse(RefusalReason.STALE, f"generation {claim.generation}")
        return lease

    def _admit(
        self, lease_id: int, incarnation: int, capability: bytes, now: float
    ) -> _Lease | Refusal:
        if incarnation != self.incarnation:
            text = f"incarnation {incarnation}, this is {self.incarnation}"
            return self._refuse(RefusalReason.STALE, text)
        lease = self._leases.get(lease_id)
        if lease is None or not lease.is_open or lease.is_over(now):
            return self._refuse(RefusalReason.STALE, f"lease {lease_id} has ended")
        if not hmac.compare_digest(capability, lease.capability):
            return self._refuse(RefusalReason.INVALID, "wrong capability")
        return lease

    def _refuse(self, reason: RefusalReason, message: str) -> Refusal:
        self._refused_total += 1
        retry_after_ms = _RETRY_MS if reason is RefusalReason.BUSY else 0
        return Refusal(reason, message, retry_after_ms=retry_after_ms)

    def _end(self, lease: _Lease) -> None:
        lease.is_open = False
        self._release_if_quiet(lease)

    def _release_if_quiet(self, lease: _Lease) -> None:
        if not lease.is_open and not lease.num_reads:
            del self._leases[lease.lease_id]
            self._num_blocks -= len(lease.blocks)
            self._released.append(lease.blocks)


def _hosts(readers: Iterable[Reader]) -> set[str]:
    return {reader.host for reader in readers}


def _equal_parts(who: T, holding: Set[T], waiting: Set[T]) -> int:
    """Returns the number of equal parts that a whole is split into; 1 if no other reader waits."""
    return len(holding | waiting | {who}) if waiting - {who} else 1
