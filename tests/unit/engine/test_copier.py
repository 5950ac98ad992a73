"""Copies beside the event loop: what waits for whom."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence as SequenceOf

import pytest

from kvmesh.core.clock import SystemClock
from kvmesh.engine.copier import ThreadCopier
from kvmesh.engine.core import EngineCore
from kvmesh.engine.fake import FakeRunner
from kvmesh.engine.host_arena import HostArena
from kvmesh.engine.loop import EngineLoop
from kvmesh.engine.sequence import Sequence
from kvmesh.engine.swap_space import SwapSpace
from kvmesh.policy.prompt_time import PromptTime
from tests.worker_driver import make_spec, reference_tokens

NEW_TOKENS = 30


class GatedArena(HostArena):
    """An arena whose copies wait until the event loop lets them go on."""

    def __init__(self, runner: FakeRunner, num_places: int) -> None:
        super().__init__(runner.kv, runner.spec.layout.block_bytes, num_places)
        self.open = threading.Event()
        self.entered = threading.Event()
        self.threads: set[str] = set()

    def _pass(self) -> None:
        self.threads.add(threading.current_thread().name)
        self.entered.set()
        assert self.open.wait(10), "the event loop does not turn while a copy is made"

    def store(self, blocks: SequenceOf[int], places: SequenceOf[int]) -> None:
        self._pass()
        super().store(blocks, places)

    def load(self, places: SequenceOf[int], blocks: SequenceOf[int]) -> None:
        self._pass()
        super().load(places, blocks)


async def test_the_loop_and_the_steps_go_on_while_a_copy_is_made() -> None:
    # Room for three prompts and for one of them to grow.
    runner = FakeRunner(num_blocks=13)
    arena, copier = GatedArena(runner, 12), ThreadCopier()
    swap = SwapSpace(arena, PromptTime(64), SystemClock(), copier)
    core = EngineCore(runner.spec, 13, growth_tokens=0, swap=swap)
    loop = EngineLoop(core, runner)
    copier.on_done = loop.wake
    specs = [
        make_spec([100 * number + position % 90 for position in range(60)], NEW_TOKENS)
        for number in range(1, 4)
    ]
    sequences = []
    for spec in specs:
        admitted = core.admit_decode(spec)
        assert isinstance(admitted, Sequence)
        core.run(admitted)
        sequences.append(admitted)
    tasks = [asyncio.create_task(loop.run()), asyncio.create_task(copier.run())]
    loop.wake()
    async with asyncio.timeout(10):
        while not arena.entered.is_set():
            await asyncio.sleep(0)
        # The copy stands still; this loop turns, and the oldest sequence, which has room, decodes.
        oldest, seen = sequences[0], len(sequences[0].tokens)
        while len(oldest.tokens) < seen + 3:
            await asyncio.sleep(0)
        assert core.statistics().num_preempted > 0
        assert core.statistics().swap.blocks_kept > 0
        assert not core.is_idle
        arena.open.set()
        while core.has_work:
            await asyncio.sleep(0)
    for spec, sequence in zip(specs, sequences, strict=True):
        assert sequence.tokens[60:] == reference_tokens(spec)
    swapped = core.statistics().swap
    assert swapped.swapped_in_total == swapped.swapped_out_total > 0
    assert swapped.blocks_kept == 0
    assert core.is_idle
    assert arena.threads == {"swap_0"}
    for task in tasks:
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task


async def test_an_error_of_a_copy_ends_it() -> None:
    copier = ThreadCopier()

    def fail() -> None:
        raise MemoryError("no room")

    copier.start(fail, lambda: pytest.fail("it is not done"))
    with pytest.raises(MemoryError, match="no room"):
        await copier.run()


async def test_a_copy_that_is_made_is_waited_for_at_the_end() -> None:
    copier, entered, go_on = ThreadCopier(), threading.Event(), threading.Event()
    made: list[bool] = []

    def copy() -> None:
        entered.set()
        assert go_on.wait(10)
        made.append(True)

    task = asyncio.create_task(copier.run())
    copier.start(copy, lambda: None)
    assert await asyncio.to_thread(entered.wait, 10)
    asyncio.get_running_loop().call_soon(go_on.set)
    task.cancel()
    # Its end waits in this thread, so the gate is opened before.
    go_on.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert made == [True]
