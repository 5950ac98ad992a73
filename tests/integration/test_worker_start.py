"""A worker that is asked to reserve and to compute the prompt in one message."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from kvmesh.runtime.worker_config import EngineSection, WorkerSection
from tests.integration.test_worker import prompt
from tests.worker_driver import (
    Driver,
    Key,
    make_spec,
    reference_tokens,
    running_worker,
    until_idle,
)

SLOW = EngineSection(kind="fake", fake_step_s=0.02, max_batch_tokens=64)


async def rest(driver: Driver, key: Key) -> tuple[list[int], list[Any]]:
    """All tokens, and the events of the prefill side, until the last token."""
    tokens: list[int] = []
    said: list[Any] = []
    finish = 0
    while not finish:
        event = await driver.decode_event(key)
        if event.WhichOneof("event") == "tokens":
            tokens += event.tokens.token_ids
            finish = event.tokens.finish_reason
        else:
            said.append(event.prefill)
            assert event.prefill.WhichOneof("event") == "first_token", event
            tokens.append(event.prefill.first_token.token_id)
            finish = event.prefill.first_token.finish_reason
    return tokens, said


@pytest.mark.parametrize(("length", "max_tokens"), [(1, 20), (16, 20), (100, 20), (40, 1)])
async def test_tokens_equal_one_engine_alone(length: int, max_tokens: int) -> None:
    async with running_worker(WorkerSection(id="w")) as worker:
        driver = Driver()
        await driver.connect(worker)
        key = Key("r")
        spec = make_spec(prompt(length), max_tokens=max_tokens, temperature=1.0, seed=7)
        answer = await driver.start(worker, key, spec)
        assert answer.WhichOneof("event") == "reserved"
        assert answer.prefill.WhichOneof("event") == "accepted"
        assert answer.reserved.worker_id == "w"
        assert answer.reserved.lease_ms > 0
        assert answer.reserved.capability == b""  # nobody else may write there
        tokens, said = await rest(driver, key)
        assert tokens == reference_tokens(spec)
        assert len(said) == 1
        if max_tokens == 1:  # it was never handed over: the gateway ends the reservation
            driver.cancel_decode(worker, key)
        await until_idle(worker)
        assert not driver.has_events("decode", key)
        await driver.close()


async def test_a_busy_worker_rejects_and_holds_nothing() -> None:
    async with running_worker(WorkerSection(id="w", prefill_slots=1), SLOW) as worker:
        driver = Driver()
        await driver.connect(worker)
        spec = make_spec(prompt(300), max_tokens=2)
        first = await driver.start(worker, Key("a"), spec)
        assert first.prefill.WhichOneof("event") == "accepted"
        second = await driver.start(worker, Key("b"), spec)
        assert second.WhichOneof("event") is None
        assert second.prefill.rejected.retry_after_ms > 0
        assert worker.decode.num_tasks == 1
        tokens, _ = await rest(driver, Key("a"))
        assert tokens == reference_tokens(spec)
        await until_idle(worker)
        await driver.close()


async def test_without_a_slot_to_decode_it_is_refused_and_not_computed() -> None:
    section = WorkerSection(id="w", decode_slots=1, prefill_slots=2)
    async with running_worker(section, SLOW) as worker:
        driver = Driver()
        await driver.connect(worker)
        spec = make_spec(prompt(20), max_tokens=2)
        await driver.reserve(worker, Key("a"), spec)
        refused = await driver.start(worker, Key("b"), spec)
        assert refused.WhichOneof("event") == "refused"
        assert not refused.HasField("prefill")
        assert worker.prefill.num_attempts == 0
        driver.cancel_decode(worker, Key("a"))
        await until_idle(worker)
        await driver.close()


@pytest.mark.parametrize("stage", ["accepted", "first_token", "decoding"])
@pytest.mark.parametrize("how", ["cancel", "disconnect"])
async def test_one_cancel_at_any_stage_frees_everything_without_a_word(
    stage: str, how: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with running_worker(WorkerSection(id="w"), SLOW) as worker:
        driver = Driver()
        await driver.connect(worker)
        key, spec = Key("r"), make_spec(prompt(200), max_tokens=200)
        await driver.start(worker, key, spec)
        for _ in range(("accepted", "first_token", "decoding").index(stage)):
            await driver.decode_event(key)
        if how == "cancel":
            driver.cancel_decode(worker, key)
        else:
            await driver.disconnect(worker, "decode")
        await until_idle(worker)
        assert worker.prefill.num_attempts == 0
        assert "handoff_failed" not in caplog.text
        await driver.close()


async def test_a_lease_that_ends_while_the_prompt_is_computed_is_said_once() -> None:
    section = WorkerSection(id="w", lease_s=0.05)
    async with running_worker(section, SLOW) as worker:
        driver = Driver()
        await driver.connect(worker)
        key = Key("r")
        await driver.start(worker, key, make_spec(prompt(1000), max_tokens=5))
        event = await driver.decode_event(key)
        assert event.WhichOneof("event") == "failed"
        await until_idle(worker)
        await asyncio.sleep(0)
        assert not driver.has_events("decode", key)
        await driver.close()
