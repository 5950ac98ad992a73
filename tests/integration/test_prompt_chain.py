"""One prompt on several prefill workers: real models, real channels, the tokens of one engine."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvmesh.core.errors import LostError
from kvmesh.core.types import (
    BlockHash,
    PrefixSource,
    Refusal,
    RefusalReason,
    SamplingParams,
    SequenceSpec,
)
from kvmesh.engine.tiered_cache import TieredCache
from kvmesh.kv.hashing import root_hash
from kvmesh.rpc.part_offer import PartOffer
from kvmesh.runtime.worker import Worker
from kvmesh.runtime.worker_config import EngineSection, TiersSection, WorkerSection
from kvmesh.transfer.frames import PutFrame
from kvmesh.transfer.target import AlreadyThere, WriteGrant
from tests.integration.families import GREEDY, NEW_TOKENS, Checkpoint
from tests.integration.family_shapes import VOCAB_SIZE
from tests.waiting import until
from tests.worker_driver import Driver, Key, driving, make_spec, running_worker, until_idle

BLOCK = 16
CHUNK = 32
LENGTH = 700
SAMPLED = SamplingParams(temperature=0.9, top_p=0.9, seed=7, max_tokens=NEW_TOKENS, ignore_eos=True)

NO_TIERS = TiersSection()


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """All workers share this process: an answer to an offer is late when any of them is busy."""
    monkeypatch.setattr("kvmesh.runtime.prompt_chain.ANSWER_S", 10.0)


@pytest.fixture(scope="module", params=["llama-untied-sharded", "deepseek-v3", "olmo2"])
def checkpoint(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Checkpoint:
    return Checkpoint(request.param, tmp_path_factory.mktemp("checkpoint"), (LENGTH,))


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return Checkpoint("llama-untied-sharded", tmp_path_factory.mktemp("llama"), (LENGTH,))


def spec_of(tokens: list[int], sampling: SamplingParams = GREEDY) -> SequenceSpec:
    sampling = replace(sampling, max_tokens=NEW_TOKENS)
    return SequenceSpec(tuple(tokens), len(tokens), sampling, root_hash("test"))


def part(worker: Worker, num_blocks: int, upstream: PrefixSource | None = None) -> PrefixSource:
    info = worker._info
    return PrefixSource(
        info.worker_id,
        info.incarnation,
        info.control_endpoint,
        num_blocks,
        computes=True,
        upstream=upstream,
    )


@asynccontextmanager
async def mesh(
    checkpoint: Checkpoint, num_prefill: int = 2, **options: Any
) -> AsyncIterator[tuple[list[Worker], Worker, Driver]]:
    """Prefill workers and one that decodes."""
    engine = EngineSection(
        model=str(checkpoint.folder),
        num_blocks=512,
        max_batch_tokens=CHUNK,
        block_size=BLOCK,
        dtype="float32",
    )
    async with AsyncExitStack() as stack:
        prefill = [
            await stack.enter_async_context(
                running_worker(WorkerSection(id=f"p{number}", role="prefill", **options), engine)
            )
            for number in range(num_prefill)
        ]
        decode = await stack.enter_async_context(
            running_worker(WorkerSection(id="d0", role="decode"), engine)
        )
        driver = await stack.enter_async_context(driving(*prefill, decode))
        yield prefill, decode, driver


def computed(worker: Worker) -> int:
    return worker.core.statistics().computed_tokens_total


def outcomes(worker: Worker) -> dict[str, float]:
    found = worker.chain_metrics.parts.collect()
    return {
        sample.labels["outcome"]: sample.value
        for metric in found
        for sample in metric.samples
        if sample.name.endswith("_total")
    }


@pytest.mark.parametrize("channels", ["local", "shm", "tcp"])
async def test_two_workers_give_the_tokens_of_one(checkpoint: Checkpoint, channels: str) -> None:
    (tokens,), (expected,) = checkpoint.prompts, checkpoint.expected
    cut = len(tokens) // BLOCK // 2
    async with mesh(checkpoint, channels=channels) as ((p0, p1), decode, driver):
        found, cached = await driver.generate_from(part(p0, cut), p1, decode, spec_of(tokens))
        assert found == expected
        assert cached == 0
        assert computed(p0) == cut * BLOCK
        assert computed(p1) == len(tokens) - cut * BLOCK
        assert outcomes(p1) == {"accepted": 1, "came": 1}
        await until_idle(p0, p1, decode)


async def test_three_workers_sampled(llama: Checkpoint) -> None:
    (tokens,) = llama.prompts
    spec = spec_of(tokens, SAMPLED)
    blocks = len(tokens) // BLOCK
    async with mesh(llama, 3) as ((p0, p1, p2), decode, driver):
        expected = await driver.generate(p0, decode, Key("alone"), spec)
        await until_idle(p0, decode)
        chain = part(p1, 2 * blocks // 3, part(p2, blocks // 3))
        async with mesh(llama, 0) as (_, other, _):
            await driver.connect(other)
            # The decode worker of before holds the prompt.
            fresh, _ = await driver.generate_from(chain, p0, other, spec)
            assert fresh == expected
            await until_idle(p0, p1, p2, other)


async def test_what_is_cached_in_each_part_is_not_computed(llama: Checkpoint) -> None:
    (tokens,), (expected,) = llama.prompts, llama.expected
    cut = len(tokens) // BLOCK - 1
    assert cut >= 3
    async with mesh(llama) as ((p0, p1), decode, driver):
        # One block is on the last worker, two on the first.
        for worker, length in ((p1, BLOCK), (p0, 2 * BLOCK)):
            spec = spec_of(tokens[: length + 1])
            await driver.generate(worker, decode, Key(f"prime-{length}"), spec)
            await until_idle(worker, decode)
        before = computed(p0), computed(p1)
        found, cached = await driver.generate_from(part(p0, cut), p1, decode, spec_of(tokens))
        assert found == expected
        assert cached == BLOCK
        assert computed(p0) - before[0] == (cut - 2) * BLOCK
        assert computed(p1) - before[1] == len(tokens) - cut * BLOCK
        await until_idle(p0, p1, decode)


@pytest.fixture(scope="module", params=["llama-untied-sharded", "gemma3", "qwen3-next", "lfm2"])
def varied(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    """With full attention alone, windows, linear states, convolutions."""
    return Checkpoint(request.param, tmp_path_factory.mktemp("varied"), (250,))


def holding(worker: Worker, num_blocks: int) -> PrefixSource:
    """A worker as the holder of a prefix."""
    return replace(part(worker, num_blocks), computes=False)


async def prime(driver: Driver, worker: Worker, decode: Worker, tokens: list[int]) -> int:
    """Lets a worker cache a prompt; how much it has computed so far."""
    key = Key(f"prime-{worker._info.worker_id}-{len(tokens)}")
    await driver.generate(worker, decode, key, spec_of(tokens))
    await until_idle(worker, decode)
    return computed(worker)


@pytest.mark.parametrize("holder", ["last", "another"])
async def test_the_first_worker_fetches_a_cached_prefix(varied: Checkpoint, holder: str) -> None:
    """Of the worker that computes the end, or of one that is no part of the chain."""
    (tokens,), (expected,) = varied.prompts, varied.expected
    async with mesh(varied, 3) as ((p0, p1, p2), decode, driver):
        size = p0.core.block_size
        cut, held = 10 * 16 // size, 6 * 16 // size
        owner = p1 if holder == "last" else p2
        before = await prime(driver, owner, decode, tokens[: held * size + 1])
        chain = part(p0, cut, holding(owner, held))
        found, cached = await driver.generate_from(chain, p1, decode, spec_of(tokens))
        assert found == expected
        assert cached == (held * size if owner is p1 else 0)
        assert computed(p0) == (cut - held) * size
        rest = len(tokens) - cut * size
        assert computed(p1) == rest + (before if owner is p1 else 0)
        await until_idle(p0, p1, p2, decode)


async def test_who_is_refused_fetches_the_prefix_itself(llama: Checkpoint) -> None:
    (tokens,), (expected,) = llama.prompts, llama.expected
    async with mesh(llama, 3) as ((p0, p1, p2), decode, driver):
        await prime(driver, p2, decode, tokens[: 2 * BLOCK + 1])
        p0.prefill.draining = True
        chain = part(p0, 3, holding(p2, 2))
        found, cached = await driver.generate_from(chain, p1, decode, spec_of(tokens))
        assert found == expected
        assert cached == 2 * BLOCK
        assert computed(p1) == len(tokens) - cached
        assert outcomes(p1) == {"refused": 1}
        await until_idle(p0, p1, p2, decode)


@asynccontextmanager
async def hybrids(
    checkpoint: Checkpoint, num_blocks: int, tiers: TiersSection = NO_TIERS
) -> AsyncIterator[tuple[Worker, Worker, Worker, Driver]]:
    """Three workers without roles, small steps, and blocks as the model wants them."""
    engine = EngineSection(
        model=str(checkpoint.folder),
        num_blocks=num_blocks,
        max_batch_tokens=48,
        state_interval_tokens=64,
    )
    async with AsyncExitStack() as stack:
        p0, p1, decode = [
            await stack.enter_async_context(
                running_worker(WorkerSection(id=name), engine, tiers=tiers)
            )
            for name in ("p0", "p1", "d0")
        ]
        yield p0, p1, decode, await stack.enter_async_context(driving(p0, p1, decode))


async def test_a_prefix_of_the_last_worker_alone_is_computed_again(tmp_path: Path) -> None:
    """For an ordinary prompt, the first worker would ask the last one about this prefix."""
    checkpoint = Checkpoint("qwen3-untied", tmp_path, (250,))
    (tokens,), (expected,) = checkpoint.prompts, checkpoint.expected
    held, cut = 5 * 16, 8 * 16
    async with hybrids(checkpoint, 512) as (p0, p1, decode, driver):
        source = part(p0, cut // p0.core.block_size)
        # The first worker learns what the last one can do, and what computing costs.
        other = make_spec([(token + 1) % VOCAB_SIZE for token in tokens])
        await driver.generate_from(source, p1, decode, other)
        await driver.generate(p1, p1, Key("held"), make_spec(tokens[: held + 1]))
        await until_idle(p0, p1, decode)
        before = [computed(p0), computed(p1)]
        spec = make_spec(tokens, max_tokens=NEW_TOKENS)
        found, cached = await driver.generate_from(source, p1, decode, spec)
        assert found == expected
        assert cached == held
        assert [computed(p0) - before[0], computed(p1) - before[1]] == [cut, len(tokens) - cut]
        await until_idle(p0, p1, decode)


@pytest.mark.parametrize("family", ["qwen3-untied", "qwen3-next"])
async def test_each_part_loads_what_its_worker_has_in_host_memory(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def has_more(tiers: TieredCache, hashes: Sequence[BlockHash], num_held: int) -> bool:
        return tiers._fills.rooms.resumable(hashes) > num_held

    monkeypatch.setattr(TieredCache, "pays", has_more)  # however slow this machine is
    checkpoint = Checkpoint(family, tmp_path / "model", (250,))
    (prompt,), (expected,) = checkpoint.prompts, checkpoint.expected
    others = [[(token + shift) % VOCAB_SIZE for token in prompt] for shift in range(1, 5)]
    tiers = TiersSection(host_gib=0.1)
    async with hybrids(checkpoint, 64, tiers) as (p0, p1, decode, driver):
        size = p0.core.block_size
        begun = {p0: 6 * 16, p1: 4 * 16}
        for worker, length in begun.items():
            for number, tokens in enumerate([prompt[: length + 1], *others]):
                key = Key(f"fill-{worker.worker_id}-{number}")
                await driver.generate(worker, worker, key, make_spec(tokens))
                await until_idle(worker)
        spec = make_spec(prompt, max_tokens=NEW_TOKENS)
        before = {worker: computed(worker) for worker in begun}
        loaded = {worker: _loaded(worker) for worker in begun}
        cut = 10 * 16 // size
        found, _ = await driver.generate_from(part(p0, cut), p1, decode, spec)
        assert found == expected
        assert computed(p0) - before[p0] == cut * size - begun[p0]
        assert computed(p1) - before[p1] == len(prompt) - cut * size
        for worker in begun:
            assert _loaded(worker) > loaded[worker]
            assert worker.tiers is not None
            worker.tiers.check_integrity()
        await until_idle(p0, p1, decode)


def _loaded(worker: Worker) -> int:
    assert worker.tiers is not None
    return worker.tiers.statistics()[0].loaded_total


async def test_a_worker_that_refuses_costs_an_answer(llama: Checkpoint) -> None:
    (tokens,), (expected,) = llama.prompts, llama.expected
    async with mesh(llama) as ((p0, p1), decode, driver):
        p0.prefill.draining = True
        found, _ = await driver.generate_from(part(p0, 2), p1, decode, spec_of(tokens))
        assert found == expected
        assert computed(p1) == len(tokens)
        assert outcomes(p1) == {"refused": 1}
        await until_idle(p0, p1, decode)


def layer_by_layer(worker: Worker) -> None:
    """Each PUT of a worker has one layer, however fast they are computed."""
    worker.prefill._handover._is_past = lambda _: False


def refuse_layer(worker: Worker, number: int) -> None:
    """Lets a worker refuse one layer of what comes."""
    plain, seen = worker.decode.arriving.begin_write, 0

    def begin_write(put: PutFrame) -> WriteGrant | AlreadyThere | Refusal:
        nonlocal seen
        seen += 1
        if seen > number:
            return Refusal(RefusalReason.STALE, "gone")
        return plain(put)

    worker.decode.arriving.begin_write = begin_write  # type: ignore[method-assign]


@pytest.mark.parametrize("number", [0, 1, 2])
async def test_a_part_that_is_lost_in_any_layer_is_computed_here(
    llama: Checkpoint, number: int
) -> None:
    (tokens,), (expected,) = llama.prompts, llama.expected
    async with mesh(llama, transfer_mode="layered") as ((p0, p1), decode, driver):
        layer_by_layer(p0)
        refuse_layer(p1, number)
        found, _ = await driver.generate_from(part(p0, 2), p1, decode, spec_of(tokens))
        assert found == expected
        assert outcomes(p1) == {"accepted": 1, "lost": 1}
        await until_idle(p0, p1, decode)


@pytest.mark.parametrize("link", ["first", "second"])
@pytest.mark.parametrize("number", [0, 1, 2])
async def test_each_link_of_three_workers_may_be_lost_in_any_layer(
    llama: Checkpoint, link: str, number: int
) -> None:
    (tokens,), (expected,) = llama.prompts, llama.expected
    async with mesh(llama, 3, transfer_mode="layered") as ((p0, p1, p2), decode, driver):
        sender, receiver = (p2, p1) if link == "first" else (p1, p0)
        layer_by_layer(sender)
        refuse_layer(receiver, number)
        blocks = len(tokens) // BLOCK
        chain = part(p1, 2 * blocks // 3, part(p2, blocks // 3))
        found, _ = await driver.generate_from(chain, p0, decode, spec_of(tokens))
        assert found == expected
        assert outcomes(receiver) == {"accepted": 1, "lost": 1}
        await until_idle(p0, p1, p2, decode)


@pytest.mark.parametrize("number", [0, 1, 2])
async def test_a_part_that_stops_coming_is_computed_here_when_its_lease_ends(
    llama: Checkpoint, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The worker hangs in a layer: it says nothing, and its stream stays open."""
    (tokens,), (expected,) = llama.prompts, llama.expected
    async with mesh(llama, lease_s=0.5, transfer_mode="layered") as ((p0, p1), decode, driver):
        layer_by_layer(p0)
        goes_on = asyncio.Event()
        plain, seen = p0.prefill._channels.put, 0

        async def put(*arguments: Any) -> None:
            nonlocal seen
            seen += 1
            if seen > number:
                await goes_on.wait()
            await plain(*arguments)

        monkeypatch.setattr(p0.prefill._channels, "put", put)
        found, _ = await driver.generate_from(part(p0, 2), p1, decode, spec_of(tokens))
        assert found == expected
        assert outcomes(p1) == {"accepted": 1, "lost": 1}
        goes_on.set()
        await until_idle(p0, p1, decode)


