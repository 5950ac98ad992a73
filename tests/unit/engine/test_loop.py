from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence as SequenceOf
from pathlib import Path
from unittest.mock import patch

import pytest

from kvmesh.engine.core import EngineCore
from kvmesh.engine.fake import FakeRunner
from kvmesh.engine.loop import LONG_CHUNK, EngineLoop
from kvmesh.engine.protocol import SequenceChunk, StepResult
from kvmesh.engine.sequence import Sequence
from kvmesh.engine.shared_cores import SharedCores
from tests.waiting import until
from tests.worker_driver import make_spec, reference_tokens


class Gate(FakeRunner):
    """A runner that computes only while its gate is open."""

    def __init__(self) -> None:
        super().__init__()
        self.open = threading.Event()
        self.entered = threading.Event()
        self.threads: set[str] = set()

    def execute(self, chunks: SequenceOf[SequenceChunk]) -> StepResult:
        self.threads.add(threading.current_thread().name)
        self.entered.set()
        assert self.open.wait(10)
        return super().execute(chunks)


async def _until(fact: threading.Event) -> None:
    assert await asyncio.to_thread(fact.wait, 10)


async def test_cores_are_taken_for_steps_in_their_thread_and_left_without_work(
    tmp_path: Path,
) -> None:
    taken: list[tuple[int, str]] = []

    def use(num_threads: int) -> None:
        taken.append((num_threads, threading.current_thread().name))

    cores = SharedCores(tmp_path / "cores", 4, use)
    rests: list[int] = []
    runner = Gate()
    runner.open.set()
    core = EngineCore(runner.spec, 64)
    with patch.object(cores, "rest", lambda: rests.append(1)):
        loop = EngineLoop(core, runner, cores=cores)
        task = asyncio.create_task(loop.run())
        await asyncio.sleep(0)
        assert (len(rests), taken) == (1, []), "nothing to do yet"
        sequence = core.admit_decode(make_spec([1, 2, 3], max_tokens=5))
        assert isinstance(sequence, Sequence)
        core.run(sequence)
        loop.wake()
        await until(lambda: len(rests) == 2, "the end of the sequence")
    assert taken == [(4, next(iter(runner.threads)))]
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    cores.close()


@pytest.mark.parametrize(("num_tokens", "num_more"), [(LONG_CHUNK - 1, 0), (LONG_CHUNK, 1)])
async def test_the_step_of_a_long_prompt_divides_the_cores_again(
    tmp_path: Path, num_tokens: int, num_more: int
) -> None:
    """After each stage that the runner tells of; this one tells of the last one only."""
    cores = SharedCores(tmp_path / "cores", 4, lambda _: None)
    divided: list[str] = []
    told: list[int] = []
    runner = Gate()
    runner.open.set()
    core = EngineCore(runner.spec, 64)
    with patch.object(cores, "divide", lambda: divided.append(threading.current_thread().name)):
        loop = EngineLoop(core, runner, cores=cores)
        task = asyncio.create_task(loop.run())
        sequence = core.admit_decode(make_spec(list(range(1, num_tokens + 1)), max_tokens=1))
        assert isinstance(sequence, Sequence)
        sequence.on_layers = told.append
        core.run(sequence)
        loop.wake()
        await until(lambda: not core.has_work, "the end of the sequence")
    assert divided == [next(iter(runner.threads))] * (1 + num_more)
    assert told == [len(runner.spec.stages)], "the other listener hears it as well"
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    cores.close()


