"""More prompts than two prefill workers can compute, on real services: chains must cost nothing.

A random Llama that reads the embedded model's tokens, two prefill workers and one that decodes,
each with one engine thread. Clients send their next prompt when they have their answer, so there is
always one that waits. One policy lets idle workers compute prompts together, the other one does
not; they take turns, so a machine that becomes slower slows both.
Tests: tests/unit/benchmarks/test_chain_load.py.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import signal
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import ExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path

import aiohttp

from benchmarks.live_mesh import say
from benchmarks.random_llama import SHAPES, write_checkpoint
from benchmarks.result import ROOT, Row, Target, spread
from kvmesh.cli.stack_client import StackClient
from tests.mesh_processes import MODEL, Flags, Mesh
from tests.redis_server import redis_process

POLICIES = {"several": "kvmesh", "one": "joint"}
"""By how many workers may compute a prompt."""

PROMPT_TOKENS = 2048
NUM_CLIENTS = 6
NUM_PROMPTS = 60
"""That count, of each policy in each round."""

TTFT_S = 30.0
RETRY_S = 1.0
"""After a refusal."""

GOAL = 0.99
"""Of the goodput with one worker for each prompt."""

_EMBEDDED = ROOT / "models" / "pydoc-6m"


async def loaded(ask: Callable[[], Awaitable[float | None]], num_prompts: int) -> tuple[int, float]:
    """Keeps all clients busy until so many prompts were answered.

    Args:
        ask: sends a prompt; seconds to its first token, or None if it was refused.

    Returns:
        How many of them were in time, and the seconds it took.
    """
    done: list[float] = []
    ended = asyncio.Event()

    async def client() -> None:
        while True:
            ttft_s = await ask()
            if ttft_s is None:
                await asyncio.sleep(RETRY_S)
                continue
            done.append(ttft_s)
            if len(done) >= num_prompts:
                ended.set()

    started = time.perf_counter()
    clients = [asyncio.create_task(client()) for _ in range(NUM_CLIENTS)]
    waiting = asyncio.create_task(ended.wait())
    finished, _ = await asyncio.wait([waiting, *clients], return_when=asyncio.FIRST_COMPLETED)
    seconds = time.perf_counter() - started
    for each in (waiting, *clients):
        each.cancel()
    await asyncio.gather(waiting, *clients, return_exceptions=True)
    for each in finished - {waiting}:
        await each  # it cannot end but by an error
    good = sum(each <= TTFT_S for each in done[:num_prompts])
    return good, seconds


def model_folder(folder: Path, seed: int) -> Path:
    """A random Llama of 110M with the embedded model's vocabulary."""
    config = json.loads((_EMBEDDED / "config.json").read_text())
    shape = replace(SHAPES["110M"], vocab=config["vocab_size"])
    made = write_checkpoint(shape, folder / "model", seed)
    for each in _EMBEDDED.glob("*token*.json"):
        shutil.copy(each, made)
    return made


def flags_of(model: Path) -> dict[str, Flags]:
    """Flags by service."""
    engine: Flags = {
        "engine.model": model,
        "engine.dtype": "bfloat16",
        "engine.num-threads": 1,
        "engine.num-blocks": 4 * (PROMPT_TOKENS // 16),
    }
    return {
        "prefill": engine,
        "decode": {**engine, "engine.num-blocks": 4 * NUM_CLIENTS * (PROMPT_TOKENS // 16)},
        "scheduler": {"kvmanager.timeout-s": 5.0},
        "gateway": {
            "model.path": model,
            "scheduler.route-timeout-s": 10.0,
            "limits.ttft-deadline-ms": int(1e3 * TTFT_S),
        },
    }


@asynccontextmanager
async def _mesh(folder: Path, flags: dict[str, Flags]) -> AsyncIterator[Mesh]:
    mesh = Mesh(folder, engine="kvmesh", flags=flags)
    with ExitStack() as stack:
        mesh.redis = stack.enter_context(redis_process(folder))
        stack.callback(mesh.reap)
        await mesh.start(num_prefill=2, num_decode=1)
        yield mesh
        codes = await mesh.stop()
        assert set(codes.values()) <= {0}, codes
        assert mesh.failures() == [], mesh.failures()


async def use_policy(mesh: Mesh, policy: str) -> None:
    """Goes on with a scheduler of another policy."""
    child = mesh["scheduler"]
    child.signal(signal.SIGTERM)
    assert await child.exit_code() == 0, "the scheduler stops in order"
    child.flags["routing.policy"] = policy
    await mesh.restart("scheduler")
    await mesh.all_known()


async def num_parts(mesh: Mesh) -> float:
    """Parts that workers computed for others so far."""
    told = [await each.metrics() for each in mesh.workers]
    return sum(each.value("kvmesh_prompt_parts_total", outcome="came") for each in told)


async def rounds(num_rounds: int, seed: int, num_prompts: int) -> list[Row]:
    """Both policies in turns; a row for each."""
    rates: dict[str, list[float]] = {name: [] for name in POLICIES}
    parts = dict.fromkeys(POLICIES, 0.0)
    with tempfile.TemporaryDirectory(prefix="kvmesh-chain-") as scratch:
        folder = Path(scratch)
        (folder / "mesh").mkdir()
        flags = flags_of(model_folder(folder, seed))
        async with (
            _mesh(folder / "mesh", flags) as mesh,
            aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(300)) as session,
        ):
            client = StackClient(session, mesh.url, MODEL, seed)

            async def ask() -> float | None:
                timing = await client.complete(PROMPT_TOKENS, 2)
                return None if timing is None else timing.ttft_s

            for number in range(num_rounds):
                for name in list(POLICIES)[:: 1 if number % 2 else -1]:
                    await use_policy(mesh, POLICIES[name])
                    before = await num_parts(mesh)
                    good, seconds = await loaded(ask, num_prompts)
                    await mesh.idle()
                    rates[name].append(good / seconds)
                    parts[name] += await num_parts(mesh) - before
                    say(f"{name}: {good} of {num_prompts} in time, {good / seconds:.3f}/s")
    return [
        {
            "workers": name,
            "policy": POLICIES[name],
            "tokens": PROMPT_TOKENS,
            "prompts": num_rounds * num_prompts,
            "parts": parts[name],
            "goodput/s": spread(found, 4),
        }
        for name, found in rates.items()
    ] + [{"workers": "several over one", "goodput/s": spread(_ratios(rates), 4)}]


def _ratios(rates: dict[str, list[float]]) -> list[float]:
    return [several / one for several, one in zip(rates["several"], rates["one"], strict=True)]


def targets(rows: Sequence[Row]) -> list[Target]:
    """Of the middle round."""
    share = rows[-1]["goodput/s"]["median"]
    return [Target("saturated: goodput over one worker each", share, GOAL)]
