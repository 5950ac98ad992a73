"""Workers over real gRPC and real data channels, with the deterministic engine."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Sequence

import pytest

from kvmesh.core.clock import ManualClock
from kvmesh.core.errors import RefusedError
from kvmesh.core.types import Refusal, RefusalReason, Reservation
from kvmesh.engine.protocol import SequenceChunk
from kvmesh.rpc.convert import refusal_from_proto
from kvmesh.runtime.worker import Worker
from kvmesh.runtime.worker_config import EngineSection, WorkerSection
from kvmesh.transfer.alignment import Run
from tests.waiting import until
from tests.worker_driver import (
    Driver,
    Key,
    driving,
    make_spec,
    reference_tokens,
    running_worker,
    until_idle,
)


@pytest.fixture
async def prefill() -> AsyncIterator[Worker]:
    async with running_worker(WorkerSection(id="p0", role="prefill")) as worker:
        yield worker


@pytest.fixture
async def decode() -> AsyncIterator[Worker]:
    async with running_worker(WorkerSection(id="d0", role="decode")) as worker:
        yield worker


@pytest.fixture
async def driver(prefill: Worker, decode: Worker) -> AsyncIterator[Driver]:
    async with driving(prefill, decode) as driver:
        yield driver


def prompt(length: int, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(1, 1000) for _ in range(length)]


@pytest.mark.parametrize("length", [1, 15, 16, 17, 100, 1300])
async def test_disaggregated_tokens_equal_one_engine_alone(
    prefill: Worker, decode: Worker, driver: Driver, length: int
) -> None:
    spec = make_spec(prompt(length), max_tokens=20)
    assert await driver.generate(prefill, decode, Key("r"), spec) == reference_tokens(spec)
    await until_idle(prefill, decode)


@pytest.mark.parametrize("channels", ["local", "shm", "tcp"])
@pytest.mark.parametrize("mode", ["whole", "chunked", "layered", "auto"])
async def test_any_channel_and_mode_gives_the_same_tokens(
    decode: Worker, channels: str, mode: str
) -> None:
    section = WorkerSection(id="p1", role="prefill", channels=channels, transfer_mode=mode)
    engine = EngineSection(kind="fake", max_batch_tokens=64)
    async with running_worker(section, engine) as prefill, driving(prefill, decode) as driver:
        spec = make_spec(prompt(300), max_tokens=8)
        assert await driver.generate(prefill, decode, Key("r"), spec) == reference_tokens(spec)
        await until_idle(prefill, decode)
        (key,) = prefill.channels.statistics().links
        calls = prefill.channels.statistics().links[key].calls
        assert key == ("d0", channels, "sent")
        assert calls == 1 if mode == "whole" else calls > 1


@pytest.mark.parametrize("first", ["commit", "blocks"])
async def test_decode_starts_with_the_last_block_whatever_comes_first(
    prefill: Worker, decode: Worker, driver: Driver, monkeypatch: pytest.MonkeyPatch, first: str
) -> None:
    """The receiver's answer to the blocks is lost on its way until decode has ended."""
    put, commit = prefill.channels.put, prefill.channels.commit
    came, decoded = asyncio.Event(), asyncio.Event()

    async def put_once(reservation: Reservation, runs: Sequence[Run]) -> None:
        if first == "commit":
            await came.wait()
        await put(reservation, runs)
        came.set()
        await decoded.wait()

    async def commit_once(reservation: Reservation, token: int, num_tokens: int) -> None:
        if first == "blocks":
            await came.wait()
        await commit(reservation, token, num_tokens)
        came.set()

    monkeypatch.setattr(prefill.channels, "put", put_once)
    monkeypatch.setattr(prefill.channels, "commit", commit_once)
    spec, key = make_spec(prompt(100), max_tokens=8), Key("r")
    tokens = await driver.tokens_of(prefill, decode, key, spec)
    assert tokens == reference_tokens(spec)
    assert not driver.has_events("prefill", key), "it has not been handed off"
    decoded.set()
    assert (await driver.prefill_event(key)).HasField("handed_off")
    await until_idle(prefill, decode)


