"""Route policies: how good a worker is for one request's prefill, decode or both.

A policy is three functions from a `Standing` to a tuple; smaller is better. The rules of all
policies (able workers, placement, avoided workers, clusters) are in `routing.py`.
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
"""Weight of a cached prompt in the decode rank, as a fraction of the worker's free capacity. A full
hit needs no transfer, and avoids a second copy of a long session where blocks are scarce. It counts
less on a fuller worker, because the batch size sets the TPOT for the request's whole life."""

AGGREGATE_TOKENS = 256
"""Most uncached tokens of a prompt that a decode worker computes: half a step's default token
budget, which the decode batch hardly notices."""

AGGREGATE_SHARE = 0.25
"""Largest fraction of a decode worker's slots or blocks in use for it to compute short prompts."""

HELP_SHARE = 0.5
"""Same as `AGGREGATE_SHARE`, but for any prompt when the prefill workers would be later."""

HELP_SLOWDOWN = 1.5
"""Factor by which a prompt takes longer beside decode: chunks are short and decode steps run in
between."""

SHARED_SLOWDOWN = 0.7
"""Part by which a prompt takes longer for each other worker that computes on the same cores.

`make bench-one-box`: with one core instead of both it takes 1.7 times as long."""

TRANSFER_SHARE = 0.05
"""Time to send a token's KV, as a fraction of its compute time."""

BUSY_TOKENS = 2048
"""Computed tokens added to the wait at a full worker: its next slot frees when a prompt is computed
and sent, and other requests wait for that slot too."""

SLACK_TOKENS = 2048
"""Computed tokens by which a prefill worker's first token may come later than the best one's for it
to be asked: a short wait for the holder of a long prefix beats computing the prefix again."""


class Standing:
    """A worker with respect to one request.

    A route makes one for each worker it looks at and reads most numbers several times, so they are
    computed once, here. After it is filled in, only `fetch_route.weigh_fetches` changes it.

    Attributes:
        cached_tokens: leading prompt tokens whose KV the worker holds.
        turn: place in a rotation over the workers of the same list; 0 is next.
        reads: tokens of cached prefixes read from the worker recently.
        uncached_tokens: tokens to compute; at least one, since the last one is needed for its
            logits.
        prefill_busy: whether the worker would reject an offer: prefill workers have slots and no
            queue.
        prefill_share: fraction of the prefill slots in use.
        decode_full: whether the worker would refuse a reservation, because no slot or too few
            blocks are free, or because a sequence would miss its TPOT limit.
        decode_share: fraction of the decode slots or of the blocks in use, the larger one.
        fetch: why the worker fetches a prefix, or does not.
        source: the worker that it fetches from.
        uneven: whether load is spread so unevenly over the list that the policy ranks by load.
        saved_tokens: computed tokens by which a fetch brings the first token sooner.
        lower: number of the cached blocks that lie below the pool.
        load_tokens: computed tokens by which bringing these up delays the first token.
        first_token: tokens that the worker computes until this request's first token, if it runs
            prompts one after the other. Prompts in flight, which no report shows yet, are assumed
            to be as long as this one.
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
        # Sequences in flight are assumed to be as long as this one.
        coming = 1 + worker.decode_in_flight
        needed = (left // info.layout.block_size + 1) * coming
        room = load.room
        self.decode_full = (
            decode_used >= info.decode_slots
            or load.blocks_free < needed
            # `takes` checks this too, but a call for each of dozens of workers is slow.
            or (
                room.context_tokens > 0 and not takes(room, query.tpot_s, query.num_tokens * coming)
            )
        )

    @property
    def may_help_prefill(self) -> bool:
        """Whether a decode worker has room to compute a prompt of any length at once."""
        return not self.prefill_busy and not self.decode_full and self.decode_share <= HELP_SHARE

    @property
    def takes_short_prompt(self) -> bool:
        """Whether the worker decodes so little that it can compute a short prompt at once."""
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
        basis: cause that a plan names where no cached prefix decided.
        reads_cache: whether a cached prefix counts.
        aggregate_tokens: a decode worker with room computes prompts of up to so many uncached
            tokens; 0 keeps all prompts away from decode workers.
        first_token: returns the tokens that a worker computes until the request's first one. With
            it, workers much later than the best are not asked, and decode workers help when they
            are sooner.
        fetches: whether workers fetch prefixes from other holders where that is sooner.
        slack_tokens: computed tokens by which a worker may be later than the best and is still
            asked.
        weighs_links: whether the link from the prefill worker decides among equal decode workers.
        is_uneven: says whether load is spread unevenly over a list; fills `Standing.uneven`.
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
    weighs_links: bool = False
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
    """Returns a decode worker's cost: its used share, plus the prompt's uncached share weighted."""
    left = 1.0 - share
    # Without `max`: a route compares dozens of workers by this.
    return share + DECODE_CACHE_WEIGHT * uncached_share * left if left > 0.0 else share


def _cache_load_decode(standing: Standing) -> Rank:
    uncached_share = standing.uncached_tokens / (standing.query.num_tokens or 1)
    return (standing.decode_full, decode_cost(standing.decode_share, uncached_share))


def _cache_load_aggregated(standing: Standing) -> Rank:
    # Decode steps of the batch take a part of the compute that the prompt needs.
    cost = _expected_prefill(standing) * (1.0 + standing.decode_share)
    return (standing.prefill_busy or standing.decode_full, cost)


# Same tuple as a function would return, in half the time: a route ranks a dozen workers.
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
"""Counts only the caller's own requests in flight, because the loads of an old view mislead."""

CACHE_LOAD = RoutePolicy(
    "cache_load",
    _cache_load_prefill,
    _cache_load_decode,
    _cache_load_aggregated,
    weighs_links=True,
)
"""Prefill by expected work until the first token, given the cached prefix; decode by the scarcer of
slots and blocks."""

KVMESH = RoutePolicy(
    "kvmesh",
    _first_token_prefill,
    _cache_load_decode,
    _first_token_aggregated,
    aggregate_tokens=AGGREGATE_TOKENS,
    first_token=attrgetter("first_token"),
    fetches=True,
    weighs_links=True,
)
"""The default. Prefill on the worker with the least TTFT from queue, prefix and fetch (FlowKV
Algorithm 1); short prompts on their decode worker; decode workers help prefill while they are
sooner."""

LEAST_LOADED = RoutePolicy(
    "least_loaded",
    _least_loaded_prefill,
    _least_loaded_decode,
    _least_loaded_aggregated,
    reads_cache=False,
)

PDSERVE = replace(LEAST_LOADED, name="pdserve")
"""Same ranks as `LEAST_LOADED`; gateways offer requests to prefill workers in the order of their
own connections (P/D-Serve 3.5)."""

ROUND_ROBIN = RoutePolicy(
    "round_robin", _turn, _turn, _turn, basis=RouteCause.ROTATION, reads_cache=False
)
