"""A sequence in the engine: tokens, blocks, and the progress of its KV.

Holds state only; `engine/core.py` moves it. Tests: tests/unit/engine/test_core.py.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field

from kvmesh.core.types import FinishReason, SequenceSpec, TokenLogprobs
from kvmesh.engine.protocol import RemotePrefix, StateChunk, TokenConstraint, UpstreamPart
from kvmesh.kv.hashing import HashChain
from kvmesh.kv.sequence_blocks import SequenceBlocks


class SequenceState(enum.Enum):
    """State in a sequence's life.

    HELD -> RUNNING -> (HELD | PREEMPTED -> RUNNING ...) -> GONE; any state may go to GONE.
    """

    HELD = "held"
    """Has blocks, computes nothing: reserved for a handoff, or waiting for its KV to be taken."""
    RUNNING = "running"
    PREEMPTED = "preempted"
    """Lost its blocks to another sequence; computed again when blocks are free."""
    GONE = "gone"


@dataclass(frozen=True, slots=True)
class Emission:
    """A token that a step chose.

    Attributes:
        position: position of the token in the sequence, prompt included.
        error: why generation ended without a token (finish_reason ERROR).
        damaged: the engine is at fault, so another worker can continue.
        prompt_logprobs: with the first token, if requested: of all prompt tokens but the first.
        embedding: with the first token, if requested: float32, little-endian.
    """

    token_id: int
    position: int
    logprobs: TokenLogprobs | None
    finish_reason: FinishReason | None
    error: str = ""
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    damaged: bool = False
    embedding: bytes = b""


def _no_emission(_: Emission) -> None:
    return


def _no_progress() -> None:
    return


@dataclass(eq=False, slots=True)
class Sequence:
    """One sequence on this worker.

    Attributes:
        tokens: prompt and generated tokens; the last one has no KV while decoding.
        kv: blocks of all groups; owned references.
        num_computed: number of leading positions whose KV is in the blocks.
        num_cached: number of leading positions found in the prefix cache at admission.
        chain: block hashes of `tokens`.
        hold_after_first: stop computing after the first token (prefill for another worker).
        constraint: limits the tokens that may be generated.
        scores_prompt: log-probabilities of the prompt's tokens are still to be computed or sent.
        prompt_logprobs: log-probabilities so far, from the prompt's second token on.
        remote: a part of the prefix whose KV another worker holds.
        is_part: all that is left of its prompt is one chunk, computed layer by layer in steps of
            its own.
        num_begun: 0 before the first of them, else one more than the stages from upstream that the
            next one needs.
        upstream: leading positions that another worker computes meanwhile.
        on_emission, on_progress: called on the event loop after a step.
        on_end: called on the event loop when it is GONE.
        on_layers: called in the engine's thread, during the step that gives the first token, with
            the number of layers whose KV is complete.
    """

    sequence_id: int
    spec: SequenceSpec
    tokens: list[int]
    kv: SequenceBlocks
    num_computed: int
    num_cached: int
    chain: HashChain
    hold_after_first: bool = False
    state: SequenceState = SequenceState.HELD
    constraint: TokenConstraint | None = None
    scores_prompt: bool = False
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    remote: RemotePrefix | None = None
    is_part: bool = False
    num_begun: int = 0
    upstream: UpstreamPart | None = None
    on_emission: Callable[[Emission], None] = field(default=_no_emission)
    on_progress: Callable[[], None] = field(default=_no_progress)
    on_end: Callable[[], object] = field(default=_no_progress)
    on_layers: Callable[[int], None] | None = None

    def append(self, token_id: int) -> None:
        """Adds a generated token, whose KV is not computed."""
        self.tokens.append(token_id)
        self.chain.append((token_id,))

    @property
    def blocks(self) -> list[int]:
        """Block table of the first group."""
        return self.kv.tables[0]

    @property
    def start(self) -> int:
        """The first position that a step computes next."""
        return self.num_computed if self.upstream is None else self.upstream.end

    @property
    def waits_for_layers(self) -> bool:
        """Whether a further step would find nothing to compute before more comes from upstream."""
        upstream, begun = self.upstream, self.num_begun
        return upstream is not None and begun > 1 and upstream.gate.passes(begun - 1) is None

    @property
    def num_remaining(self) -> int:
        """Number of tokens without KV."""
        return len(self.tokens) - self.num_computed

    @property
    def ends_after_next(self) -> bool:
        """Whether the next token is the last one in any case."""
        return self.num_generated + 1 >= self.spec.sampling.max_tokens

    @property
    def num_generated(self) -> int:
        """Number of tokens after the client's prompt, including those of other workers."""
        return len(self.tokens) - self.spec.num_prompt_tokens


def state_chunk(sequence: Sequence) -> StateChunk:
    """Returns the blocks of the states of a sequence's next chunk."""
    kv, upstream = sequence.kv, sequence.upstream
    source: SequenceOf[int] = kv.source or (kv.state if sequence.start else [])
    if upstream is not None:
        source = upstream.state
    return StateChunk(kv.state, source, [(saved.position, saved.blocks) for saved in kv.saves])