@pytest.mark.parametrize("channels", ["local", "shm", "tcp"])
async def test_a_piece_that_is_sent_twice_may_find_the_handoff_complete(
    decode: Worker, monkeypatch: pytest.MonkeyPatch, channels: str
) -> None:
    """As after a connection that is lost before the answer: the second one is dropped."""
    section = WorkerSection(id="p1", role="prefill", channels=channels)
    async with running_worker(section) as prefill, driving(prefill, decode) as driver:
        put = prefill.channels.put

        async def put_twice(reservation: Reservation, runs: Sequence[Run]) -> None:
            await put(reservation, runs)
            await until(lambda: decode.decode.num_reserved == 0, "its commit")
            await put(reservation, [Run(0, run.target_start, run.count) for run in runs])

        monkeypatch.setattr(prefill.channels, "put", put_twice)
        spec = make_spec(prompt(100), max_tokens=30)
        assert await driver.generate(prefill, decode, Key("r"), spec) == reference_tokens(spec)
        await until_idle(prefill, decode)


@pytest.mark.parametrize("reason", [RefusalReason.STALE, RefusalReason.BUSY])
async def test_blocks_that_are_refused_end_the_handoff_though_the_commit_was_taken(
    prefill: Worker,
    decode: Worker,
    driver: Driver,
    monkeypatch: pytest.MonkeyPatch,
    reason: RefusalReason,
) -> None:
    key, arriving = Key("r"), decode.decode.arriving

    async def refused(reservation: Reservation, runs: Sequence[Run]) -> None:
        task = arriving._by_reservation[reservation.reservation_id]
        await until(lambda: task.first_token_id is not None, "the commit")
        driver.cancel_decode(decode, key)
        await until_idle(decode)
        raise RefusedError(Refusal(reason, "these blocks are not taken"))

    monkeypatch.setattr(prefill.channels, "put", refused)
    spec = make_spec(prompt(100), max_tokens=8)
    reserved = await driver.reserve(decode, key, spec)
    await driver.offer(prefill, key, spec, reserved.reserved)
    assert (await driver.prefill_event(key)).HasField("first_token")
    failed = await driver.prefill_event(key)
    assert failed.WhichOneof("event") == "failed"
    assert refusal_from_proto(failed.failed).reason is reason
    await until_idle(prefill, decode)


