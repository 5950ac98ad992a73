"""What travels between two workers of a chain: KV to the queries, or queries to the KV. By cost.

Keys and values have to be at the last worker before the prompt is handed over, so where queries
travel, KV follows them. A row has the time to the first token, which the last worker tells as soon
as it has computed the prompt, and to the second one, which needs all KV at the decode worker, over
a link like that between the two. Queries are counted twice: as lines carry them, with the round
trip that was measured and one answer under way; and at their least, if a question cost nothing but
its bytes, one way while others went the other way. Of all cuts the best one counts for each time.
Why this is asked: docs/adr/0056-kv-travels-in-chains.md.
Tests: tests/unit/benchmarks/test_chain_ways.py.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from benchmarks.result import Row, Target
from kvmesh.policy.chain import MOST_OF_ALONE, Cost, best_cuts, part_ends
from kvmesh.policy.prefix_source import ASK_CHUNK_TOKENS
from kvmesh.sim.profile_file import load_profile

BLOCK = 16
ELEMENT_BYTES = 2
LSE_BYTES = 4
OVERHEAD_S = 1e-3
"""Time of an offer and its answer."""

ROUND_TRIP_S = 5.5e-4
"""Of a question beside its attention: bench/results/queries.md of 22 November, TCP."""

SAME = 1.02
"""Times sooner that are none: other cuts are tried of queries than routes make."""

_BITS = 8e-9
_CUTS = 512


@dataclass(frozen=True, slots=True)
class Shape:
    """A model on its device.

    Attributes:
        token_s: to compute a token without attention.
        pair_s: of attention of one position to another one.
    """

    name: str
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    token_s: float
    pair_s: float

    @property
    def kv_bytes(self) -> int:
        """Of a token, all layers."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * ELEMENT_BYTES

    @property
    def query_bytes(self) -> int:
        """Of a token's queries, all layers."""
        return self.num_layers * self.num_heads * self.head_dim * ELEMENT_BYTES

    @property
    def answer_bytes(self) -> int:
        """Of what comes back."""
        return self.query_bytes + self.num_layers * self.num_heads * LSE_BYTES

    def cost(self, gbit: float) -> Cost:
        """In computed tokens, as in routes."""
        travel_s = self.kv_bytes * _BITS / gbit
        share, overhead = self.pair_s / self.token_s, OVERHEAD_S / self.token_s
        return Cost(share, travel_s / self.token_s, overhead, self.num_layers)


def shapes() -> list[Shape]:
    """As many heads of keys as of queries, and a quarter or a third of them."""
    found = []
    for name, profile, kv_heads in ((MANY_HEADS, "tokenlake", 32), (FEWER_HEADS, "flowkv", 8)):
        device = load_profile(profile).devices["a100"]
        token_s = device.prefill_s(1) - device.prefill_s(0)
        pair_s = device.pair_share * token_s
        found.append(Shape(name, 32, 32, kv_heads, 128, token_s, pair_s))
    # 13.5 GFLOP a token, 16,384 a pair in each layer.
    found.append(Shape(MANY_SLOW, 32, 32, 32, 128, 13.5e9 / CPU_FLOPS, 32 * 16_384 / CPU_FLOPS))
    # Through both lengths of one worker alone in bench/results/prompt_chain.md of 23 November.
    return [*found, Shape(ONE_CORE, 12, 12, 4, 64, 7.44e-4, 2.42e-7)]


MANY_HEADS, FEWER_HEADS = "Llama-2-7B, A100", "Llama-3.1-8B, A100"
MANY_SLOW, ONE_CORE = "Llama-2-7B, CPU", "Llama of 110M, one core"
CPU_FLOPS = 3e12
"""Of a server's processors; an estimate."""

CASES: dict[str, tuple[Sequence[int], Sequence[float]]] = {
    MANY_HEADS: ((8192, 32_768, 131_072), (5, 10, 25, 50, 100, 200)),
    FEWER_HEADS: ((8192, 32_768, 131_072), (2, 5, 10, 25, 50, 100)),
    MANY_SLOW: ((8192, 32_768), (0.1, 0.25, 0.5, 1, 2.5, 10)),
    ONE_CORE: ((8192,), (0.02, 0.05, 0.1, 0.2, 1)),
}
"""Lengths of prompts, and links in Gbit/s."""


