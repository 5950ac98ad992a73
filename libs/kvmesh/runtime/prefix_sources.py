"""Decides whether a prefix at the source that a route names is fetched, or stays there for queries.

A fetch costs the prefix's bytes. Queries cost a round trip per layer, for each chunk and each
generated token. So a long prefix with a short answer is queried, under a lease that lasts as long
as the sequence. The holder may die or end the lease at any time: then the sequence computes its
prefix, with the same tokens. Only a prompt that is decoded here may leave its prefix elsewhere: one
that is handed over has to be whole. Why: docs/adr/0013-queries.md.
Tests: tests/integration/test_prefix_sources.py.
"""

from __future__ import annotations

from functools import partial

from kvmesh.core.errors import LostError, RefusedError
from kvmesh.core.types import PrefixSource
from kvmesh.engine.core import EngineCore
from kvmesh.engine.sequence import Sequence, SequenceState
from kvmesh.runtime.borrowed_leases import lease_of
from kvmesh.runtime.prefill_attempt import PrefillAttempt
from kvmesh.runtime.prefix_fetch import PrefixFetcher
from kvmesh.runtime.prefix_queries import PrefixQueries
from kvmesh.telemetry.logs import event_logger
from kvmesh.transfer.greeting import PeerKey
from kvmesh.transfer.holder import Holder

log = event_logger(__name__)


class PrefixSources:
    """Fetches prefixes from workers that routes name, or leaves them there for queries.

    Args:
        queries: None sends no queries.
    """

    def __init__(
        self, core: EngineCore, fetcher: PrefixFetcher, queries: PrefixQueries | None
    ) -> None:
        self._core = core
        self._fetcher = fetcher
        self._queries = queries

    async def bring(self, attempt: PrefillAttempt, source: PrefixSource, *, may_stay: bool) -> None:
        """Fetches a source's blocks of a prompt, or leaves them there for queries.

        Args:
            attempt: its sequence is HELD and has computed nothing; it may be released meanwhile.
            may_stay: it is decoded here, so that no other worker needs the prefix.
        """
        sequence = attempt.sequence
        assert sequence is not None, "admitted"
        if may_stay and await self._leave(attempt, sequence, source):
            return
        if sequence.state is SequenceState.GONE:
            return  # cancelled before this began, or while the source was asked for a lease
        result = await self._fetcher.fill(source, sequence)
        attempt.span.event(
            "prefix_fetch",
            holder=source.worker_id,
            outcome=result.outcome.value,
            fetched_tokens=result.num_fetched * self._core.block_size,
            seconds=result.seconds,
        )

    async def _leave(
        self, attempt: PrefillAttempt, sequence: Sequence, source: PrefixSource
    ) -> bool:
        """Leaves a source's blocks of a prompt there, if its last token comes sooner that way.

        Returns:
            Whether it did; if not, nothing was changed.
        """
        queries = self._queries
        if queries is None:
            return False
        size = self._core.block_size
        first = sequence.num_computed // size
        most = min((len(sequence.tokens) - 1) // size, source.num_blocks)
        fetch_s = self._fetcher.estimate_s(source, most - first)
        peer = PeerKey(source.worker_id, source.incarnation)
        if not queries.pays_to_leave(attempt, peer, range(first, most), fetch_s):
            return False
        try:
            message = await self._fetcher.leases.borrow(source, sequence.chain.hashes[:most], first)
        except (RefusedError, LostError) as error:
            log.info("prefix_not_left", holder=source.worker_id, error=str(error))
            queries.pass_over()
            return False
        blocks = range(first, message.num_blocks)
        is_whole = blocks and message.num_leased == len(blocks)
        if sequence.state is SequenceState.GONE or not is_whole:
            self._fetcher.leases.give_back(source, message)
            queries.pass_over()
            return False
        sequence.on_end = partial(self._fetcher.leases.give_back, source, message)
        holder = Holder.of_lease(lease_of(message))
        queries.leave(sequence, holder, blocks, range(len(blocks)))
        return True
