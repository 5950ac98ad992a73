"""The asker's side of queries: prompts go on behind a prefix that stays where it is.

The decode worker that a prompt is computed for often holds more of it than the prefill worker: the
last turn of a conversation ended there. Its reservation is the right to ask about the blocks that
it found cached. They need not move: decode goes on with them where they are. What a third worker
holds is left to `source_queries.py`.
Tests: tests/integration/test_prefix_queries.py.
"""

from __future__ import annotations

import enum

from kvmesh.core.errors import ConfigError
from kvmesh.engine.core import EngineCore
from kvmesh.engine.protocol import PartialAttention, RemotePrefix
from kvmesh.engine.remote import leave_remote
from kvmesh.engine.sequence import Sequence
from kvmesh.policy.link import LinkView
from kvmesh.policy.preemption import with_sample
from kvmesh.policy.query_cost import QueryDecision, QueryTask, choose_query
from kvmesh.runtime.prefill_attempt import PrefillAttempt
from kvmesh.runtime.query_metrics import QueryMetrics
from kvmesh.transfer.asker import Asker
from kvmesh.transfer.greeting import PeerKey
from kvmesh.transfer.holder import Holder
from kvmesh.transfer.meters import TransferStatistics
from kvmesh.transfer.remote_blocks import RemoteBlocks

_FULL_STEPS = 4


class QueryMode(enum.Enum):
    """Whether prefixes are asked for."""

    AUTO = "auto"
    """Where it is estimated to be the fastest way."""
    ALWAYS = "always"
    NEVER = "never"


def parse_query_mode(word: str) -> QueryMode:
    """A mode by its name.

    Raises:
        ConfigError: there is none of this name.
    """
    try:
        return QueryMode(word)
    except ValueError as error:
        raise ConfigError(f"fetch.query must be auto, always or never, got {word!r}") from error


class PrefixQueries:
    """Chooses which prompts ask for their prefix.

    Args:
        partial: of this worker's model, whose shape the holder's has.
        asker: closed by its owner.
    """

    def __init__(
        self,
        core: EngineCore,
        partial: PartialAttention,
        asker: Asker,
        mode: QueryMode,
        metrics: QueryMetrics,
    ) -> None:
        self._core = core
        self._num_heads = partial.num_heads
        self._asker = asker
        self._mode = mode
        self._metrics = metrics
        self._token_s = 0.0
        self._asked = 0
        metrics.watch(lambda: (asker.asked, asker.lost))

    @property
    def sent_bytes(self) -> int:
        """Of questions, since start."""
        return self._asker.sent_bytes

    def statistics(self) -> TransferStatistics:
        """What was asked and answered, by holder."""
        return self._asker.statistics()

    def observe_step(self, num_tokens: int, seconds: float) -> None:
        """Takes a step with prompts; for what a long prefix costs, nearly full ones count.

        Not those that waited for answers.
        """
        asked, self._asked = self._asked, self._asker.asked
        is_full = num_tokens * _FULL_STEPS >= self._core.max_step_tokens
        if is_full and asked == self._asked:
            self._token_s = with_sample(self._token_s, seconds / num_tokens)

    def consider(self, attempt: PrefillAttempt, link: LinkView | None) -> bool:
        """Leaves what the reserving worker has of a prompt with it, if that pays.

        Args:
            attempt: whose sequence was just admitted and has computed nothing.
            link: to that worker, for what it would cost to fetch instead, where it can be.

        Returns:
            Whether it asks there; then it needs no prefix from anywhere.
        """
        sequence, reservation = attempt.sequence, attempt.reservation
        assert sequence is not None, "admitted"
        size = self._core.block_size
        most = (len(sequence.tokens) - 1) // size  # the last token is computed here
        blocks = range(sequence.num_computed // size, min(reservation.num_cached_blocks, most))
        holder = Holder.of_reservation(reservation)
        if not blocks or sequence.scores_prompt or not self._asker.answers(holder.peer):
            return False
        fetch_s = None
        if attempt.source is not None and link is not None:
            fetch_s = link.estimate_s(len(blocks) * self._core.spec.layout.block_bytes)
        new_tokens = len(sequence.tokens) - blocks.stop * size
        if not self._decide(attempt, holder.peer, self._task(new_tokens, len(blocks)), fetch_s):
            return False
        # A reservation names the blocks by their places in the prompt.
        self.leave(sequence, holder, blocks, blocks)
        return True

    def pays_to_leave(
        self, attempt: PrefillAttempt, peer: PeerKey, blocks: range, fetch_s: float | None
    ) -> bool:
        """Whether a prompt that is decoded here should ask a third worker, to its last token.

        If so, `leave` or `pass_over` follows.

        Args:
            blocks: of the prompt, that this worker lacks and the peer holds.
            fetch_s: until they would be here; None: not known, and so taken to be soon enough.
        """
        sequence = attempt.sequence
        assert sequence is not None, "admitted"
        if not blocks or sequence.scores_prompt or not self._asker.answers(peer):
            return False
        if fetch_s is None and self._mode is QueryMode.AUTO:
            return False
        new_tokens = len(sequence.tokens) - blocks.stop * self._core.block_size
        most = sequence.spec.sampling.max_tokens - sequence.num_generated
        task = self._task(new_tokens, len(blocks), later_tokens=max(most - 1, 0))
        return self._decide(attempt, peer, task, fetch_s)

    def leave(self, sequence: Sequence, holder: Holder, blocks: range, claimed: range) -> None:
        """Lets a sequence that has computed nothing go on behind blocks that stay where they are.

        Args:
            claimed: the blocks' indexes in what the holder's claim names.
        """
        self._metrics.prefixes.labels("asked").inc()
        self._metrics.tokens.inc(len(blocks) * self._core.block_size)
        remote = RemotePrefix(blocks, RemoteBlocks(self._asker, holder, claimed))
        leave_remote(sequence, remote, self._core.pool)

    def pass_over(self) -> None:
        """Counts a prefix that another worker holds and that is not asked for."""
        self._metrics.prefixes.labels("left").inc()

    def _task(self, new_tokens: int, num_blocks: int, later_tokens: int = 0) -> QueryTask:
        layout = self._core.spec.layout
        return QueryTask(
            new_tokens=new_tokens,
            remote_tokens=num_blocks * layout.block_size,
            num_layers=layout.num_layers,
            num_heads=self._num_heads,
            head_dim=layout.head_dim,
            num_chunks=-(-new_tokens // self._core.max_step_tokens),
            later_tokens=later_tokens,
        )

    def _decide(
        self, attempt: PrefillAttempt, peer: PeerKey, task: QueryTask, fetch_s: float | None
    ) -> bool:
        decision = self._decision(peer, task, fetch_s)
        attempt.span.event("prefix_query", query=decision.query, reason=decision.reason)
        if not decision.query:
            self.pass_over()
        return decision.query

    def _decision(self, peer: PeerKey, task: QueryTask, fetch_s: float | None) -> QueryDecision:
        if self._mode is not QueryMode.AUTO:
            return QueryDecision(self._mode is QueryMode.ALWAYS, f"fetch.query={self._mode.value}")
        speed = self._asker.speed(peer)
        return choose_query(task, speed, compute_token_s=self._token_s, fetch_s=fetch_s)
