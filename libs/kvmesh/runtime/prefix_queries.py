"""The sending side of queries: prompts continue behind a prefix that stays at another worker.

The decode worker of a prompt often holds more of it than the prefill worker, because the
conversation's last turn ended there. Its reservation allows queries to the blocks that it found
cached. These blocks need not move: decode continues with them where they are. Prefixes at a third
worker are handled by `prefix_sources.py`.
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
from kvmesh.policy.prompt_time import PromptTime
from kvmesh.policy.query_cost import QueryDecision, QueryTask, choose_query
from kvmesh.runtime.prefill_attempt import PrefillAttempt
from kvmesh.runtime.query_metrics import QueryMetrics
from kvmesh.transfer.asker import Asker
from kvmesh.transfer.greeting import PeerKey
from kvmesh.transfer.holder import Holder
from kvmesh.transfer.meters import TransferStatistics
from kvmesh.transfer.remote_blocks import RemoteBlocks


class QueryMode(enum.Enum):
    """Whether queries are sent for prefixes."""

    AUTO = "auto"
    """If queries are estimated to be fastest."""
    ALWAYS = "always"
    NEVER = "never"


def parse_query_mode(word: str) -> QueryMode:
    """Parses a mode.

    Raises:
        ConfigError: there is no mode of this name.
    """
    try:
        return QueryMode(word)
    except ValueError as error:
        raise ConfigError(f"fetch.query must be auto, always or never, got {word!r}") from error


class PrefixQueries:
    """Chooses the prompts that query their prefix.

    Args:
        partial: the attention of this worker's model, whose shape the holder's model shares.
        asker: closed by its owner.
        prompt_time: to compute a prefix instead of querying it.
    """

    def __init__(
        self,
        core: EngineCore,
        partial: PartialAttention,
        asker: Asker,
        mode: QueryMode,
        prompt_time: PromptTime,
        metrics: QueryMetrics,
    ) -> None:
        self._core = core
        self._num_heads = partial.num_heads
        self._asker = asker
        self._mode = mode
        self._metrics = metrics
        self._prompt_time = prompt_time
        self._asked = 0
        metrics.watch(lambda: (asker.asked, asker.lost))

    @property
    def sent_bytes(self) -> int:
        """Bytes of queries sent since the start."""
        return self._asker.sent_bytes

    def statistics(self) -> TransferStatistics:
        """Statistics of queries and answers, by holder."""
        return self._asker.statistics()

    def has_asked(self) -> bool:
        """Returns whether the engine waited for answers since the last call."""
        asked, self._asked = self._asked, self._asker.asked
        return asked != self._asked

    def consider(self, attempt: PrefillAttempt, link: LinkView | None) -> bool:
        """Leaves the blocks of a prompt that the reserving worker holds there, if that pays.

        Args:
            attempt: its sequence was just admitted and has computed nothing.
            link: the link to that worker, to estimate a fetch instead, where one is possible.

        Returns:
            Whether it will query that worker; then it needs no prefix from anywhere else.
        """
        sequence, reservation = attempt.sequence, attempt.reservation
        assert sequence is not None, "admitted"
        size = self._core.block_size
        most = (len(sequence.tokens) - 1) // size  # the last token must be computed here
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
        # A reservation's indexes are the blocks' positions in the prompt.
        self.leave(sequence, holder, blocks, blocks)
        return True

    def pays_to_leave(
        self, attempt: PrefillAttempt, peer: PeerKey, blocks: range, fetch_s: float | None
    ) -> bool:
        """Whether a prompt that is decoded here should query a third worker until its last token.

        If so, call `leave` or `pass_over` next.

        Args:
            blocks: the prompt's blocks that this worker lacks and the peer holds.
            fetch_s: seconds to fetch them; None if unknown, and then taken to be fast enough.
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
        """Makes a sequence that has computed nothing continue behind blocks that stay elsewhere.

        Args:
            claimed: the blocks' indexes within the holder's claim.
        """
        self._metrics.prefixes.labels("asked").inc()
        self._metrics.tokens.inc(len(blocks) * self._core.block_size)
        remote = RemotePrefix(blocks, RemoteBlocks(self._asker, holder, claimed))
        leave_remote(sequence, remote, self._core.pool)

    def pass_over(self) -> None:
        """Counts a prefix that another worker holds and that is not queried."""
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
        compute_s = self._prompt_time.of(task.remote_tokens)
        return choose_query(task, speed, compute_s=compute_s, fetch_s=fetch_s)
