"""Prefill workers that ask a decode worker for the prefix it holds: real models, real channels."""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from kvmesh.core.errors import RefusedError
from kvmesh.core.types import (
    Endpoint,
    PrefixSource,
    Refusal,
    RefusalReason,
    SamplingParams,
    SequenceSpec,
)
from kvmesh.kv.hashing import HashChain, join_hashes, root_hash
from kvmesh.rpc.convert import kv_layout_to_proto, reservation_from_proto
from kvmesh.rpc.pool_client import PoolClient
from kvmesh.runtime.prefix_queries import PrefixQueries
from kvmesh.runtime.query_answers import QueryAnswers
from kvmesh.runtime.worker import Worker
from kvmesh.runtime.worker_config import EngineSection, FetchSection, WorkerSection
from kvmesh.transfer.attend import ATTEND, AttendArguments
from kvmesh.transfer.data_server import DataAddress, DataServer
from kvmesh.transfer.holder import Holder
from kvmesh.transfer.query_line import Question
from kvmesh.transfer.query_ops import QueryGrant
from kvmesh.transfer.reader import ReadLease
from kvmesh.transfer.remote_attention import PartialAnswer
from kvmesh.transfer.remote_blocks import RemoteBlocks
from kvmesh.v1.kv_pool_service_pb2 import LeaseBlocksRequest
from tests.remote_prefix import TinyEngine
from tests.unit.engine.tiny_checkpoint import write_checkpoint
from tests.worker_driver import Driver, Key, driving, running_worker, until_idle

BLOCK, CHUNK, NUM_LAYERS = 4, 8, 2
ALWAYS = FetchSection(query="always")
GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
SAMPLED = replace(GREEDY, temperature=1.0, top_p=0.9, seed=5)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("tiny"))


def spec_of(tokens: Sequence[int], sampling: SamplingParams = GREEDY) -> SequenceSpec:
    return SequenceSpec(tuple(tokens), len(tokens), sampling, root_hash("test"))


def prompt(length: int, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(3, 64) for _ in range(length)]


def reference(folder: Path, spec: SequenceSpec) -> list[int]:
    engine = TinyEngine(folder)
    tokens = engine.generate(spec)
    engine.close()
    return tokens


@asynccontextmanager
async def workers(
    folder: Path, fetch: FetchSection = ALWAYS, **section: Any
) -> AsyncIterator[tuple[Worker, Worker, Driver]]:
    engine = EngineSection(
        model=str(folder), num_blocks=64, block_size=BLOCK, max_batch_tokens=CHUNK, growth_tokens=8
    )
    prefill = WorkerSection(id="p0", role="prefill", **section)
    async with (
        running_worker(prefill, engine, fetch=fetch) as p0,
        running_worker(WorkerSection(id="d0", role="decode"), engine) as d0,
        driving(p0, d0) as driver,
    ):
        yield p0, d0, driver


def queries_of(worker: Worker) -> PrefixQueries:
    assert worker.queries is not None
    return worker.queries


def asked(worker: Worker) -> int:
    return queries_of(worker)._asker.asked


@pytest.mark.parametrize("channels", ["local,shm,tcp", "tcp"])
@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
async def test_a_second_turn_asks_for_the_first_and_moves_only_what_is_new(
    folder: Path, sampling: SamplingParams, channels: str
) -> None:
    async with workers(folder, channels=channels) as (p0, d0, driver):
        first = spec_of(prompt(30), sampling)
        answer = await driver.generate(d0, d0, Key("first"), first)
        await until_idle(p0, d0)
        second = spec_of([*first.token_ids, *answer, *prompt(9, seed=1)], sampling)
        # 37 of 47 tokens have KV at the decode worker: 9 blocks.
        assert await driver.generate(p0, d0, Key("second"), second) == reference(folder, second)
        assert asked(p0) == NUM_LAYERS * 2, "11 new tokens are two chunks"
        (link,) = p0.channels.statistics().links.values()
        layout = p0.core.spec.layout
        assert link.bytes == (12 - 9) * layout.block_bytes, "the prefix stayed where it was"
        await until_idle(p0, d0)
        assert p0.core.pool.held_hashes() == []


@pytest.mark.parametrize("mode", ["whole", "chunked", "layered"])
async def test_any_transfer_mode_hands_over_what_was_computed(folder: Path, mode: str) -> None:
    async with workers(folder, transfer_mode=mode) as (p0, d0, driver):
        await driver.generate(d0, d0, Key("first"), spec_of(prompt(30)))
        second = spec_of([*prompt(30), *prompt(20, seed=2)])
        assert await driver.generate(p0, d0, Key("second"), second) == reference(folder, second)
        assert asked(p0) > 0
        await until_idle(p0, d0)


