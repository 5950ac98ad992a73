"""Cost of the stream journal for a gateway: tokens per second lost, processor time added.

A gateway with a journal and one without take turns before the same workers, a prefill and a decode
worker, with the same chats of 800 to 8,000 characters. A turn of each is a pair, and the cost is
the median of the pairs: a host does not run at one speed for minutes. A second gateway with a
journal shows the error of the method.

    python -m benchmarks.gateway_journal
    python -m benchmarks.gateway_journal --only "128 tokens"    # other rows of this commit stay

Tests: tests/unit/benchmarks/test_gateway_journal.py.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import uvloop

from benchmarks.chat_prompts import chats
from benchmarks.gateway_ablation import START_S, AblationMesh, Traffic, Variant, ablation_mesh
from benchmarks.result import RESULTS, Row, Target, document, joined, markdown, save

WITH, AGAIN, NONE = "with a journal", "with a journal, once more", "without"
IN_FLIGHT = 64
TOKENS_IN_TURN = 16_384
FAST_S, CLIENT_S = 0.0, 0.02
GOAL = 5.0
"""The journal costs at most so much of streamed tokens/s, in percent."""

NOTES = (
    f"{IN_FLIGHT} streams at a time, chats of benchmarks/chat_prompts.py, prefill and decode are"
    " two workers, telemetry as `kvmesh up` ships it\n"
    "- as fast as it goes: workers are never waited for, so the gateway's process is what limits;"
    f" {1000 * CLIENT_S:g} ms apart: the rate of a model, at which gateways mostly wait\n"
    "- cost: of a pair of turns, what the journal takes of the tokens/s, and adds to the gateway's"
    " processor time for a stream; median of the pairs, and their quartiles\n"
    f"- {AGAIN}: the same gateway twice; how far its cost is from the first one's is the error of"
    " the method"
).split("\n- ")


@dataclass(frozen=True, slots=True)
class Streams:
    """One kind of stream.

    Attributes:
        step_s: between two tokens.
    """

    num_tokens: int
    step_s: float

    @property
    def name(self) -> str:
        """As rows have it."""
        pace = f"{1000 * self.step_s:g} ms apart" if self.step_s else "as fast as it goes"
        return f"{self.num_tokens} tokens, {pace}"

    @property
    def num_streams(self) -> int:
        """In one turn."""
        if self.step_s:  # they wait most of the time: one after the other would take minutes
            return IN_FLIGHT
        return max(2 * IN_FLIGHT, TOKENS_IN_TURN // self.num_tokens)


STREAMS = (
    *(Streams(num_tokens, FAST_S) for num_tokens in (64, 128, 256)),
    Streams(128, CLIENT_S),
)


def cost(with_journal: Sequence[float], without: Sequence[float]) -> tuple[float, float, float]:
    """Lower quartile, median and upper quartile of what pairs differ by, in percent."""
    found = [100 * (own / base - 1) for own, base in zip(with_journal, without, strict=True)]
    low, middle, high = statistics.quantiles([*found, *found], n=4)
    return low, middle, high


def _quartiles(found: tuple[float, float, float]) -> str:
    return f"{found[0]:.1f} to {found[2]:.1f}"


async def _measure(
    mesh: AblationMesh, variants: Sequence[Variant], streams: Streams, rounds: int
) -> list[Row]:
    await mesh.steps_take(streams.step_s)
    count, rng = streams.num_streams, random.Random(streams.num_tokens)
    traffic = Traffic("", streams.num_tokens, stream=True, roles=True, in_flight=IN_FLIGHT)
    drawn = (messages for _, messages in chats((rounds + 1) * count, seed=streams.num_tokens))
    warm = list(islice(drawn, count))
    seconds: dict[str, list[float]] = {variant.name: [] for variant in variants}
    for variant in variants:
        await variant.serve(warm, traffic)
        variant.cpu_ms.clear()
        variant.num_events = 0
    for _ in range(rounds):
        prompts = list(islice(drawn, count))
        for variant in rng.sample(variants, len(variants)):
            began = time.perf_counter()
            await variant.serve(prompts, traffic)
            seconds[variant.name].append(time.perf_counter() - began)
    bare = next(variant for variant in variants if variant.name == NONE)
    rows: list[Row] = []
    for each in variants:
        slower = cost(seconds[each.name], seconds[NONE])
        more = cost(each.cpu_ms, bare.cpu_ms)
        rate = [count * streams.num_tokens / taken for taken in seconds[each.name]]
        rows.append(
            {
                "streams": streams.name,
                "gateway": each.name,
                "tokens/s": round(statistics.median(rate)),
                "tokens/event": round(
                    rounds * count * streams.num_tokens / max(1, each.num_events), 1
                ),
                "cost %": round(100 * (1 - 1 / (1 + slower[1] / 100)), 1),
                "cost, quartiles": _quartiles(slower),
                "cpu ms": round(statistics.median(each.cpu_ms), 3),
                "cpu more %": round(more[1], 1),
                "cpu more, quartiles": _quartiles(more),
                "failed": len(each.failures),
            }
        )
        sys.stderr.write(", ".join(f"{name} {value}" for name, value in rows[-1].items()) + "\n")
        sys.stderr.writelines(f"  {reason}\n" for reason in each.failures)
        each.failures.clear()
    return rows


def targets_of(rows: Sequence[Row]) -> list[Target]:
    """The journal's cost in each kind of stream."""
    own = [row for row in rows if row["gateway"] == WITH]
    return [
        *(Target(f"{row['streams']}: cost %", row["cost %"], GOAL, at_most=True) for row in own),
        Target("streams that failed", float(sum(row["failed"] for row in rows)), 0.0, True),
    ]


async def run(kinds: Sequence[Streams], rounds: int) -> list[Row]:
    """The rows of all kinds of streams."""
    rows: list[Row] = []
    with ablation_mesh(roles=True, traced=True) as mesh:
        variants = [mesh.gateway(name, ["services.gateway"]) for name in (WITH, AGAIN)]
        variants.append(mesh.gateway(NONE, ["services.gateway"], journal=False))
        await mesh.start(variants, START_S)
        for streams in kinds:
            rows += await _measure(mesh, variants, streams, rounds)
        for variant in variants:
            variant.loader.close()
    return rows


def main(argv: Sequence[str] | None = None) -> int:
    """Runs, prints and saves."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--rounds", type=int, default=15, help="pairs of turns")
    parser.add_argument("--only", default="", help="kinds of streams whose name has this")
    parser.add_argument("--out", type=Path, default=RESULTS / "gateway_journal.json")
    arguments = parser.parse_args(argv)
    kinds = [streams for streams in STREAMS if arguments.only in streams.name]
    rows = uvloop.run(run(kinds, arguments.rounds))
    result = joined(document(rows, [], 0, NOTES), arguments.out, "streams")
    result["targets"] = [target.as_row() for target in targets_of(result["rows"])]
    save(result, arguments.out)
    sys.stdout.write(markdown(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
