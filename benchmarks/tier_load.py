"""What tiers and a second cluster bring a loaded mesh, against caches in the pools alone.

    python -m benchmarks.tier_load
    python -m benchmarks.tier_load --scale 0.5 --out /tmp/tier_load.json      # a quick look

Real processes: Redis, kvmanager, scheduler, gateway and workers that compute with a Llama of 110M
random weights, one engine thread each. Every form gets the same loads: agents' sessions whose
prompts grow from turn to turn, prompts of many tenants with a system prompt each, and prompts that
fit. The first two need several times the memory of the pools. Every form has the same pools; those
with tiers have the same tiers. Rates and the limit of a first token are multiples of the time of
one prompt, which is measured first, so that the load asks the same of a fast machine and of a slow
one. One run tells forms apart that differ by a factor; routers, which differ by a few percent, are
compared in rounds by `benchmarks.tier_rounds`.
Tests: tests/unit/benchmarks/test_tier_load.py.
"""

from __future__ import annotations

import argparse
import asyncio
import bisect
import itertools
import random
import shutil
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Coroutine, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.live_mesh import say
from benchmarks.one_box import TOKENIZER
from benchmarks.our_mesh import CHECKPOINT
from benchmarks.poisson import poisson_times
from benchmarks.random_llama import SERVED_SHAPE, write_checkpoint
from benchmarks.result import RESULTS, Row, Target, document, markdown, save
from kvmesh.cli.stack_client import VOCAB
from kvmesh.core.summary_statistics import percentile
from tests.e2e.api_client import ApiClient
from tests.mesh_processes import BLOCK_SIZE, Flags, Mesh
from tests.redis_server import redis_process

SHAPE, DTYPE = SERVED_SHAPE, "bfloat16"
NUM_PREFILL, NUM_DECODE = 2, 1
FAR = f"prefill-{NUM_PREFILL}"
"""The worker of the second cluster, in the form that has one."""

POOL_TOKENS = 4096
BLOCK_GIB = BLOCK_SIZE * SHAPE.kv_values * 2 / (1 << 30)
POOL_GIB = POOL_TOKENS // BLOCK_SIZE * BLOCK_GIB
UNIT_TOKENS = 1024
"""Prompt whose time is the unit of all others: all prefill workers compute one at once."""

LIMIT = 2.0
"""Units until a first token that counts as good: the longest turn, computed whole, takes two."""

TIERS_OF_POOL = 10
SESSIONS, TURNS, FIRST_TOKENS, TURN_TOKENS = 10, 5, 1024, 256
START, THINK = 2.0, 4.0
"""Units between the first turns of two sessions, and before the next turn of one. Ten sessions are
open at once, of more tokens than the pools hold. Without any hit they ask for twice of what two
workers compute, and for half of it if nothing is computed twice."""

TENANTS, TENANT_TOKENS, TAIL_TOKENS, SKEW = 24, 1024, 64, 0.6
TENANT_RATE, TENANT_REQUESTS = 3.0, 45
"""Requests in a unit: 1.6 times of what two workers compute without any hit."""

OUTPUT_TOKENS = 8
FIT_TOKENS = 1024
"""Beginning of every prompt of the load that fits into the pools."""

Prompt = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Form:
    """A mesh to compare.

    Attributes:
        host, disk: tiers of each worker, in its pools.
        has_far: whether a worker of a second cluster computes long prompts too.
    """

    name: str
    policy: str = "kvmesh"
    host: int = 0
    disk: int = 0
    has_far: bool = False

    def flags(self, model: Path, folder: Path) -> dict[str, Flags]:
        """Of its processes."""
        worker: dict[str, object] = {
            "engine.model": model,
            "engine.dtype": DTYPE,
            "engine.num-blocks": POOL_TOKENS // BLOCK_SIZE,
            "worker.prefill-slots": 2,
            "telemetry.trace.exporter": "none",
        }
        if self.host:
            worker["tiers.host-gib"] = self.host * POOL_GIB
        if self.disk:
            worker |= {"tiers.disk-gib": self.disk * POOL_GIB, "tiers.disk-path": folder / "tier"}
        scheduler: dict[str, object] = {"routing.policy": self.policy}
        found: dict[str, Flags] = {"prefill": worker, "decode": worker}
        if self.has_far:
            scheduler |= {"planning.remote-cluster": "far", "planning.egress-mb-s": 1000.0}
            found[FAR] = {"worker.cluster": "far", "worker.channels": "tcp"}
        found["scheduler"] = scheduler
        deadline = {"limits.ttft-deadline-ms": 30_000}
        found["gateway"] = {"model.path": model, **deadline}
        return found