async def test_blocks_that_are_being_sent_stay_when_their_sequence_is_preempted(
    decode: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    section = WorkerSection(id="p1", role="hybrid", transfer_mode="chunked")
    engine = EngineSection(kind="fake", max_batch_tokens=64)
    async with running_worker(section, engine) as prefill, driving(prefill, decode) as driver:
        core, memory, put = prefill.core, prefill._runner.kv, prefill.channels.put
        plan_step, sending, preempted = core.plan_step, asyncio.Event(), asyncio.Event()
        taken: list[int] = []

        def plan() -> list[SequenceChunk]:
            if sending.is_set() and not preempted.is_set():
                core._running.preempt(next(iter(core._running)))
                # Others take all that is free, and write there.
                taken.extend(core.pool.allocate(core.pool.num_free))
                for block in taken:
                    view = memory.write_view(block, 1)
                    view[:] = bytes(view.nbytes)
                preempted.set()
            return plan_step()

        async def put_later(reservation: Reservation, runs: Sequence[Run]) -> None:
            sending.set()
            await preempted.wait()
            await put(reservation, runs)
            core.pool.release(taken)
            taken.clear()

        monkeypatch.setattr(core, "plan_step", plan)
        monkeypatch.setattr(prefill.channels, "put", put_later)
        spec = make_spec(prompt(300), max_tokens=8)
        assert await driver.generate(prefill, decode, Key("r"), spec) == reference_tokens(spec)
        assert core.statistics().preemptions_total == 1
        await until_idle(prefill, decode)


@pytest.mark.parametrize("length", [1, 16, 100])
async def test_aggregated_tokens_equal_one_engine_alone(
    prefill: Worker, decode: Worker, driver: Driver, length: int
) -> None:
    spec = make_spec(prompt(length), max_tokens=20, temperature=1.0, seed=7)
    assert await driver.generate(decode, decode, Key("r"), spec) == reference_tokens(spec)
    await until_idle(prefill, decode)


@pytest.mark.parametrize("placement", ["disaggregated", "aggregated"])
async def test_a_sequence_that_waits_for_kv_no_more_is_told_at_once(
    prefill: Worker,
    decode: Worker,
    driver: Driver,
    placement: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    told: list[tuple[int, int]] = []

    def notify() -> None:
        load = decode.load()
        told.append((load.decode_reserved, load.decode_running))

    monkeypatch.setattr(decode._registration, "notify", notify)
    computes = decode if placement == "aggregated" else prefill
    await driver.generate(computes, decode, Key("r"), make_spec(prompt(40), max_tokens=4))
    await until_idle(prefill, decode)
    states = [state for n, state in enumerate(told) if n == 0 or state != told[n - 1]]
    assert states == [(1, 0), (0, 1), (0, 0)]


async def test_one_token_answer_needs_no_transfer(
    prefill: Worker, decode: Worker, driver: Driver
) -> None:
    for worker in (prefill, decode):
        spec = make_spec(prompt(40), max_tokens=1)
        tokens = await driver.generate(worker, decode, Key(worker.worker_id), spec)
        assert tokens == reference_tokens(spec)
    await until_idle(prefill, decode)


async def test_a_repeated_prompt_is_neither_computed_nor_sent_again(
    prefill: Worker, decode: Worker, driver: Driver
) -> None:
    spec = make_spec(prompt(100), max_tokens=4)
    await driver.generate(prefill, decode, Key("first"), spec)
    await until_idle(prefill, decode)
    reserved = await driver.reserve(decode, Key("second"), spec)
    assert reserved.reserved.num_cached_blocks == 6
    assert reserved.reserved.num_blocks == 1
    accepted = await driver.offer(prefill, Key("second"), spec, reserved.reserved)
    assert accepted.accepted.cached_tokens == 96
    first = await driver.prefill_event(Key("second"))
    handed = await driver.prefill_event(Key("second"))
    assert first.first_token.cached_tokens == 96
    assert handed.handed_off.bytes == prefill._runner.spec.layout.block_bytes
    assert handed.handed_off.calls == 1
    driver.cancel_decode(decode, Key("second"))
    await until_idle(prefill, decode)


async def test_a_busy_prefill_rejects_and_never_queues(decode: Worker) -> None:
    slow = EngineSection(kind="fake", fake_step_s=0.2)
    async with (
        running_worker(WorkerSection(id="slow", role="prefill"), slow) as prefill,
        driving(prefill, decode) as driver,
    ):
        spec = make_spec(prompt(40), max_tokens=2)
        reservations = [await driver.reserve(decode, Key(name), spec) for name in ("a", "b")]
        answers = [
            await driver.offer(prefill, Key(name), spec, reservation.reserved)
            for name, reservation in zip(("a", "b"), reservations, strict=True)
        ]
        assert [answer.WhichOneof("event") for answer in answers] == ["accepted", "rejected"]
        assert answers[1].rejected.retry_after_ms > 0
        assert not answers[1].rejected.work_done
        while (await driver.prefill_event(Key("a"))).WhichOneof("event") != "handed_off":
            pass
        again = await driver.offer(prefill, Key("b"), spec, reservations[1].reserved)
        assert again.WhichOneof("event") == "accepted"
        driver.cancel_prefill(prefill, Key("b"))
        driver.cancel_decode(decode, Key("b"))
        await until_idle(prefill, decode)


@pytest.mark.parametrize("placement", ["disaggregated", "aggregated"])
@pytest.mark.parametrize("stage", ["reserved", "accepted", "first_token", "decoding"])
@pytest.mark.parametrize("how", ["cancel", "disconnect"])
async def test_cancel_at_any_stage_frees_everything(stage: str, how: str, placement: str) -> None:
    engine = EngineSection(kind="fake", fake_step_s=0.01, max_batch_tokens=64)
    async with (
        running_worker(WorkerSection(id="p", role="prefill"), engine) as other,
        running_worker(WorkerSection(id="d", role="decode"), engine) as decode,
        driving(other, decode) as driver,
    ):
        prefill = other if placement == "disaggregated" else decode
        key, spec = Key("r"), make_spec(prompt(500), max_tokens=200)
        reserved = await driver.reserve(decode, key, spec)
        if stage != "reserved":
            await driver.offer(prefill, key, spec, reserved.reserved)
        if stage in ("first_token", "decoding"):
            await driver.prefill_event(key)
        if stage == "decoding":
            await driver.decode_event(key)
        if how == "cancel":
            driver.cancel_prefill(prefill, key)
            driver.cancel_decode(decode, key)
        else:
            await driver.disconnect(prefill, "prefill")
            await driver.disconnect(decode, "decode")
        await until_idle(other, decode)


@pytest.mark.parametrize("placement", ["disaggregated", "aggregated"])
async def test_a_cancel_that_comes_with_its_offer_frees_everything(placement: str) -> None:
    engine = EngineSection(kind="fake", fake_step_s=0.01, max_batch_tokens=64)
    async with (
        running_worker(WorkerSection(id="p", role="prefill"), engine) as other,
        running_worker(WorkerSection(id="d", role="decode"), engine) as decode,
        driving(other, decode) as driver,
    ):
        prefill = other if placement == "disaggregated" else decode
        key, spec = Key("r"), make_spec(prompt(500), max_tokens=200)
        reserved = await driver.reserve(decode, key, spec)
        accepted = await driver.offer_cancelled(prefill, key, spec, reserved.reserved)
        assert accepted.WhichOneof("event") == "accepted"
        driver.cancel_decode(decode, key)
        await until_idle(other, decode)


async def test_cancelled_reservation_frees_the_local_prefill_slot() -> None:
    engine = EngineSection(kind="fake", fake_step_s=0.05, max_batch_tokens=16)
    async with running_worker(WorkerSection(id="w"), engine) as worker, driving(worker) as driver:
        spec = make_spec(prompt(200), max_tokens=5)
        reserved = await driver.reserve(worker, Key("r"), spec)
        await driver.offer(worker, Key("r"), spec, reserved.reserved)
        driver.cancel_decode(worker, Key("r"))
        event = await driver.prefill_event(Key("r"))
        assert event.WhichOneof("event") == "failed"
        await until_idle(worker)


async def test_a_lease_that_nobody_renews_ends(prefill: Worker) -> None:
    async with (
        running_worker(WorkerSection(id="short", lease_s=1.0)) as decode,
        driving(decode) as driver,
    ):
        spec = make_spec(prompt(40))
        await driver.reserve(decode, Key("forgotten"), spec)
        await driver.reserve(decode, Key("kept"), spec)
        async with asyncio.timeout(10):
            while not driver.has_events("decode", Key("forgotten")):
                driver.renew(decode, "kept")
                await asyncio.sleep(0.01)
        event = await driver.decode_event(Key("forgotten"))
        assert event.WhichOneof("event") == "failed"
        assert not driver.has_events("decode", Key("kept"))
        driver.cancel_decode(decode, Key("kept"))
        await until_idle(decode)


async def test_leases_that_end_at_the_same_moment_all_end() -> None:
    async with (
        running_worker(WorkerSection(id="short", lease_s=60.0)) as decode,
        driving(decode) as driver,
    ):
        keys = [Key(f"r{number}") for number in range(3)]
        for key in keys:
            await driver.reserve(decode, key, make_spec(prompt(40)))
        arriving = decode.decode.arriving
        arriving._clock = ManualClock(arriving._clock.now() + 61.0)
        decode.decode.expire_leases()
        for key in keys:
            assert (
                await driver.decode_event(key)
            ).failed.message == "the reservation's lease ended"
        await until_idle(decode)


async def test_writes_without_the_right_claim_fail_and_change_nothing(
    prefill: Worker, decode: Worker, driver: Driver
) -> None:
    spec = make_spec(prompt(64), max_tokens=4)
    reserved = await driver.reserve(decode, Key("r"), spec)
    for field, value in (("capability", b"x" * 16), ("generation", 7), ("reservation_id", 99)):
        key = Key("r", attempt=2 + len(field))
        claim = type(reserved.reserved)()
        claim.CopyFrom(reserved.reserved)
        setattr(claim, field, value)
        assert (await driver.offer(prefill, key, spec, claim)).HasField("accepted")
        assert (await driver.prefill_event(key)).HasField("first_token")
        failed = await driver.prefill_event(key)
        assert failed.WhichOneof("event") == "failed"
        assert failed.failed.work_done
    assert decode.core.statistics().num_held == 1
    driver.cancel_decode(decode, Key("r"))
    await until_idle(prefill, decode)


async def test_decode_refuses_what_cannot_fit_and_what_has_no_slot() -> None:
    section = WorkerSection(id="small", decode_slots=1)
    async with (
        running_worker(section, EngineSection(kind="fake", num_blocks=8)) as decode,
        driving(decode) as driver,
    ):
        too_long = await driver.reserve(decode, Key("long"), make_spec(prompt(128)))
        assert "context of 128" in too_long.refused.message
        await driver.reserve(decode, Key("a"), make_spec(prompt(10)))
        no_slot = await driver.reserve(decode, Key("b"), make_spec(prompt(10)))
        assert "decode slots" in no_slot.refused.message
        driver.cancel_decode(decode, Key("a"))
        await until_idle(decode)


@pytest.mark.parametrize("swap_gib", [0.0, 0.001])
async def test_preempted_sequences_give_the_same_tokens(prefill: Worker, swap_gib: float) -> None:
    section = WorkerSection(id="tight", role="decode")
    engine = EngineSection(kind="fake", num_blocks=24, growth_tokens=0, swap_gib=swap_gib)
    async with running_worker(section, engine) as decode, driving(prefill, decode) as driver:
        specs = {Key(f"r{n}"): make_spec(prompt(60, n), max_tokens=120) for n in range(4)}
        reserved = {key: await driver.reserve(decode, key, spec) for key, spec in specs.items()}
        tokens: dict[Key, list[int]] = {}
        for key, spec in specs.items():
            await driver.offer(prefill, key, spec, reserved[key].reserved)
            tokens[key] = [(await driver.prefill_event(key)).first_token.token_id]
            assert (await driver.prefill_event(key)).HasField("handed_off")
        for key, spec in specs.items():
            while len(tokens[key]) < 120:
                event = await driver.decode_event(key)
                assert event.tokens.first_position == 60 + len(tokens[key])
                tokens[key] += event.tokens.token_ids
            assert tokens[key] == reference_tokens(spec)
        now = decode.core.statistics()
        assert now.preemptions_total > 0
        assert (now.swap.swapped_in_total > 0) is (swap_gib > 0)
        assert now.swap.blocks_kept == 0
        await until_idle(prefill, decode)


async def test_drain_waits_for_the_stream_and_refuses_new_work(
    prefill: Worker, decode: Worker, driver: Driver
) -> None:
    spec = make_spec(prompt(40), max_tokens=60)
    running = asyncio.create_task(driver.generate(prefill, decode, Key("r"), spec))
    while decode.decode.num_tasks == 0:
        await asyncio.sleep(0)
    draining = asyncio.create_task(decode.decode.drain())
    await asyncio.sleep(0)
    refused = await driver.reserve(decode, Key("late"), spec)
    assert refused.WhichOneof("event") == "refused"
    assert await running == reference_tokens(spec)
    await draining
    await until_idle(prefill, decode)