async def test_a_cancelled_prompt_ends_at_every_worker(
    llama: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tokens,) = llama.prompts
    async with mesh(llama) as ((p0, p1), decode, driver):
        never = asyncio.Event()

        async def put(*_: Any) -> None:
            await never.wait()

        monkeypatch.setattr(p0.prefill._channels, "put", put)
        key, spec = Key("cancelled"), spec_of(tokens)
        reserved = await driver.reserve(decode, key, spec)
        await driver.offer_from(part(p0, 2), p1, key, spec, reserved.reserved)
        await until(lambda: bool(p1.core._in_flight), "the step waits for its first layer")
        driver.cancel_prefill(p1, key)
        driver.cancel_decode(decode, key)
        await until_idle(p0, p1, decode)
        assert outcomes(p1)["accepted"] == 1


async def test_an_upstream_worker_whose_stream_ends_is_not_waited_for(
    llama: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tokens,), (expected,) = llama.prompts, llama.expected
    async with mesh(llama, transfer_mode="layered") as ((p0, p1), decode, driver):
        layer_by_layer(p0)
        came, is_lost = asyncio.Event(), asyncio.Event()
        end_write, put = p1.decode.arriving.end_write, p0.prefill._channels.put
        seen = 0

        def end_first_write(grant: WriteGrant, ok: bool) -> None:
            end_write(grant, ok)
            came.set()

        async def put_one_layer(*arguments: Any) -> None:
            nonlocal seen
            seen += 1
            if seen > 1:
                await is_lost.wait()
            await put(*arguments)

        async def handed_off(self: PartOffer) -> None:
            await came.wait()
            # Set when the loss has been seen, which is in this step of the task.
            asyncio.get_running_loop().call_soon(is_lost.set)
            raise LostError("the stream ended")

        monkeypatch.setattr(p1.decode.arriving, "end_write", end_first_write)
        monkeypatch.setattr(p0.prefill._channels, "put", put_one_layer)
        monkeypatch.setattr(PartOffer, "handed_off", handed_off)
        found, _ = await driver.generate_from(part(p0, 2), p1, decode, spec_of(tokens))
        assert found == expected
        assert outcomes(p1) == {"accepted": 1, "lost": 1}
        await until_idle(p0, p1, decode)