ALONE, TIERED = "pools alone", "+ host memory"
FORMS = (
    Form("pools alone, cache_aware", "cache_aware"),
    Form(ALONE),
    Form(TIERED, host=TIERS_OF_POOL),
    Form("+ disk", host=1, disk=TIERS_OF_POOL),
    Form("+ disk, second cluster", host=1, disk=TIERS_OF_POOL, has_far=True),
)
BINDS, TIED = 2.0, 0.98
"""Least goodput with host memory of ten pools over that of the pools alone where memory binds; and
where it does not, of any form."""

LOADS = ("sessions", "tenants", "fits")


@dataclass(frozen=True, slots=True)
class Asked:
    """What became of a request.

    Attributes:
        waited_s: until the first token.
    """

    prompt_tokens: int
    cached_tokens: int
    waited_s: float
    is_served: bool

    def is_good(self, unit_s: float) -> bool:
        """Whether its first token came in time."""
        return self.is_served and self.waited_s <= LIMIT * unit_s


class Load:
    """Sends prompts and notes what became of them.

    Args:
        unit_s: seconds of a unit.
        part: all prompts are shorter by this factor.
    """

    def __init__(self, client: ApiClient, seed: str, unit_s: float, part: int = 1) -> None:
        self._client = client
        self._unit_s = unit_s
        self._part = part
        self._draw = random.Random(seed)
        self.asked: list[Asked] = []
        self.seconds = 0.0

    def tokens(self, count: int) -> Prompt:
        """Tokens that nobody had before, `count` of them at full length."""
        return tuple(self._draw.randrange(*VOCAB) for _ in range(count // self._part))

    async def ask(self, prompt: Prompt) -> None:
        """One request, to its end."""
        answer = await self._client.streamed(
            list(prompt), max_tokens=OUTPUT_TOKENS, ignore_eos=True
        )
        cached = answer.cached_tokens if answer.ok else 0
        self.asked.append(Asked(len(prompt), cached, answer.waited_s, answer.ok))

    async def sessions(self, scale: float) -> None:
        """Agents: each prompt is the one before and more; the next turn follows the answer."""
        count = max(round(SESSIONS * scale), 1)
        firsts = [self.tokens(FIRST_TOKENS) for _ in range(count)]
        turns = [[self.tokens(TURN_TOKENS) for _ in range(TURNS - 1)] for _ in range(count)]

        async def one(number: int) -> None:
            await asyncio.sleep(START * self._unit_s * number)
            prompt = firsts[number]
            await self.ask(prompt)
            for more in turns[number]:
                await asyncio.sleep(THINK * self._unit_s)
                prompt += more
                await self.ask(prompt)

        await self._measure([one(number) for number in range(count)])

    async def tenants(self, scale: float) -> None:
        """System prompts of many tenants, some more popular; each was asked for once before."""
        prefixes = [self.tokens(TENANT_TOKENS) for _ in range(TENANTS)]
        shares = list(itertools.accumulate((rank + 1) ** -SKEW for rank in range(TENANTS)))
        count = max(round(TENANT_REQUESTS * scale), 1)
        rate = TENANT_RATE / self._unit_s
        times = itertools.islice(poisson_times(self._draw, rate, 0.0, 10.0 * count / rate), count)
        asked: list[tuple[float, Prompt]] = []
        for at_s in times:
            chosen = prefixes[bisect.bisect(shares, self._draw.random() * shares[-1])]
            asked.append((at_s, chosen + self.tokens(TAIL_TOKENS)))
        for first in range(0, TENANTS, NUM_PREFILL):
            before = prefixes[first : first + NUM_PREFILL]
            await asyncio.gather(*(self.ask(each + self.tokens(TAIL_TOKENS)) for each in before))
        self.asked.clear()

        async def one(at_s: float, prompt: Prompt) -> None:
            await asyncio.sleep(at_s)
            await self.ask(prompt)

        await self._measure([one(*each) for each in asked])

    async def fits(self, scale: float) -> None:
        """One beginning for all prompts: the pools hold everything, and tiers cannot help."""
        beginning = self.tokens(FIT_TOKENS)
        count = max(round(TENANT_REQUESTS / 2 * scale), 1)
        prompts = [beginning + self.tokens(TAIL_TOKENS) for _ in range(count + 1)]
        await self.ask(prompts[0])
        self.asked.clear()

        async def one(number: int) -> None:
            await asyncio.sleep(number * self._unit_s / TENANT_RATE)
            await self.ask(prompts[1 + number])

        await self._measure([one(number) for number in range(count)])

    async def _measure(self, requests: Sequence[Coroutine[Any, Any, None]]) -> None:
        began = time.perf_counter()
        await asyncio.gather(*requests)
        self.seconds = time.perf_counter() - began


def row_of(form: str, load: str, asked: Sequence[Asked], seconds: float, unit_s: float) -> Row:
    """The numbers of one load; times in milliseconds."""
    times = [1e3 * each.waited_s for each in asked if each.is_served] or [0.0]
    tokens = sum(each.prompt_tokens for each in asked)
    good = sum(each.is_good(unit_s) for each in asked)
    return {
        "load": load,
        "form": form,
        "requests": len(asked),
        "failed": sum(not each.is_served for each in asked),
        "hit rate": round(sum(each.cached_tokens for each in asked) / tokens, 4),
        "TTFT p50": round(percentile(times, 50)),
        "TTFT p99": round(percentile(times, 99)),
        "good": round(good / len(asked), 3),
        "goodput/s": round(good / seconds, 3),
    }


@asynccontextmanager
async def mesh_of(form: Form, model: Path, folder: Path) -> AsyncIterator[Mesh]:
    """A mesh of this form, whose workers keep nothing of earlier ones."""
    async with AsyncExitStack() as stack:
        mesh = Mesh(folder, engine="kvmesh", flags=form.flags(model, folder))
        mesh.redis = stack.enter_context(redis_process(folder))
        stack.callback(mesh.reap)
        await mesh.start(NUM_PREFILL + form.has_far, NUM_DECODE)
        yield mesh
        await mesh.idle()
        codes = await mesh.stop()
        assert set(codes.values()) <= {0}, codes
        assert mesh.failures() == [], mesh.failures()


async def unit(model: Path, seed: int) -> float:
    """Seconds of a prompt of `UNIT_TOKENS` while every prefill worker computes one."""
    form = Form(ALONE)
    with tempfile.TemporaryDirectory(prefix="kvmesh-tiers-") as folder:
        async with mesh_of(form, model, Path(folder)) as mesh, ApiClient(mesh.url) as client:
            load = Load(client, f"{seed} unit", 0.0)
            for _ in range(2):
                load.asked.clear()
                prompts = [load.tokens(UNIT_TOKENS) for _ in range(NUM_PREFILL)]
                await asyncio.gather(*map(load.ask, prompts))
    assert all(each.is_served for each in load.asked), load.asked
    return max(each.waited_s for each in load.asked)


async def measure(form: Form, model: Path, scale: float, seed: int, unit_s: float) -> list[Row]:
    """A row for each load, which is the same for every form."""
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="kvmesh-tiers-") as folder:
        async with mesh_of(form, model, Path(folder)) as mesh, ApiClient(mesh.url) as client:
            for name in LOADS:
                load = Load(client, f"{seed} {name}", unit_s)
                await getattr(load, name)(scale)
                rows.append(row_of(form.name, name, load.asked, load.seconds, unit_s))
                say(f"  {rows[-1]}")
    return rows


def checkpoint(folder: Path, seed: int) -> Path:
    """A random model with a tokenizer, which the gateway needs."""
    model = write_checkpoint(SHAPE, folder / "model", seed)
    for name in TOKENIZER:
        shutil.copy(CHECKPOINT / name, model)
    return model


def targets(rows: Sequence[Row]) -> list[Target]:
    """Host memory of ten pools over the pools alone, and tiers where everything fits."""
    found = {(row["load"], row["form"]): row for row in rows}

    def over(load: str, one: str, other: str) -> float | None:
        if not {(load, one), (load, other)} <= found.keys():
            return None
        return float(found[load, one]["goodput/s"] / max(found[load, other]["goodput/s"], 1e-3))

    binding = [
        Target(
            f"{load}: goodput with host memory over pools alone", over(load, TIERED, ALONE), BINDS
        )
        for load in LOADS[:2]
    ]
    lost = [
        Target(
            f"{LOADS[2]}: goodput over pools alone, {form.name}",
            over(LOADS[2], form.name, ALONE),
            TIED,
        )
        for form in FORMS
        if form.policy == "kvmesh" and form.name != ALONE
    ]
    return [*binding, *lost]


def notes(unit_s: float) -> list[str]:
    """Of the table."""
    return f"""\
random Llama of {SHAPE.name}, {DTYPE}, one engine thread in each worker: {NUM_PREFILL} prefill and
 {NUM_DECODE} decode, with pools of {POOL_TOKENS:,} tokens; times in milliseconds
- unit: a prompt of {UNIT_TOKENS:,} tokens while all prefill workers compute one, {unit_s:.2f} s
- good: answered, with a first token within {LIMIT:g} units; hit rate: cached prompt tokens of all
- sessions: {SESSIONS} of {TURNS} turns, {FIRST_TOKENS:,} tokens and {TURN_TOKENS} more in each,
 {THINK:g} units after the answer before; one starts every {START:g} units
- tenants: {TENANTS} system prompts of {TENANT_TOKENS:,} tokens (Zipf {SKEW}), each computed once
 before; {TENANT_RATE:g} requests per unit
- fits: one beginning for all prompts, which the pools hold
- + host memory: {TIERS_OF_POOL} pools of it in each worker; + disk: one pool of host memory and
 {TIERS_OF_POOL} on disk
- second cluster: a prefill worker more, with a disk of its own; on these cores it adds memory and
 no computing""".replace("\n ", " ").split("\n- ")


def main() -> None:
    """Measures and writes bench/results/tier_load.*."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--scale", type=float, default=1.0, help="factor on the requests")
    parser.add_argument("--form", nargs="*", default=[], help="only forms with these names")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, default=RESULTS / "tier_load.json")
    options = parser.parse_args()
    rows: list[Row] = []
    began = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="kvmesh-tiers-") as folder:
        model = checkpoint(Path(folder), options.seed)
        unit_s = asyncio.run(unit(model, options.seed))
        forms = [form for form in FORMS if not options.form or form.name in options.form]
        for number, form in enumerate(forms, start=1):
            spent_s = time.perf_counter() - began
            say(f"[{number}/{len(forms)}] {spent_s:4.0f} s  {form.name}, unit {unit_s:.2f} s")
            rows += asyncio.run(measure(form, model, options.scale, options.seed, unit_s))
    result = document(rows, targets(rows), options.seed, notes(unit_s))
    save(result, options.out)
    sys.stdout.write(markdown(result))


if __name__ == "__main__":
    main()
