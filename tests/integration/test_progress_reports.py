"""A prefill worker reports that it makes progress with a prompt, to those who ask for it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from kvmesh.core.errors import LostError
from kvmesh.policy.transfer_mode import TransferMode
from kvmesh.runtime.worker import Worker
from kvmesh.runtime.worker_config import EngineSection, WorkerSection
from tests.waiting import until
from tests.worker_driver import Driver, Key, driving, make_spec, running_worker

STEP_S = 0.1
STEPS = 12
CHUNK = 16
PACE_MS = 150


@pytest.fixture
async def prefill() -> AsyncIterator[Worker]:
    """Takes two prompts at a time, and computes the older one first."""
    slow = EngineSection(kind="fake", fake_step_s=STEP_S, max_batch_tokens=CHUNK)
    section = WorkerSection(id="p", role="prefill", prefill_slots=2)
    async with running_worker(section, slow) as worker:
        yield worker


@pytest.fixture
async def decode() -> AsyncIterator[Worker]:
    engine = EngineSection(kind="fake")
    async with running_worker(WorkerSection(id="d", role="decode"), engine) as worker:
        yield worker


@pytest.fixture
async def driver(prefill: Worker, decode: Worker) -> AsyncIterator[Driver]:
    async with driving(prefill, decode) as driver:
        yield driver


def prompt(first: int) -> list[int]:
    return [first + n % 7 for n in range(STEPS * CHUNK)]


async def hear(driver: Driver, key: Key, kinds: list[str | None], last: str = "handed_off") -> None:
    """Notes its events until the last one."""
    while not kinds or kinds[-1] != last:
        kinds.append((await driver.prefill_event(key)).WhichOneof("event"))


async def asked(driver: Driver, prefill: Worker, decode: Worker, name: str, pace_ms: int) -> Key:
    """A prompt that the worker has accepted."""
    key, spec = Key(name), make_spec(prompt(ord(name)), max_tokens=2)
    reserved = await driver.reserve(decode, key, spec)
    answer = await driver.offer(prefill, key, spec, reserved.reserved, progress_ms=pace_ms)
    assert answer.WhichOneof("event") == "accepted", answer
    return key


@pytest.mark.parametrize("pace_ms", [0, PACE_MS])
async def test_who_asks_hears_of_progress(
    prefill: Worker, decode: Worker, driver: Driver, pace_ms: int
) -> None:
    key = await asked(driver, prefill, decode, "a", pace_ms)
    heard: list[str | None] = []
    await hear(driver, key, heard)
    reports = [kind for kind in heard if kind == "progress"]  # also while the KV is sent
    assert [kind for kind in heard if kind != "progress"] == ["first_token", "handed_off"]
    most = STEPS * STEP_S * 1000 / PACE_MS
    assert 3 <= len(reports) <= 3 * most if pace_ms else not reports


async def test_a_prompt_in_line_hears_of_those_ahead(
    prefill: Worker, decode: Worker, driver: Driver
) -> None:
    ahead = await asked(driver, prefill, decode, "a", 0)
    behind = await asked(driver, prefill, decode, "b", PACE_MS)
    heard: list[str | None] = []
    hearing = asyncio.create_task(hear(driver, behind, heard))
    await hear(driver, ahead, [])
    assert heard.count("progress") >= 3, "while the one ahead was computed"
    await hearing


async def test_a_prompt_on_one_worker_hears_of_progress(prefill: Worker, driver: Driver) -> None:
    key, spec = Key("a"), make_spec(prompt(1), max_tokens=1)
    answer = await driver.start(prefill, key, spec, progress_ms=PACE_MS)
    assert answer.prefill.WhichOneof("event") == "accepted", answer
    kinds = ["accepted"]
    while kinds[-1] != "first_token":
        kinds.append((await driver.decode_event(key)).prefill.WhichOneof("event") or "")
    assert kinds.count("progress") >= 3


async def test_a_worker_that_stands_still_is_silent(
    prefill: Worker, decode: Worker, driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Here its KV does not arrive."""
    stuck = asyncio.Event()

    async def put(*_: object) -> None:
        stuck.set()
        await asyncio.sleep(5 * PACE_MS / 1000)
        raise LostError("told to fail")

    handover = prefill.prefill._handover
    monkeypatch.setattr(handover, "_mode", TransferMode.WHOLE)  # all of it after the first token
    monkeypatch.setattr(handover._channels, "put", put)
    key = await asked(driver, prefill, decode, "a", PACE_MS)
    heard: list[str | None] = []
    await hear(driver, key, heard, "first_token")
    await stuck.wait()
    await hear(driver, key, heard, "failed")
    since = heard[heard.index("first_token") + 1 :]
    assert since in (["failed"], ["progress", "failed"]), "at most one, of the prompt's last step"
    await until(lambda: prefill.prefill.num_attempts == 0, "its end")
