"""Measures the processor time that each shortcut of the gateway saves, on traffic as users send it.

One mesh serves several gateways: the shipped one, and for each shortcut one without it. They take
turns with the same chats of 800 to 8,000 characters, all different. Workers publish their prefixes,
and telemetry is as `kvmesh up` ships it. The measure is a gateway's processor time per request,
which other processes disturb less than its throughput.

    python -m benchmarks.gateway_ablation
    python -m benchmarks.gateway_ablation --only direct-http --rounds 9
    python -m benchmarks.gateway_ablation --tree ../older        # that checkout's gateway as well
    python -m benchmarks.gateway_ablation --traffic P/D          # other rows of this commit stay
"""

from __future__ import annotations

import argparse
import asyncio
import random
import re
import statistics
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from pathlib import Path

import uvloop

from benchmarks.bench_process import Process
from benchmarks.chat_prompts import Messages, chats
from benchmarks.gateway_load import Loader, Reply
from benchmarks.gateway_traffic import Request
from benchmarks.gateway_without import SHORTCUTS
from benchmarks.our_mesh import OurMesh
from benchmarks.result import RESULTS, ROOT, Row, document, joined, markdown, save
from kvmesh.cli.stack import TRACES_PER_SECOND
from kvmesh.core.types import Endpoint

SHIPPED, AGAIN = "as shipped", "as shipped, once more"
IN_FLIGHT = 8
WARM_UP = 100
"""Requests to each gateway before the first that is measured."""
STEP_S = 0.002
START_S = 300.0
"""Time limit for a start; a dozen gateways at once start slowly."""
KEEP = 0.03
"""A shortcut that saves less than this share nowhere is deleted."""

NOTES = (
    f"chats of benchmarks/chat_prompts.py, {IN_FLIGHT} in flight if not said; tokens come one by"
    f" one, {1000 * STEP_S:g} ms apart; the worker publishes its"
    " blocks, so all gateways of a round but the first find a chat known\n"
    "- telemetry as `kvmesh up` ships it: logs, metrics, traces of "
    f"{TRACES_PER_SECOND} requests in a second\n"
    "- cpu ms: processor time per request, the lower quartile of the rounds, since other processes"
    " can only increase it; saves: how much more time the gateway takes without the shortcut\n"
    f"- {AGAIN}: the same gateway twice, which shows the error of the method\n"
    f"- a shortcut that saves less than {KEEP:.0%} in every row is not worth its code"
).split("\n- ")


@dataclass(frozen=True, slots=True)
class Traffic:
    """One kind of request.

    Attributes:
        roles: prefill and decode are two workers.
        in_flight: requests at a time; with many, one event-loop iteration handles many tokens.
    """

    name: str
    num_tokens: int
    stream: bool
    roles: bool
    in_flight: int = IN_FLIGHT


TRAFFIC = (
    Traffic("whole answers of 16 tokens", 16, stream=False, roles=False),
    Traffic("streams of 64 tokens", 64, stream=True, roles=False),
    Traffic("whole answers of 16 tokens, P/D", 16, stream=False, roles=True),
    Traffic("streams of 64 tokens, P/D", 64, stream=True, roles=True),
    Traffic("64 streams at a time, P/D", 64, stream=True, roles=True, in_flight=64),
)


@dataclass(slots=True)
class Variant:
    """One gateway."""

    name: str
    process: Process
    endpoint: Endpoint
    loader: Loader
    cpu_ms: list[float] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    num_events: int = 0

    async def serve(self, prompts: Sequence[Messages], traffic: Traffic) -> None:
        """Sends chats, some at a time, and notes the processor time per request."""
        request = Request(traffic.num_tokens, stream=traffic.stream)
        left = iter([request.to_bytes(self.endpoint, each) for each in prompts])

        async def caller() -> None:
            for payload in left:
                reply = await self.loader.one(payload)
                if not reply.ok:
                    self.failures.append(_reason(reply))
                self.num_events += reply.num_events

        before = self.process.exact_cpu_s
        await asyncio.gather(*(caller() for _ in range(traffic.in_flight)))
        self.cpu_ms.append(1000 * (self.process.exact_cpu_s - before) / len(prompts))


def _reason(reply: Reply) -> str:
    """Why a request failed."""
    took = f"after {reply.duration_s:.1f} s"
    return f"status {reply.status} {took}: {reply.body[-200:]!r}" if reply.status else f"cut {took}"


class AblationMesh:
    """A mesh and the gateways before it.

    Args:
        roles: prefill and decode are two workers.
        traced: gateways trace as with `kvmesh up`.
    """

    def __init__(self, stack: ExitStack, folder: Path, *, roles: bool, traced: bool) -> None:
        self._mesh = OurMesh(stack, folder, traced=traced)
        self._worker = self._mesh.worker("worker", *(["roles"] if roles else []))

    async def start(self, variants: Sequence[Variant], timeout_s: float) -> None:
        """Waits until the worker is there and all gateways answer."""
        await self._worker.line()
        for variant in variants:
            is_up = partial(getattr, variant.process, "running")
            hello = [{"role": "user", "content": "hello"}]
            payload = Request(1, stream=False).to_bytes(variant.endpoint, hello)
            await variant.loader.until_ok(payload, is_up, timeout_s)

    async def steps_take(self, seconds: float) -> None:
        """From now on tokens of a sequence come so far apart."""
        self._worker.tell({"step_s": seconds})
        await self._worker.line()

    def gateway(
        self, name: str, module: Sequence[str], tree: Path = ROOT, *, journal: bool = True
    ) -> Variant:
        """A gateway.

        Args:
            journal: streams can be resumed by other gateways.
        """
        file = name.replace(" ", "-").replace("/", "-")
        flags: dict[str, object] = {} if journal else {"resume.journal-mib": 0}
        process, http = self._mesh.gateway(file, flags, module, tree)
        return Variant(name, process, http, Loader(http))


