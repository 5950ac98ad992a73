"""Prompts that are decoded where they are computed, behind a prefix on a third worker: real models,
real channels, and the tokens of one engine that has everything.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from kvmesh.core.errors import LostError
from kvmesh.core.types import Endpoint, PrefixSource, Refusal, RefusalReason, SequenceSpec
from kvmesh.rpc.convert import refusal_from_proto
from kvmesh.rpc.pool_client import PoolClient
from kvmesh.runtime.query_answers import QueryAnswers
from kvmesh.runtime.worker import Worker
from kvmesh.runtime.worker_config import EngineSection, FetchSection, WorkerSection
from kvmesh.transfer.query_ops import QueryGrant
from kvmesh.v1.kv_pool_service_pb2 import LeaseBlocksRequest, ReadLease
from tests.integration.test_prefix_queries import (
    BLOCK,
    CHUNK,
    GREEDY,
    NUM_LAYERS,
    SAMPLED,
    asked,
    prompt,
    queries_of,
    reference,
    spec_of,
)
from tests.transfer_pair import until
from tests.unit.engine.tiny_checkpoint import write_checkpoint
from tests.worker_driver import Driver, Key, driving, running_worker, until_idle

PREFIX = prompt(32)
LATER = GREEDY.max_tokens - 1
"""Tokens that ask for the prefix, after the first one."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("tiny"))


@asynccontextmanager
async def workers(
    folder: Path, query: str = "always"
) -> AsyncIterator[tuple[Worker, Worker, Driver]]:
    """A holder, which has computed the prefix, and a worker that has not."""
    engine = EngineSection(
        model=str(folder), num_blocks=64, block_size=BLOCK, max_batch_tokens=CHUNK, growth_tokens=8
    )
    async with (
        running_worker(WorkerSection(id="h0"), engine) as holder,
        running_worker(WorkerSection(id="d0"), engine, fetch=FetchSection(query=query)) as worker,
        driving(holder, worker) as driver,
    ):
        await driver.generate(holder, holder, Key("prime"), spec_of([*PREFIX, 7]))
        await until_idle(holder)
        yield holder, worker, driver


def source_of(holder: Worker) -> PrefixSource:
    info = holder._info
    blocks = len(PREFIX) // BLOCK
    return PrefixSource(info.worker_id, info.incarnation, info.control_endpoint, blocks)


def turn(seed: int = 1, length: int = 9) -> SequenceSpec:
    return spec_of([*PREFIX, *prompt(length, seed)])


async def nothing_is_left(holder: Worker, worker: Worker) -> None:
    await until_idle(holder, worker)
    leases = holder.pool.statistics()
    assert leases.num_open == leases.expired_total == 0
    holder.pool.check_integrity()


def by_transformers(folder: Path, spec: SequenceSpec) -> list[int]:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokens = list(spec.token_ids)
    with torch.no_grad():
        for _ in range(spec.sampling.max_tokens):
            logits = model(torch.tensor([tokens])).logits[0, -1]
            tokens.append(int(logits.argmax()))
    return tokens[len(spec.token_ids) :]


async def test_prompt_and_answer_ask_where_the_prefix_is(folder: Path) -> None:
    spec = turn()
    expected = by_transformers(folder, spec)
    async with workers(folder) as (holder, worker, driver):
        tokens, _ = await driver.start_from(source_of(holder), worker, spec)
        assert tokens == expected
        assert asked(worker) == NUM_LAYERS * (2 + LATER), "two chunks, then every token"
        assert not any(link.bytes for link in worker.fetcher.statistics().links.values())
        await nothing_is_left(holder, worker)


async def test_several_at_once_with_seeds(folder: Path) -> None:
    async with workers(folder) as (holder, worker, driver):
        specs = [spec_of([*PREFIX, *prompt(5, seed)], SAMPLED) for seed in (1, 2)]
        for spec in specs:
            tokens, _ = await driver.start_from(source_of(holder), worker, spec)
            assert tokens == reference(folder, spec)
        await nothing_is_left(holder, worker)


