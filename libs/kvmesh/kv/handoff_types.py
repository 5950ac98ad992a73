"""Values and records of the handoff table (`handoff.py`, where the transitions are).

Tests: tests/unit/kv/test_handoff.py.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from kvmesh.core.types import RequestId
from kvmesh.kv.block_parts import Part, PartialBlocks


class Outcome(enum.Enum):
    """Outcome of a reservation; each one ends exactly once."""

    TAKEN = "taken"
    CANCELLED = "cancelled"
    EXPIRED = "expired"


class State(enum.Enum):
    """Stored state of a reservation that is in the table."""

    RESERVED = "reserved"
    COMMITTED = "committed"
    FENCED = "fenced"


@dataclass(frozen=True, slots=True)
class WriteClaim:
    """The right of a message to write: a reservation, its attempt, and its secret.

    Reads carry claims as well; then the claim names the holder's lease on blocks of the pool.
    """

    reservation_id: int
    incarnation: int
    generation: int
    capability: bytes = field(repr=False)


Span = range | frozenset[int]
"""Indexes of blocks: one consecutive run as a range, or any set."""


class BlockGrant(NamedTuple):
    """Permission to write these blocks, in this order, until `end_write`."""

    write_id: int
    blocks: tuple[int, ...]


class AllWritten(NamedTuple):
    """Nothing is left to write: the handoff is complete."""

    reservation_id: int


class Committed(NamedTuple):
    """A complete handoff; `num_blocks` counts cached and written ones."""

    reservation_id: int
    request_id: RequestId
    generation: int
    num_blocks: int


class Awaited(NamedTuple):
    """A commit that counts when the last block is written."""

    reservation_id: int


class Taken(NamedTuple):
    """Blocks of a complete prompt, cached ones first; the caller owns them now."""

    request_id: RequestId
    blocks: tuple[int, ...]
    num_cached: int


class Released(NamedTuple):
    """Blocks of a reservation that ended unused, cached ones first; no writer is left in them."""

    reservation_id: int
    request_id: RequestId
    blocks: tuple[int, ...]
    outcome: Outcome


@dataclass(frozen=True, slots=True)
class HandoffStatistics:
    """Counts now, and totals since the start.

    Attributes:
        num_fenced: reservations that ended while a writer is still in their memory.
        num_writes: grants that have not ended.
        refused_total: messages that were refused.
    """

    num_reserved: int
    num_committed: int
    num_fenced: int
    num_writes: int
    reserved_total: int
    taken_total: int
    cancelled_total: int
    expired_total: int
    refused_total: int


@dataclass(slots=True)
class Entry:
    """Record of one reservation.

    Attributes:
        deadline: end of the lease, in seconds on the caller's clock.
        partial: blocks to write of which only some bytes are written.
        generation: number of the attempt that reserved.
        written: indices among the blocks to write that are complete.
        writes: ids of grants in flight.
        is_awaited: the sender has committed, and blocks were missing.
        outcome: set when the reservation ended; its writers may still be in the blocks.
    """

    reservation_id: int
    request_id: RequestId
    blocks: tuple[int, ...]
    num_cached: int
    capability: bytes = field(repr=False)
    generation: int
    deadline: float
    state: State = State.RESERVED
    written: set[int] = field(default_factory=set)
    partial: PartialBlocks = field(default_factory=PartialBlocks)
    writes: set[int] = field(default_factory=set)
    is_awaited: bool = False
    outcome: Outcome | None = None

    @property
    def num_to_write(self) -> int:
        """Number of blocks that a prefill has to send."""
        return len(self.blocks) - self.num_cached

    def is_live(self, now: float) -> bool:
        """Returns whether the reservation has not ended and its lease is valid."""
        return self.state is not State.FENCED and now < self.deadline

    def check_integrity(self, writes: Mapping[int, Write]) -> None:
        """Raises AssertionError if this record contradicts itself or its writes."""
        complete = len(self.written) == self.num_to_write
        here = [writes[write_id] for write_id in self.writes]
        covered = [index for write in here for index in write.span]
        for at, write in enumerate(here):
            others = here[at + 1 :]
            assert not any(write.overlaps(o.span, o.part) for o in others), "writers in one place"
        assert self.written.isdisjoint(covered), "a block is written and being written"
        assert all(0 <= index < self.num_to_write for index in [*self.written, *covered])
        if self.state is State.COMMITTED:
            assert complete, "committed with blocks missing"
            assert not self.writes, "committed under a writer"
        assert (self.state is State.FENCED) == (self.outcome is not None)
        assert self.state is not State.FENCED or self.writes, "fenced without a writer"


@dataclass(frozen=True, slots=True)
class Write:
    """Record of one grant: `span` indexes the entry's blocks to write, `part` applies to each."""

    entry: Entry = field(repr=False)
    span: Span
    part: Part | None = None

    def overlaps(self, span: Span, part: Part | None) -> bool:
        """Returns whether both cover a common byte; None as part is the whole block."""
        if part is not None and self.part is not None and not self.part.overlaps(part):
            return False
        mine = self.span
        if isinstance(mine, range) and isinstance(span, range):
            return mine.start < span.stop and span.start < mine.stop
        return not frozenset(mine).isdisjoint(span)
