"""Whether queries travel to a prefix on another worker, or the prefix comes here. Pure.

A query costs one round trip per layer and chunk, and the holder's time for its attention; bytes on
the way grow with the new tokens. Bringing the prefix costs its bytes, computing it again its
tokens; both grow with the prefix. So few new tokens behind a long prefix are asked.
Source: TokenLake 4.2, whose rule for the length of segments compares the same two times.
Tests: tests/unit/policy/test_query_cost.py.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvmesh.policy.prefix_source import Way, cheapest_way

_SAMPLE_WEIGHT = 0.2
_MOST_RATIO = 10.0


@dataclass(frozen=True, slots=True)
class QuerySpeed:
    """What one holder was measured at; the defaults are one processor core's over a local network.

    Attributes:
        round_trip_s: of a question without its attention.
        unit_s: per query, head, position and element of a head.
    """

    round_trip_s: float = 0.001
    unit_s: float = 2.5e-10

    def estimate_s(self, num_questions: int, num_units: int) -> float:
        """Seconds that so many questions with so much attention in all take."""
        return num_questions * self.round_trip_s + num_units * self.unit_s

    def with_sample(self, num_units: int, seconds: float) -> QuerySpeed:
        """After one more measured question: what made most of the estimate moves most."""
        work_s = num_units * self.unit_s
        expected_s = self.round_trip_s + work_s
        ratio = min(max(seconds / expected_s, 1 / _MOST_RATIO), _MOST_RATIO)
        step = _SAMPLE_WEIGHT * (ratio - 1)
        share = work_s / expected_s
        return QuerySpeed(
            self.round_trip_s * (1 + step * (1 - share)), self.unit_s * (1 + step * share)
        )


@dataclass(frozen=True, slots=True)
class QueryTask:
    """A prompt whose prefix another worker holds.

    Attributes:
        new_tokens: computed here in any case.
        remote_tokens: of the prefix, with their KV elsewhere.
        num_layers, num_heads, head_dim: of the model; heads of queries.
        num_chunks: steps that the new tokens are computed in.
        later_tokens: that may be generated with the prefix still elsewhere; each asks for itself.
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
        """One per layer and step."""
        return self.num_layers * (self.num_chunks + self.later_tokens)

    @property
    def num_units(self) -> int:
        """Attention in the units of `QuerySpeed`."""
        queries = self.new_tokens + self.later_tokens
        per_layer = queries * self.remote_tokens * self.num_heads * self.head_dim
        return per_layer * self.num_layers


@dataclass(frozen=True, slots=True)
class QueryDecision:
    """Whether to ask, and why."""

    query: bool
    reason: str


def choose_query(
    task: QueryTask, speed: QuerySpeed, *, compute_token_s: float, fetch_s: float | None = None
) -> QueryDecision:
    """The cheapest of asking, computing again and, where it can be had, fetching.

    Args:
        compute_token_s: seconds per prompt token on this worker; 0 is not known yet.
        fetch_s: until the prefix would be here; None: it cannot be fetched.
    """
    query_s = speed.estimate_s(task.num_questions, task.num_units)
    if compute_token_s == 0:
        return QueryDecision(False, "what a prompt token costs here is not known yet")
    compute_s = task.remote_tokens * compute_token_s
    text = f"asking {query_s * 1e3:.1f} ms, computing {compute_s * 1e3:.1f} ms"
    if fetch_s is not None:
        text += f", fetching {fetch_s * 1e3:.1f} ms"
    way, _ = cheapest_way(compute_s, fetch_s, query_s)
    return QueryDecision(way is Way.ASK, text)