@contextmanager
def ablation_mesh(*, roles: bool, traced: bool) -> Iterator[AblationMesh]:
    """A mesh in a folder of its own."""
    with tempfile.TemporaryDirectory(prefix="kvmesh-bench-") as folder, ExitStack() as stack:
        yield AblationMesh(stack, Path(folder), roles=roles, traced=traced)


async def _measure(
    mesh: AblationMesh, variants: Sequence[Variant], traffic: Traffic, rounds: int, count: int
) -> list[Row]:
    count = max(count, 2 * traffic.in_flight)
    # Each round has its own chats, the same ones for all gateways.
    drawn = (messages for _, messages in chats((rounds + 1) * count, seed=count))
    warm = [messages for _, messages in chats(WARM_UP, seed=1)]
    for variant in variants:
        variant.cpu_ms.clear()
        await variant.serve(warm, traffic)
        variant.cpu_ms.clear()
    rng = random.Random(count)
    for _ in range(rounds):
        prompts = list(islice(drawn, count))
        for variant in rng.sample(variants, len(variants)):
            await variant.serve(prompts, traffic)
    rows = [
        ablation_row(traffic.name, each.name, each.cpu_ms, variants[0].cpu_ms) for each in variants
    ]
    for row, variant in zip(rows, variants, strict=True):
        row["failed"] = len(variant.failures)
        sys.stderr.write(", ".join(f"{name} {value}" for name, value in row.items()) + "\n")
        sys.stderr.writelines(f"  {reason}\n" for reason in variant.failures)
        variant.failures.clear()
    return rows


def quiet_ms(cpu_ms: Sequence[float]) -> float:
    """Processor time in the least disturbed rounds: the lower quartile."""
    return statistics.quantiles([*cpu_ms, *cpu_ms], n=4)[0]


def ablation_row(traffic: str, name: str, cpu_ms: Sequence[float], shipped: Sequence[float]) -> Row:
    """One gateway's row, compared with the shipped gateway."""
    own, base = quiet_ms(cpu_ms), quiet_ms(shipped)
    return {
        "traffic": traffic,
        "gateway": name,
        "cpu ms": round(own, 3),
        "saves %": round(100 * (own / base - 1), 1),
    }


async def run(
    names: Sequence[str],
    trees: Sequence[Path],
    kinds: Sequence[Traffic],
    rounds: int,
    count: int,
    *,
    traced: bool,
) -> list[Row]:
    """The rows of some kinds of traffic, on one mesh after the other."""
    rows: list[Row] = []
    for roles in sorted({each.roles for each in kinds}):
        with ablation_mesh(roles=roles, traced=traced) as mesh:
            variants = [mesh.gateway(name, ["services.gateway"]) for name in (SHIPPED, AGAIN)]
            variants += [
                mesh.gateway(f"without {name}", ["benchmarks.gateway_without", name])
                for name in names
            ]
            variants += [
                mesh.gateway(f"of {tree.name}", ["services.gateway"], tree) for tree in trees
            ]
            await mesh.start(variants, START_S)
            await mesh.steps_take(STEP_S)
            for traffic in (each for each in kinds if each.roles == roles):
                rows += await _measure(mesh, variants, traffic, rounds, count)
            for variant in variants:
                variant.loader.close()
    return rows


def main(argv: Sequence[str] | None = None) -> int:
    """Runs, prints and saves."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--rounds", type=int, default=15, help="turns of each gateway")
    parser.add_argument("--requests", type=int, default=24, help="to each gateway in a round")
    parser.add_argument("--only", nargs="*", choices=list(SHORTCUTS), help="shortcuts to leave out")
    parser.add_argument("--traffic", default="", help="kinds whose name matches this pattern")
    parser.add_argument("--tree", type=Path, action="append", default=[], help="another checkout")
    parser.add_argument("--untraced", action="store_true", help="no gateway writes traces")
    parser.add_argument("--out", type=Path, default=RESULTS / "gateway_ablation.json")
    arguments = parser.parse_args(argv)
    names = list(SHORTCUTS) if arguments.only is None else arguments.only
    trees = [tree.resolve() for tree in arguments.tree]
    kinds = [traffic for traffic in TRAFFIC if re.search(arguments.traffic, traffic.name)]
    rounds, count, traced = arguments.rounds, arguments.requests, not arguments.untraced
    rows = uvloop.run(run(names, trees, kinds, rounds, count, traced=traced))
    result = joined(document(rows, [], arguments.requests, NOTES), arguments.out, "traffic")
    save(result, arguments.out)
    sys.stdout.write(markdown(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