async def test_what_the_prefill_worker_has_itself_is_not_asked_for(folder: Path) -> None:
    async with workers(folder) as (p0, d0, driver):
        spec = spec_of(prompt(30))
        await driver.generate(p0, d0, Key("first"), spec)
        assert await driver.generate(p0, d0, Key("again"), spec) == reference(folder, spec)
        assert asked(p0) == 0
        await until_idle(p0, d0)


async def refuse_from(d0: Worker, monkeypatch: pytest.MonkeyPatch, number: int) -> list[int]:
    """Makes the holder lose each question from this one on; gives the layers that it saw."""
    layers: list[int] = []
    plain = QueryAnswers.compute

    def compute(
        self: QueryAnswers, grant: QueryGrant, operands: memoryview
    ) -> Sequence[memoryview] | Refusal:
        layers.append(grant.work.arguments.layer)
        if len(layers) > number:
            return Refusal(RefusalReason.LOST, "made up")
        return plain(self, grant, operands)

    monkeypatch.setattr(QueryAnswers, "compute", compute)
    return layers


@pytest.mark.parametrize("number", [0, 1, 2, 3])
async def test_an_answer_that_does_not_come_is_computed_instead(
    folder: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    async with workers(folder) as (p0, d0, driver):
        await driver.generate(d0, d0, Key("first"), spec_of(prompt(30)))
        layers = await refuse_from(d0, monkeypatch, number)
        second = spec_of([*prompt(30), *prompt(10, seed=1)], SAMPLED)
        assert await driver.generate(p0, d0, Key("second"), second) == reference(folder, second)
        assert len(layers) == number + 1, "after one failure nothing more is asked"
        assert queries_of(p0)._asker.lost == 1
        await until_idle(p0, d0)


async def test_whoever_cannot_answer_is_not_asked_twice(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with workers(folder) as (p0, d0, driver):
        await driver.generate(d0, d0, Key("first"), spec_of(prompt(30)))
        monkeypatch.setattr(QueryAnswers, "ops", frozenset())
        for name, seed in (("second", 1), ("third", 2)):
            spec = spec_of([*prompt(30), *prompt(10, seed)])
            assert await driver.generate(p0, d0, Key(name), spec) == reference(folder, spec)
        assert asked(p0) == 1
        await until_idle(p0, d0)


async def test_a_holder_with_too_many_questions_is_left_alone_for_a_moment(folder: Path) -> None:
    async with workers(folder) as (p0, d0, driver):
        assert d0.answers is not None
        d0.answers._max_open = 0
        await driver.generate(d0, d0, Key("first"), spec_of(prompt(30)))
        for name, seed in (("second", 1), ("third", 2)):
            spec = spec_of([*prompt(30), *prompt(10, seed)])
            assert await driver.generate(p0, d0, Key(name), spec) == reference(folder, spec)
        assert asked(p0) == 1
        assert d0.query_metrics.answers.labels("refused", "busy")._value.get() == 1
        await until_idle(p0, d0)


@pytest.mark.parametrize("side", ["prefill", "decode", "both"])
async def test_a_cancel_under_a_question_leaves_nothing(
    folder: Path, monkeypatch: pytest.MonkeyPatch, side: str
) -> None:
    computing, may_go_on = threading.Event(), threading.Event()
    plain = QueryAnswers.compute

    def compute(
        self: QueryAnswers, grant: QueryGrant, operands: memoryview
    ) -> Sequence[memoryview] | Refusal:
        computing.set()
        may_go_on.wait(10)
        return plain(self, grant, operands)

    async with workers(folder) as (p0, d0, driver):
        await driver.generate(d0, d0, Key("first"), spec_of(prompt(30)))
        monkeypatch.setattr(QueryAnswers, "compute", compute)
        second = spec_of([*prompt(30), *prompt(10, seed=1)])
        reserved = await driver.reserve(d0, Key("second"), second)
        accepted = await driver.offer(p0, Key("second"), second, reserved.reserved)
        assert accepted.accepted.cached_tokens == 28
        assert await asyncio.to_thread(computing.wait, 10)
        assert d0.core.pool.statistics().num_referenced > 0
        if side != "decode":
            driver.cancel_prefill(p0, Key("second"))
        if side != "prefill":
            driver.cancel_decode(d0, Key("second"))
            while d0.decode.num_tasks:
                await asyncio.sleep(0)
            assert not d0.core.pool.is_idle, "blocks stay while somebody computes on them"
        may_go_on.set()
        if side == "prefill":
            driver.cancel_decode(d0, Key("second"))
        await until_idle(p0, d0)


async def test_a_holder_that_dies_under_a_question_costs_the_attempt_and_no_token(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a gateway does then: the same prompt with a reservation elsewhere."""
    computing, may_go_on = threading.Event(), threading.Event()

    def compute(self: QueryAnswers, grant: QueryGrant, operands: memoryview) -> Refusal:
        computing.set()
        may_go_on.wait(10)
        return Refusal(RefusalReason.LOST, "too late")

    servers: list[DataServer] = []

    class Kept(DataServer):
        async def start(self) -> DataAddress:
            servers.append(self)
            return await super().start()

    engine = EngineSection(model=str(folder), num_blocks=64, block_size=BLOCK)
    spec = spec_of([*prompt(30), *prompt(10, seed=1)], SAMPLED)
    monkeypatch.setattr("kvmesh.runtime.worker.DataServer", Kept)
    async with (
        workers(folder) as (p0, d0, driver),
        running_worker(WorkerSection(id="d1", role="decode"), engine) as dying,
    ):
        await driver.connect(dying)
        await driver.generate(dying, dying, Key("first"), spec_of(prompt(30)))
        with monkeypatch.context() as patch:
            patch.setattr(QueryAnswers, "compute", compute)
            reserved = await driver.reserve(dying, Key("second"), spec)
            await driver.offer(p0, Key("second"), spec, reserved.reserved)
            assert await asyncio.to_thread(computing.wait, 10)
            closing = asyncio.create_task(servers[-1].close())
            await asyncio.sleep(0)
            may_go_on.set()
            await closing
        event = await driver.prefill_event(Key("second"))
        if event.WhichOneof("event") == "first_token":  # else a chunk could not leave before it
            event = await driver.prefill_event(Key("second"))
        assert event.WhichOneof("event") == "failed"
        driver.cancel_decode(dying, Key("second"))
        again = Key("second", attempt=2)
        assert await driver.generate(p0, d0, again, spec) == reference(folder, spec)
        await until_idle(p0, d0, dying)


async def test_by_cost_a_prefix_is_asked_for_once_steps_are_known_to_be_slow(
    folder: Path,
) -> None:
    async with workers(folder, FetchSection(query="auto")) as (p0, d0, driver):
        await driver.generate(d0, d0, Key("first"), spec_of(prompt(60)))
        computed = spec_of([*prompt(60), *prompt(4, seed=1)])
        assert await driver.generate(p0, d0, Key("a"), computed) == reference(folder, computed)
        assert asked(p0) == 0, "nothing is known yet"
        await driver.generate(d0, d0, Key("b"), spec_of(prompt(60, seed=3)))
        for num_tokens in (1, CHUNK):
            p0._prompt_time.add(num_tokens, 10.0 * num_tokens)
        cheap = spec_of([*prompt(60, seed=3), *prompt(4, seed=1)])
        assert await driver.generate(p0, d0, Key("c"), cheap) == reference(folder, cheap)
        assert asked(p0) == NUM_LAYERS
        await until_idle(p0, d0)


async def test_a_worker_that_must_not_ask_computes(folder: Path) -> None:
    async with workers(folder, FetchSection(query="never")) as (p0, d0, driver):
        await driver.generate(d0, d0, Key("first"), spec_of(prompt(30)))
        spec = spec_of([*prompt(30), *prompt(10, seed=1)])
        assert await driver.generate(p0, d0, Key("second"), spec) == reference(folder, spec)
        assert p0.queries is None
        await until_idle(p0, d0)


async def test_a_read_lease_is_a_right_to_ask_while_it_lasts(folder: Path) -> None:
    async with workers(folder) as (p0, d0, driver):
        spec = spec_of(prompt(30))
        await driver.generate(d0, d0, Key("first"), spec)
        hashes = HashChain(spec.root_hash, BLOCK, spec.token_ids).hashes
        client = PoolClient()
        port = d0._context.port
        request = LeaseBlocksRequest(
            incarnation=d0.incarnation,
            reader_worker_id="p0",
            layout=kv_layout_to_proto(d0.core.spec.layout),
            block_hashes=join_hashes(hashes),
        )
        message = await client.lease(Endpoint("127.0.0.1", port), request, 5)
        lease = ReadLease(
            message.lease_id,
            d0.worker_id,
            message.incarnation,
            message.generation,
            message.capability,
            Endpoint(message.data_endpoint.host, message.data_endpoint.port),
        )
        asker = queries_of(p0)._asker
        queries = torch.randn(3, 4, 8)
        operand = queries.view(torch.uint8).numpy().data.cast("B")

        def ask(claimed: ReadLease, blocks: range) -> PartialAnswer:
            remote = RemoteBlocks(asker, Holder.of_lease(claimed), blocks)
            return remote.ask(1, operand, queries.shape, 0.5).wait()

        answer = await asyncio.to_thread(ask, lease, range(2, 7))
        partial = d0._runner.partial_attention
        assert partial is not None
        held = d0.core.pool.match(hashes)[2:7]
        assert (bytes(answer.output), bytes(answer.lse)) == tuple(
            bytes(part) for part in partial.attend(1, held, operand, 0.5)
        )
        with pytest.raises(RefusedError, match=r"^blocks: 2\+6 of 7"):
            await asyncio.to_thread(ask, lease, range(2, 8))
        for wrong in (
            replace(lease, capability=b"guess"),
            replace(lease, generation=2),
            replace(lease, lease_id=99),
        ):
            with pytest.raises(RefusedError):
                await asyncio.to_thread(ask, wrong, range(2))
        d0.pool._table.close(lease.lease_id, lease.incarnation, lease.capability, 0.0)
        d0.pool.expire_leases()
        d0.pool._release()
        await client.close()
        await until_idle(p0, d0)


async def test_damaged_arguments_are_answered_or_refused_and_the_worker_goes_on(
    folder: Path,
) -> None:
    rng = random.Random(7)
    async with workers(folder) as (p0, d0, driver):
        await driver.generate(d0, d0, Key("first"), spec_of(prompt(30)))
        reserved = await driver.reserve(d0, Key("second"), spec_of([*prompt(30), 5, 6]))
        holder = Holder.of_reservation(reservation_from_proto(reserved.reserved))
        good = AttendArguments(
            kind=holder.kind,
            claim=holder.claim,
            first=0,
            count=7,
            layer=1,
            num_queries=3,
            num_heads=4,
            head_dim=8,
            dtype="float32",
            scale=0.5,
        )
        asker = queries_of(p0)._asker

        def ask(arguments: bytes) -> str:
            into = [memoryview(bytearray(good.answer_bytes))]
            operands = memoryview(bytearray(rng.randbytes(good.operand_bytes)))
            question = Question(ATTEND, arguments, operands, into)
            try:
                asker.send(holder, [question])
                asker.receive(holder, [question])
            except RefusedError as error:
                return error.refusal.reason.value
            return "answered"

        outcomes = {"answered": 0, "invalid": 0, "stale": 0}
        for _ in range(150):
            damaged = bytearray(good.encode())
            damaged[rng.randrange(len(damaged))] ^= 1 << rng.randrange(8)
            outcomes[await asyncio.to_thread(ask, bytes(damaged))] += 1
        assert all(outcomes.values()), outcomes
        assert await asyncio.to_thread(ask, good.encode()) == "answered"
        driver.cancel_decode(d0, Key("second"))
        while d0.decode.num_tasks:
            await asyncio.sleep(0)
        assert await asyncio.to_thread(ask, good.encode()) == "stale"
        await until_idle(p0, d0)


async def test_steps_that_wait_for_answers_tell_nothing_about_computing(folder: Path) -> None:
    async with workers(folder) as (p0, d0, driver):
        await driver.generate(d0, d0, Key("first"), spec_of(prompt(30)))
        assert d0._prompt_time.of(100) > 0.0
        second = spec_of([*prompt(30), *prompt(20, seed=2)])
        await driver.generate(p0, d0, Key("second"), second)
        assert asked(p0) > 0
        assert p0._prompt_time.of(100) == 0.0
        await until_idle(p0, d0)


@pytest.mark.parametrize("mode", ["always", "never"])
async def test_who_asks_fetches_nothing_and_who_must_not_ask_fetches(
    folder: Path, mode: str
) -> None:
    """The route names the decode worker as a source of the prefix that it holds."""
    async with workers(folder, FetchSection(query=mode)) as (p0, d0, driver):
        await driver.generate(d0, d0, Key("first"), spec_of(prompt(30)))
        await until_idle(p0, d0)
        spec = spec_of([*prompt(30), *prompt(10, seed=1)], SAMPLED)
        control = Endpoint("127.0.0.1", d0._context.port)
        source = PrefixSource(d0.worker_id, d0.incarnation, control, 7)
        tokens, _ = await driver.generate_from(source, p0, d0, spec)
        assert tokens == reference(folder, spec)
        await until_idle(p0, d0)
        fetched = d0.pool.statistics().opened_total
        if mode == "always":
            assert (asked(p0), fetched) == (NUM_LAYERS * 2, 0)
        else:
            assert fetched == 1
