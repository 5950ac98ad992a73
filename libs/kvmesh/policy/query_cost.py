"""Decides whether a worker queries a remote prefix, fetches it or recomputes it. Pure.

A remote query costs one round trip per layer and chunk, and the holder's time for its attention;
its bytes grow with the new tokens. A fetch costs the prefix's bytes and recomputing its tokens;
both grow with the prefix. So queries pay for few new tokens behind a long prefix.
Source: TokenLake 4.2, whose rule for the length of segments compares the same two times
(docs/adr/0045-segments-count-reads.md).
Tests: tests/unit/policy/test_query_cost.py.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvmesh.policy.linear_time import LinearTime
from kvmesh.policy.prefix_source import Way, cheapest_way

FIRST_SPEED = LinearTime(call_s=0.001, unit_s=2.5e-10)
"""Assumed of a holder before it was queried: one CPU core over a local network.

A call is a query without its attention, and a unit the attention of one query token, head, position
and element of a head.
"""


@dataclass(frozen=True, slots=True)
class QueryTask:
    """A prompt whose prefix another worker holds.

    Attributes:
        new_tokens: tokens that are computed here in any case.
        remote_tokens: tokens of the prefix, whose KV is on the other worker.
        num_layers, num_heads, head_dim: sizes of the model; heads are query heads.
        num_chunks: number of steps that compute the new tokens.
        later_tokens: tokens that may be generated while the prefix is still remote; each is one
            query per layer.
    """

    new_tokens: int
    remote_tokens: int
    num_layers: int
    num_heads: int
    head_dim: int
    num_chunks: int = 1
    later_tokens: int = 0

    @property
    def num_questions(self) -> int:
        """Number of queries: one per layer and step."""
        return self.num_layers * (self.num_chunks + self.later_tokens)

    @property
    def num_units(self) -> int:
        """Attention in the units of `FIRST_SPEED`."""
        queries = self.new_tokens + self.later_tokens
        per_layer = queries * self.remote_tokens * self.num_heads * self.head_dim
        return per_layer * self.num_layers


@dataclass(frozen=True, slots=True)
class QueryDecision:
    """Whether to query the prefix remotely, and why."""

    query: bool
    reason: str


def choose_query(
    task: QueryTask, speed: LinearTime, *, compute_s: float, fetch_s: float | None = None
) -> QueryDecision:
    """Chooses the cheapest of querying, recomputing and, if possible, fetching.

    Args:
        compute_s: seconds to compute the prefix on this worker; 0 is not known yet.
        fetch_s: seconds until a fetched prefix would be here; None: it cannot be fetched.
    """
    query_s = speed.estimate_s(task.num_questions, task.num_units)
    if compute_s == 0:
        return QueryDecision(False, "what a prompt token costs here is not known yet")
    text = f"asking {query_s * 1e3:.1f} ms, computing {compute_s * 1e3:.1f} ms"
    if fetch_s is not None:
        text += f", fetching {fetch_s * 1e3:.1f} ms"
    way, _ = cheapest_way(compute_s, fetch_s, query_s)
    return QueryDecision(way is Way.ASK, text)