async def test_work_between_steps_shares_the_runner_with_none() -> None:
    runner = Gate()
    core = EngineCore(runner.spec, 64)
    loop = EngineLoop(core, runner)
    task = asyncio.create_task(loop.run())
    sequence = core.admit_decode(make_spec([1, 2, 3], max_tokens=500))
    assert isinstance(sequence, Sequence)
    core.run(sequence)
    loop.wake()
    await _until(runner.entered)
    ran: list[str] = []
    work = asyncio.create_task(
        loop.between_steps(lambda: ran.append(threading.current_thread().name))
    )
    await asyncio.sleep(0)
    assert not ran, "a step is being computed"
    runner.open.set()
    async with asyncio.timeout(10):
        await work
    assert core.has_work, "it did not wait for the end of the sequence"
    assert set(ran) == runner.threads
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_steps_run_in_one_other_thread_and_the_loop_stays_free() -> None:
    runner = Gate()
    core = EngineCore(runner.spec, 64)
    loop = EngineLoop(core, runner)
    task = asyncio.create_task(loop.run())
    spec = make_spec([1, 2, 3], max_tokens=5)
    sequence = core.admit_decode(spec)
    assert isinstance(sequence, Sequence)
    core.run(sequence)
    loop.wake()
    await _until(runner.entered)
    # The step is blocked, and this coroutine still runs and may admit.
    second = core.admit_decode(make_spec([7, 8], max_tokens=2))
    assert isinstance(second, Sequence)
    core.run(second)
    runner.open.set()
    async with asyncio.timeout(10):
        while core.has_work:
            await asyncio.sleep(0)
    assert sequence.tokens[3:] == reference_tokens(spec)
    assert len(runner.threads) == 1
    assert threading.current_thread().name not in runner.threads
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_an_error_of_the_runner_ends_the_loop() -> None:
    class Broken(FakeRunner):
        def execute(self, chunks: SequenceOf[SequenceChunk]) -> StepResult:
            raise RuntimeError("out of memory")

    runner = Broken()
    core = EngineCore(runner.spec, 64)
    loop = EngineLoop(core, runner)
    sequence = core.admit_decode(make_spec([1, 2, 3]))
    assert isinstance(sequence, Sequence)
    core.run(sequence)
    with pytest.raises(RuntimeError, match="out of memory"):
        await loop.run()


async def test_a_preempted_sequence_goes_on_when_others_give_blocks_back() -> None:
    runner = FakeRunner(num_blocks=12)
    core = EngineCore(runner.spec, 12, growth_tokens=0)
    loop = EngineLoop(core, runner)
    specs = [make_spec([100 * number + at for at in range(60)], 30) for number in range(1, 4)]
    sequence, *reserved = (core.admit_decode(spec) for spec in specs)
    assert isinstance(sequence, Sequence)
    core.run(sequence)
    task = asyncio.create_task(loop.run())
    async with asyncio.timeout(10):
        while not core.statistics().num_preempted:
            await asyncio.sleep(0)
        # All room is reserved, so the loop has nothing to do until a reservation ends.
        for each in reserved:
            assert isinstance(each, Sequence)
            core.release(each)
        while core.has_work:
            await asyncio.sleep(0)
    assert sequence.tokens[60:] == reference_tokens(specs[0])
    assert core.is_idle
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_the_runner_hears_once_of_each_that_ended_or_lost_its_blocks() -> None:
    class Listening(FakeRunner):
        def __init__(self) -> None:
            super().__init__(num_blocks=12)
            self.told: list[str] = []

        def forget(self, sequence_ids: SequenceOf[int]) -> None:
            self.told += [f"forget {each}" for each in sequence_ids]

        def execute(self, chunks: SequenceOf[SequenceChunk]) -> StepResult:
            self.told += [f"from {each.sequence_id}" for each in chunks if not each.start]
            return super().execute(chunks)

    runner = Listening()
    core = EngineCore(runner.spec, 12, growth_tokens=0)
    loop = EngineLoop(core, runner)
    specs = [make_spec([100 * number + at for at in range(60)], 60) for number in range(1, 3)]
    sequences = [core.admit_decode(spec) for spec in specs]
    for sequence in sequences:
        assert isinstance(sequence, Sequence)
        core.run(sequence)
    task = asyncio.create_task(loop.run())
    async with asyncio.timeout(10):
        while core.has_work:
            await asyncio.sleep(0)
    older, younger = (each.sequence_id for each in sequences if isinstance(each, Sequence))
    # The younger one lost its blocks, and came back when the older one had given its own back.
    assert core.statistics().preemptions_total == 1
    assert runner.told == [
        f"from {older}",
        f"from {younger}",
        f"forget {younger}",
        f"forget {older}",
    ]
    assert core.take_gone() == [younger]
    assert core.take_gone() == []
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
