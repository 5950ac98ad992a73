"""A request in the simulator: its trace, its state and its outcome.

Tests: tests/unit/sim/test_simulation.py.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from kvmesh.core.types import BlockHash, RefusalReason, RequestId, WorkerId
from kvmesh.sim.trace_request import TRACE_BLOCK, TraceRequest


class Outcome(enum.Enum):
    """Outcome of a request."""

    DONE = "done"
    REFUSED = "refused"
    LATE = "late"
    """The first token came after the TTFT limit."""


_MARK = b"\xa5\x5a\x3c"
"""Ends the names of a trace's blocks, so that none is another one with its bytes moved round, as
`core/block_names.py` makes further names."""


def block_hash(hash_id: int) -> BlockHash:
    """Returns the hash that stands for a trace's block."""
    return BlockHash(hash_id.to_bytes(13, "little") + _MARK)


@dataclass(eq=False, slots=True)
class SimRequest:
    """One request from arrival to its last token.

    Attributes:
        hashes: hashes of the prompt's full blocks.
        deadline_s: time by which the first token must come.
        generated: number of tokens that the client has.
        cached_tokens: prompt tokens that the first prefill did not compute.
        remote: whether it is prefilled in the offload cluster.
        attempt: number of moves after failures.
        has_first: whether the first token of this attempt was sampled.
    """

    request_id: RequestId
    trace: TraceRequest
    hashes: tuple[BlockHash, ...]
    arrival_s: float
    deadline_s: float
    generated: int = 0
    cached_tokens: int = 0
    prefill_on: WorkerId | None = None
    decode_on: WorkerId | None = None
    remote: bool = False
    placed_s: float | None = None
    first_token_s: float | None = None
    finished_s: float | None = None
    outcome: Outcome | None = None
    refusal: RefusalReason | None = None
    attempt: int = 0
    has_first: bool = False
    num_offers: int = 0

    @classmethod
    def from_trace(
        cls, index: int, trace: TraceRequest, arrival_s: float, ttft_limit_s: float
    ) -> SimRequest:
        """Returns a request of the trace that arrives now."""
        return cls(
            request_id=RequestId(f"r{index}"),
            trace=trace,
            hashes=tuple(block_hash(each) for each in trace.full_ids),
            arrival_s=arrival_s,
            deadline_s=arrival_s + ttft_limit_s,
        )

    @property
    def num_tokens(self) -> int:
        """Tokens to prefill: the prompt and the tokens generated before a failure."""
        return self.trace.input_tokens + self.generated

    @property
    def remaining_tokens(self) -> int:
        """Tokens still to generate."""
        return self.trace.output_tokens - self.generated

    @property
    def reusable_hashes(self) -> tuple[BlockHash, ...]:
        """Hashes of the blocks that a cache may serve; the last token is always computed."""
        return self.hashes[: (self.num_tokens - 1) // TRACE_BLOCK]

    @property
    def ttft_s(self) -> float | None:
        """Time to first token in seconds; None before it."""
        return None if self.first_token_s is None else self.first_token_s - self.arrival_s

    @property
    def tpot_s(self) -> float | None:
        """Mean seconds per token after the first; None without such tokens."""
        if self.finished_s is None or self.first_token_s is None or self.trace.output_tokens < 2:
            return None
        return (self.finished_s - self.first_token_s) / (self.trace.output_tokens - 1)


@dataclass(eq=False, slots=True)
class SimSequence:
    """A request's tokens and blocks on one worker.

    Attributes:
        order: arrival number on this worker; smaller is older.
        left: number of tokens still to generate.
        num_tokens: tokens of the sequence, including generated ones.
        num_computed: number of leading tokens whose KV is here.
        num_cached: number of these that were found in the prefix cache.
        num_sealed: number of leading blocks that are in the prefix cache.
        hold_after_first: whether the worker only prefills and another one takes the KV.
        has_first: whether the prompt is computed and its first token was sampled.
        reservation: id in the handoff table, while KV is awaited.
        gone: whether it was released, or lost with its worker.
        settled_at: while it decodes, its worker's step up to which these numbers are current.
        due_at: while it decodes, the step at which it ends or needs a block.
        decodes_from: its worker's step before its first decode step.
    """

    request: SimRequest
    order: int
    left: int
    num_tokens: int
    blocks: list[int] = field(default_factory=list)
    num_computed: int = 0
    num_cached: int = 0
    num_sealed: int = 0
    hold_after_first: bool = False
    has_first: bool = False
    reservation: int | None = None
    gone: bool = False
    settled_at: int | None = None
    due_at: int | None = None
    decodes_from: int | None = None

    @property
    def remaining(self) -> int:
        """Number of tokens without KV; 1 is a decode step."""
        return self.num_tokens - self.num_computed

    def fill(self, blocks: list[int], num_cached: int) -> None:
        """Sets the blocks, the first `num_cached` of them with KV."""
        self.blocks = blocks
        self.num_cached = self.num_computed = num_cached * TRACE_BLOCK
        self.num_sealed = num_cached


def blocks_for(num_tokens: int) -> int:
    """Returns the number of blocks that hold this many tokens."""
    return -(-num_tokens // TRACE_BLOCK)