@pytest.mark.parametrize("number", [0, 3, NUM_LAYERS * 4 + 1])
async def test_a_holder_that_is_lost_costs_time_and_no_token(
    folder: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """Before the first token and in the middle of the answer: the prefix is computed then."""
    seen = 0
    plain = QueryAnswers.compute

    def compute(
        self: QueryAnswers, grant: QueryGrant, operands: memoryview
    ) -> Sequence[memoryview] | Refusal:
        nonlocal seen
        seen += 1
        return (
            Refusal(RefusalReason.LOST, "gone") if seen > number else plain(self, grant, operands)
        )

    async with workers(folder) as (holder, worker, driver):
        monkeypatch.setattr(QueryAnswers, "compute", compute)
        spec = turn()
        tokens, _ = await driver.start_from(source_of(holder), worker, spec)
        assert tokens == reference(folder, spec)
        assert seen == number + 1, "after one failure nothing more is asked"
        await nothing_is_left(holder, worker)


async def test_a_stream_moves_on_to_another_worker(folder: Path) -> None:
    """Its worker is gone after some tokens; prompt and tokens so far go on elsewhere."""
    async with workers(folder) as (holder, worker, driver):
        spec = spec_of([*PREFIX, *prompt(9, seed=1)], SAMPLED)
        whole = reference(folder, spec)
        await driver.start(worker, Key("moved"), spec, source_of(holder))
        while (event := await driver.decode_event(Key("moved"))).WhichOneof("event") != "tokens":
            pass
        assert event.tokens.first_position == len(spec.token_ids) + 1
        driver.cancel_decode(worker, Key("moved"))
        told = whole[:3]
        rest = replace(spec, token_ids=(*spec.token_ids, *told))
        assert await driver.generate(holder, holder, Key("again"), rest) == whole[3:]
        await nothing_is_left(holder, worker)


async def test_a_holder_that_does_not_answer_is_waited_for_once(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither is its prefix fetched then, nor is it asked for the next request."""
    calls = 0

    async def lease(
        self: PoolClient, holder: Endpoint, request: LeaseBlocksRequest, timeout_s: float
    ) -> ReadLease:
        nonlocal calls
        calls += 1
        raise LostError("no answer in time")

    async with workers(folder) as (holder, worker, driver):
        monkeypatch.setattr(PoolClient, "lease", lease)
        for seed in (1, 2):
            spec = turn(seed)
            tokens, _ = await driver.start_from(source_of(holder), worker, spec)
            assert tokens == reference(folder, spec)
            await until_idle(worker)
            worker.core.pool.clear_cached()
        assert calls == 1
        await nothing_is_left(holder, worker)


async def test_a_request_that_ends_while_its_lease_comes_leaves_nothing(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Reserved and offered in two messages, so that a cancel ends the reservation alone."""
    leased, go_on = asyncio.Event(), asyncio.Event()
    plain = PoolClient.lease

    async def lease(
        self: PoolClient, holder: Endpoint, request: LeaseBlocksRequest, timeout_s: float
    ) -> ReadLease:
        found = await plain(self, holder, request, timeout_s)
        leased.set()
        await go_on.wait()
        return found

    async with workers(folder) as (holder, worker, driver):
        monkeypatch.setattr(PoolClient, "lease", lease)
        key, spec = Key("gone"), turn()
        reserved = await driver.reserve(worker, key, spec)
        await driver.offer_from(source_of(holder), worker, key, spec, reserved.reserved)
        await leased.wait()
        driver.cancel_decode(worker, key)
        await until(lambda: not worker.decode.num_tasks)
        go_on.set()
        failed = await driver.prefill_event(key)
        assert refusal_from_proto(failed.failed).reason is RefusalReason.STALE
        assert asked(worker) == 0
        await nothing_is_left(holder, worker)


async def test_by_cost_a_long_prefix_is_asked_for_when_the_answer_is_short(folder: Path) -> None:
    async with workers(folder, "auto") as (holder, worker, driver):
        for num_tokens in (1, CHUNK):
            worker._prompt_time.add(num_tokens, 1.0 * num_tokens)
        fetched = turn(seed=1)
        tokens, _ = await driver.start_from(source_of(holder), worker, fetched)
        assert tokens == reference(folder, fetched)
        assert asked(worker) == 0, "how fast KV would come is not known before it came"
        worker.core.pool.clear_cached()
        for meter in worker.fetcher._links._links.values():
            meter.busy_s = 1e6
        short = replace(turn(seed=2), sampling=replace(GREEDY, max_tokens=2))
        tokens, _ = await driver.start_from(source_of(holder), worker, short)
        assert tokens == reference(folder, short)
        assert asked(worker) == NUM_LAYERS * 3, "two chunks and one more token"
        await nothing_is_left(holder, worker)


async def test_a_holder_that_refuses_is_not_asked(folder: Path) -> None:
    async with workers(folder) as (holder, worker, driver):
        await holder.pool.drain()
        spec = turn()
        tokens, _ = await driver.start_from(source_of(holder), worker, spec)
        assert tokens == reference(folder, spec)
        assert asked(worker) == 0
        counted = queries_of(worker)._metrics.prefixes
        assert counted.labels("asked")._value.get() == 0, "nothing was leased"
        assert counted.labels("left")._value.get() == 1
        await nothing_is_left(holder, worker)
