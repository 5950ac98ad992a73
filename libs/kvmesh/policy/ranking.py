"""Route policies: how good a worker is for one request's prefill, decode or both.

A policy is three functions from a `Standing` to a tuple; smaller is better. What is common to all
policies (who may be asked, placement, avoided workers, clusters) is in `routing.py`.
Tests: tests/unit/policy/test_routing.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter

from kvmesh.core.fetch_reason import FetchReason
from kvmesh.core.types import PrefixSource, RouteCause, RouteQuery
from kvmesh.policy.holders import NOTHING_LOWER
from kvmesh.policy.token_pace import takes
from kvmesh.policy.view import WorkerView

DECODE_CACHE_WEIGHT = 0.5
"""A decode worker that holds the whole prompt is worth half of the capacity that it has left:
nothing has to be sent to it, and a second copy of a long session would push others out where blocks
are what is scarce; but its batch sets the time per token for as long as the request lives, so the
fuller it is, the less that counts."""

AGGREGATE_TOKENS = 256
"""Half a step's default budget: that much more in a decode batch is hardly felt by the others."""

AGGREGATE_SHARE = 0.25
"""A decode worker with more of its slots or blocks in use keeps to decode."""

HELP_SHARE = 0.5
"""As `AGGREGATE_SHARE`, when prefill workers are so late that its help is worth more."""

HELP_SLOWDOWN = 1.5
"""Prompts take so many times as long beside decode: their chunks are short and decode steps come
between."""

TRANSFER_SHARE = 0.05
"""KV of a token is sent in this part of the time in which it is computed."""

BUSY_TOKENS = 2048
"""What a full worker adds to the wait: its next free slot comes when a prompt is computed and sent,
and others wait for it too."""

SLACK_TOKENS = 2048
"""Prefill workers whose first token comes later than the best one's by more than this are not asked
yet: a short wait for the holder of a long prefix beats computing the prefix again."""


