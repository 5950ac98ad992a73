"""The step loop: plans on the event loop, computes in one other thread.

Tests: tests/unit/engine/test_loop.py.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

from kvmesh.engine.core import EngineCore
from kvmesh.engine.protocol import ModelRunner, SequenceChunk, StepResult
from kvmesh.engine.shared_cores import SharedCores
from kvmesh.engine.step_watch import StepWatch

LONG_CHUNK = 64
"""Positions from which a chunk takes so long that engines begin or end work meanwhile."""


class EngineLoop:
    """Runs steps while there is work.

    Args:
        on_step: called after every step with its duration in seconds.
        cores: of a machine that it shares with other engines; None: its threads are fixed.

    Attributes:
        watch: durations of steps, on the event loop's clock.
    """

    def __init__(
        self,
        core: EngineCore,
        runner: ModelRunner,
        on_step: Callable[[float], None] | None = None,
        cores: SharedCores | None = None,
    ) -> None:
        self._core = core
        self._runner = runner
        self._on_step = on_step
        self._cores = cores
        self.watch = StepWatch()
        self._wake = asyncio.Event()
        self._is_planning = False
        self._turn = asyncio.Lock()
        core.pool.on_free = self._freed
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="engine")

    def wake(self) -> None:
        """Signals that there is work; call it after every change that adds some."""
        self._wake.set()

    def _freed(self) -> None:
        """Wakes the loop for preempted sequences, which wait for blocks from any owner.

        The planner already considers blocks that it frees itself.
        """
        if self._core.has_work and not self._is_planning:
            self._wake.set()

    async def between_steps(self, work: Callable[[], None]) -> None:
        """Runs `work` in the engine's thread while no step is computed; steps wait for it."""
        async with self._turn:
            running = asyncio.get_running_loop().run_in_executor(self._executor, work)
            await asyncio.shield(running)

    async def run(self) -> None:
        """Runs steps until cancelled. An error of the runner ends the loop and the worker."""
        loop = asyncio.get_running_loop()
        try:
            while True:
                self._wake.clear()
                self._is_planning = True
                chunks = self._core.plan_step()
                self._is_planning = False
                if not chunks:
                    if self._cores is not None:
                        self._cores.rest()
                    await self._wake.wait()
                    continue
                async with self._turn:
                    started = loop.time()
                    self.watch.begin(chunks, started)
                    # A cancelled await leaves the step running in its thread, so the loop always
                    # waits for it.
                    gone = self._core.take_gone()
                    step = loop.run_in_executor(self._executor, self._compute, gone, chunks)
                    result = await asyncio.shield(step)
                    ended = loop.time()
                self.watch.end(ended)
                self._core.finish_step(chunks, result)
                if self._on_step is not None:
                    self._on_step(loop.time() - started)
        finally:
            self._executor.shutdown(wait=True)

    def _compute(self, gone: Sequence[int], chunks: Sequence[SequenceChunk]) -> StepResult:
        if self._cores is not None:
            self._cores.begin_step()
            chunks = [_dividing(chunk, self._cores) for chunk in chunks]
        if gone:
            self._runner.forget(gone)
        return self._runner.execute(chunks)


def _dividing(chunk: SequenceChunk, cores: SharedCores) -> SequenceChunk:
    """Returns a chunk whose step divides the cores anew after each layer, if the step is long."""
    if chunk.end - chunk.start < LONG_CHUNK:
        return chunk
    known = chunk.on_layers

    def on_layers(num_stages: int) -> None:
        cores.divide()
        if known is not None:
            known(num_stages)

    return replace(chunk, on_layers=on_layers)