@dataclass(frozen=True, slots=True)
class Times:
    """Seconds until a prompt's first and second token."""

    first: float
    second: float

    def __str__(self) -> str:
        return f"{self.first:.3g} / {self.second:.3g}"


def alone(shape: Shape, tokens: int, gbit: float) -> Times:
    """One worker computes all."""
    first = shape.cost(gbit).work(tokens) * shape.token_s
    return Times(first, max(first, tokens * shape.kv_bytes * _BITS / gbit))


def carried(shape: Shape, tokens: int, gbit: float) -> Times:
    """KV travels, cut and decided as in routes."""
    cost = shape.cost(gbit)
    cuts, work = best_cuts(cost, cost.head(0, tokens), tokens, 2, BLOCK)
    if len(cuts) == 2:
        return alone(shape, tokens, gbit)
    first = work * shape.token_s
    return Times(first, max(first, tokens * shape.kv_bytes * _BITS / gbit))


def asked(shape: Shape, tokens: int, gbit: float, *, least: bool = False) -> Times:
    """Queries travel, and KV follows; the best of each time over all cuts.

    Args:
        least: as if questions cost nothing but their bytes.
    """
    found = list(_asked(shape, tokens, gbit, least=least))
    by_one = alone(shape, tokens, gbit)
    best = Times(min(each.first for each in found), min(each.second for each in found))
    return best if best.first <= MOST_OF_ALONE * by_one.first else by_one


def _asked(shape: Shape, tokens: int, gbit: float, *, least: bool) -> Iterator[Times]:
    cost, byte_s = shape.cost(gbit), _BITS / gbit
    overhead_s = cost.overhead_tokens * shape.token_s
    for number in range(1, _CUTS):
        cut = tokens * number / _CUTS
        rest = tokens - cut
        # The first worker attends for the queries of the other one.
        helped_s = cost.pair_share * cut * rest * shape.token_s
        first_s = cost.work(cut) * shape.token_s + helped_s
        last_s = cost.between(cut, tokens) * shape.token_s - helped_s
        there_s, back_s = rest * shape.query_bytes * byte_s, rest * shape.answer_bytes * byte_s
        if not least:
            num_questions = shape.num_layers * math.ceil(rest / ASK_CHUNK_TOKENS)
            asking_s = num_questions * ROUND_TRIP_S + there_s + helped_s + back_s
            last_s = max(last_s, asking_s)
        *_, first = part_ends([first_s, last_s], [back_s], overhead_s, shape.num_layers)
        # KV goes the way of the answers.
        came = max(first, cut * shape.kv_bytes * byte_s + back_s)
        # The handoff goes the way of the queries.
        handed = tokens * shape.kv_bytes * byte_s + there_s
        yield Times(first, max(came, handed))


def compared() -> tuple[list[Row], list[Target]]:
    """All cases, and what queries bring at best."""
    rows: list[Row] = []
    sooner: list[tuple[float, float]] = []
    for shape in shapes():
        lengths, links = CASES[shape.name]
        for tokens in lengths:
            for gbit in links:
                one, kv = alone(shape, tokens, gbit), carried(shape, tokens, gbit)
                queries = asked(shape, tokens, gbit)
                least = asked(shape, tokens, gbit, least=True)
                rows.append(
                    {
                        "model": shape.name,
                        "heads": f"{shape.num_heads}/{shape.num_kv_heads}",
                        "tokens": tokens,
                        "gbit_s": gbit,
                        "alone_s": str(one),
                        "kv_s": str(kv),
                        "queries_s": str(queries),
                        "at_least_s": str(least),
                    }
                )
                sooner.append((kv.first / queries.first, kv.second / least.second))
    first, second = map(max, zip(*sooner, strict=True))
    return rows, [
        Target("first token, times sooner with queries", first, SAME, at_most=True),
        Target("second token, times sooner at the least", second, SAME, at_most=True),
    ]