class Standing:
    """A worker with respect to one request; who makes it fills it in, and then only
    `fetch_route.weigh_fetches` changes it.

    A route makes one for each worker it looks at and reads most of its numbers several times, so
    they are computed once, here.

    Attributes:
        cached_tokens: leading prompt tokens whose KV the worker holds.
        turn: place in a rotation over the workers of the same list; 0 is next.
        reads: tokens of cached prefixes that were read there of late.
        uncached_tokens: tokens to compute; at least one, since the last one is needed for its
            logits.
        prefill_busy: the worker would reject an offer: a prefill worker has slots and no queue.
        prefill_share: prefill slots in use, as a share.
        decode_full: the worker would refuse a reservation for want of a slot or blocks, or because
            somebody's time per token would be longer than accepted.
        decode_share: decode slots or blocks in use, as a share, whichever is scarcer.
        fetch: why the worker fetches a prefix, or does not.
        source: whom it fetches from.
        uneven: load is spread so badly over the workers of the list that the policy goes by it.
        saved_tokens: by which the first token comes sooner because a prefix is fetched.
        lower: of the cached blocks, those below the pool.
        load_tokens: by which the first token comes later because they have to come up.
        first_token: tokens computed until this request's first one, where prompts are computed one
            after the other. Prompts on their way, which no report shows yet, are taken to be as
            long as this one.
    """

    __slots__ = (
        "cached_tokens",
        "decode_full",
        "decode_share",
        "fetch",
        "first_token",
        "load_tokens",
        "lower",
        "prefill_busy",
        "prefill_share",
        "query",
        "reads",
        "saved_tokens",
        "source",
        "turn",
        "uncached_tokens",
        "uneven",
        "worker",
    )

    def __init__(
        self,
        worker: WorkerView,
        query: RouteQuery,
        cached_tokens: int,
        turn: int,
        saved_tokens: float = 0.0,
    ) -> None:
        info, load = worker.info, worker.load
        self.worker = worker
        self.query = query
        self.cached_tokens = cached_tokens
        self.turn = turn
        self.uneven = False
        self.reads = 0.0
        left = query.num_tokens - cached_tokens
        self.uncached_tokens = uncached = left if left > 1 else 1
        in_flight, prefill_slots = worker.prefill_in_flight, info.prefill_slots
        prefill_used = load.prefill_active + in_flight
        self.prefill_busy = busy = prefill_used >= prefill_slots
        self.prefill_share = prefill_used / (prefill_slots or 1)
        sent = in_flight * query.num_tokens
        wait = worker.pending_tokens + sent + uncached + BUSY_TOKENS * busy
        self.first_token = wait - saved_tokens
        self.fetch = FetchReason.NOBODY
        self.source: PrefixSource | None = None
        self.saved_tokens = saved_tokens
        self.lower = NOTHING_LOWER
        self.load_tokens = 0.0
        listed = load.decode_running + load.decode_reserved + load.decode_preempted
        decode_used = listed + worker.decode_in_flight
        slots = decode_used / (info.decode_slots or 1)
        blocks = 1.0 - load.blocks_free / (info.num_blocks or 1)
        self.decode_share = slots if slots > blocks else blocks
        # Those on their way are taken to be as long as this one.
        coming = 1 + worker.decode_in_flight
        needed = (left // info.layout.block_size + 1) * coming
        room = load.room
        self.decode_full = (
            decode_used >= info.decode_slots
            or load.blocks_free < needed
            # Asked here as well as there: a call for each of dozens of workers is much.
            or (
                room.context_tokens > 0 and not takes(room, query.tpot_s, query.num_tokens * coming)
            )
        )

    @property
    def may_help_prefill(self) -> bool:
        """A decode worker that would take a prompt of any length at once."""
        return not self.prefill_busy and not self.decode_full and self.decode_share <= HELP_SHARE

    @property
    def takes_short_prompt(self) -> bool:
        """The worker decodes little enough to compute a short prompt beside it, at once."""
        return (
            self.worker.prefill_used == 0
            and not self.decode_full
            and self.decode_share <= AGGREGATE_SHARE
        )


Rank = tuple[float, ...]
RankFunction = Callable[[Standing], Rank]


@dataclass(frozen=True, slots=True)
class RoutePolicy:
    """A named way to order workers; smaller ranks are tried first, equal ones in random order.

    Attributes:
        basis: what decides where no cached prefix does.
        reads_cache: a cached prefix counts.
        aggregate_tokens: a prompt with at most so many uncached tokens is computed on a decode
            worker that has room for it; 0 keeps all prompts away from decode workers.
        first_token: tokens computed on a worker until the request's first one. With it, workers
            much later than the best are not asked, and decode workers help when they are sooner.
        fetches: workers bring prefixes from others that hold them, where that is sooner.
        slack_tokens: how much later than the best a worker may be and still be asked.
        is_uneven: of the workers of a list; fills `Standing.uneven`.
    """

    name: str
    prefill: RankFunction
    decode: RankFunction
    aggregated: RankFunction
    basis: RouteCause = RouteCause.LOAD
    reads_cache: bool = True
    aggregate_tokens: int = 0
    first_token: Callable[[Standing], float] | None = None
    fetches: bool = False
    slack_tokens: float = SLACK_TOKENS
    is_uneven: Callable[[Sequence[Standing]], bool] | None = None


def _expected_prefill(standing: Standing) -> float:
    """Tokens computed on the worker until this request's first token.

    A worker shares its compute evenly among the prompts it holds, so each prompt before this one
    costs it once more its own length. A long prefix hit thus outweighs a few prompts in progress.
    """
    return standing.uncached_tokens * (1.0 + standing.worker.prefill_used)


def _cache_load_prefill(standing: Standing) -> Rank:
    return (standing.prefill_busy, _expected_prefill(standing), standing.prefill_share)


def decode_cost(share: float, uncached_share: float) -> float:
    """What speaks against a decode worker: what of it is in use, and what it lacks of a prompt."""
    left = 1.0 - share
    # Without `max`: a route compares dozens of workers by this.
    return share + DECODE_CACHE_WEIGHT * uncached_share * left if left > 0.0 else share


def _cache_load_decode(standing: Standing) -> Rank:
    uncached_share = standing.uncached_tokens / (standing.query.num_tokens or 1)
    return (standing.decode_full, decode_cost(standing.decode_share, uncached_share))


def _cache_load_aggregated(standing: Standing) -> Rank:
    # Decode steps of the batch take their part of the compute that the prompt waits for.
    cost = _expected_prefill(standing) * (1.0 + standing.decode_share)
    return (standing.prefill_busy or standing.decode_full, cost)


# As a function would return them, at half its price: a route ranks a dozen workers.
_first_token_prefill: RankFunction = attrgetter("first_token", "prefill_share", "reads")


def _first_token_aggregated(standing: Standing) -> Rank:
    cost = standing.first_token * (1.0 + standing.decode_share)
    return (standing.prefill_busy or standing.decode_full, cost, standing.reads)


def _least_loaded_prefill(standing: Standing) -> Rank:
    return (standing.prefill_busy, standing.prefill_share)


def _least_loaded_decode(standing: Standing) -> Rank:
    return (standing.decode_full, standing.decode_share)


def _least_loaded_aggregated(standing: Standing) -> Rank:
    share = standing.prefill_share + standing.decode_share
    return (standing.prefill_busy or standing.decode_full, share)


def _turn(standing: Standing) -> Rank:
    return (standing.turn,)


def _connections_prefill(standing: Standing) -> Rank:
    return (standing.worker.prefill_in_flight / max(standing.worker.info.prefill_slots, 1),)


def _connections_decode(standing: Standing) -> Rank:
    return (standing.worker.decode_in_flight / max(standing.worker.info.decode_slots, 1),)


LEAST_CONNECTIONS = RoutePolicy(
    "least_connections",
    _connections_prefill,
    _connections_decode,
    _connections_decode,
    basis=RouteCause.NO_SCHEDULER,
    reads_cache=False,
)
"""Reads only what the caller itself has in flight; loads of an old view mislead."""

CACHE_LOAD = RoutePolicy(
    "cache_load", _cache_load_prefill, _cache_load_decode, _cache_load_aggregated
)
"""Expected work until the first token, prefix included; the scarcer of decode slots and blocks."""

KVMESH = RoutePolicy(
    "kvmesh",
    _first_token_prefill,
    _cache_load_decode,
    _first_token_aggregated,
    aggregate_tokens=AGGREGATE_TOKENS,
    first_token=attrgetter("first_token"),
    fetches=True,
)
"""The default: the worker whose first token comes soonest, queue, prefix and fetch counted (FlowKV
B.2); short prompts where they are decoded; decode workers help prefill while they are sooner."""

LEAST_LOADED = RoutePolicy(
    "least_loaded",
    _least_loaded_prefill,
    _least_loaded_decode,
    _least_loaded_aggregated,
    reads_cache=False,
)

PDSERVE = replace(LEAST_LOADED, name="pdserve")
"""As `LEAST_LOADED`; gateways offer to its prefill workers by their own connections."""

ROUND_ROBIN = RoutePolicy(
    "round_robin", _turn, _turn, _turn, basis=RouteCause.ROTATION, reads_cache=False
)
