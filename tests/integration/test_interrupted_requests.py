"""Requests that are cancelled, or lose what they need, at each await point of all their tasks.

Whatever is hit, and when: nothing is held afterwards, no token is wrong, and another request on
the same workers gets all of its own.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager

import pytest

from kvmesh.core.types import PrefixSource
from kvmesh.runtime.worker import Worker
from kvmesh.runtime.worker_config import EngineSection, FetchSection, WorkerSection
from tests.direct_gateway import DirectGateway
from tests.interruption import Interruptions
from tests.waiting import FACT_S
from tests.worker_driver import make_spec, reference_tokens, running_worker

CHUNK = 32
EVERY = 8
"""A deed meets every so many points, beginning with another one each; 1 takes a minute."""
MOST_FEW = 10
"""Points that there are at least, or the test looks at nothing."""
LENGTH = 2 * CHUNK + 5
ENGINE = EngineSection(kind="fake", max_batch_tokens=CHUNK)
LEASE_S = 60.0
"""However slow the machine is: leases end when the test says so."""
CARRY_OUT, COPY, STEPS = "PrefillRole._carry_out", "carry_all.<locals>.work", "EngineLoop.run"
_POLL_S = 0.001
SERVED = ("DataServer._serve_tcp", "DataServer._serve_unix")


class Scene:
    """Workers, a request that is interrupted, and one beside it that is not."""

    def __init__(self, prefill: Worker, decode: Worker, interruptions: Interruptions) -> None:
        self.prefill, self.decode, self.interruptions = prefill, decode, interruptions
        self.workers = {prefill, decode}
        self.num_requests = 0
        self.ahead_s: dict[Worker, float] = {}
        self.starts_at_once = False
        self.holder: Worker | None = None
        self.timeouts: list[asyncio.Timeout] = []
        self.victim: DirectGateway
        self.neighbour: DirectGateway

    def request(self) -> tuple[DirectGateway, list[int]]:
        """One that nobody asked before, and its answer."""
        self.num_requests += 1
        number = self.num_requests * 7919
        tokens = [1 + (number + position * 104_729) % 997 for position in range(LENGTH)]
        spec = make_spec(tokens, max_tokens=3)
        return DirectGateway(self.prefill, self.decode, spec), reference_tokens(spec)

    def sets_clock(self, worker: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
        """Its clock goes ahead when it is told to."""
        self.ahead_s[worker] = 0.0
        now = worker._clock.now
        monkeypatch.setattr(worker._clock, "now", lambda: now() + self.ahead_s[worker])

    def holds(self, holder: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
        """A third worker has computed the start of every prompt."""
        self.holder = holder
        self.workers.add(holder)
        self.sets_clock(holder, monkeypatch)
        monkeypatch.setattr(asyncio, "timeout", self._timeout)

    def _timeout(self, delay: float | None) -> asyncio.Timeout:
        made = asyncio.timeouts.timeout(delay)
        if delay == self.prefill._config.fetch.timeout_s:
            self.timeouts.append(made)
        return made

    async def prepare(self) -> None:
        """The holder computes what the request is to find there."""
        if self.holder is None:
            return
        spec = make_spec(list(self.victim.spec.token_ids[:-CHUNK]), max_tokens=1)
        first = DirectGateway(self.holder, self.holder, spec)
        first.start(at_once=True)
        await first.over()
        assert first.is_finished, first.failure
        first.cancel_decode()  # it waits for KV
        self.timeouts.clear()

    @property
    def num_expired(self) -> int:
        """Leases that a reader should have given back."""
        return 0 if self.holder is None else self.holder.pool.statistics().expired_total

    @property
    def source(self) -> PrefixSource | None:
        """Who holds the start of the prompt."""
        if self.holder is None:
            return None
        info = self.holder._info
        blocks = (LENGTH - CHUNK) // ENGINE.block_size
        return PrefixSource(info.worker_id, info.incarnation, info.control_endpoint, blocks)

    # --- what happens in between -------------------------------------------------------------

    def cancel(self) -> None:
        self.victim.cancel()

    def cancel_prefill(self) -> None:
        self.victim.cancel_prefill()

    def cancel_decode(self) -> None:
        self.victim.cancel_decode()

    def hang_up(self) -> None:
        self.victim.hang_up()

    def lease_ends(self) -> None:
        """Of the one request: the other is renewed half way."""
        half = 0.6 * LEASE_S
        self.ahead_s[self.decode] += half
        self.neighbour.renew()
        self.ahead_s[self.decode] += half
        self.decode.decode.expire_leases()
        self.victim._end("its lease ended")

    def preempt(self) -> None:
        """Takes the blocks of all prompts that are in no step."""
        core = self.prefill.core
        for sequence in [each for each in core._running if each not in core._in_flight]:
            core._running.preempt(sequence)
        self.prefill._loop.wake()

    def cut(self) -> None:
        """The connections between the workers end."""
        for task in self.interruptions.tasks(*SERVED):
            task.cancel()

    def fetch_takes_too_long(self) -> None:
        for each in self.timeouts:
            each.reschedule(asyncio.get_running_loop().time())
        self.timeouts.clear()

    def read_lease_ends(self) -> None:
        """At the holder; nobody reads by it."""
        assert self.holder is not None
        self.ahead_s[self.holder] += 1.2 * LEASE_S
        self.holder.pool.expire_leases()

    # --- after -------------------------------------------------------------------------------

    async def settled(self, told: str) -> None:
        """Waits until nothing is held, then looks at the books."""
        deadline = asyncio.get_running_loop().time() + FACT_S
        while not all(worker.is_idle for worker in self.workers):
            assert asyncio.get_running_loop().time() < deadline, f"{told}: {self.held()}"
            await asyncio.sleep(_POLL_S)
        for worker in self.workers:
            worker.core.check_integrity()
            worker.pool.check_integrity()
            assert worker.core.statistics().num_held == 0
            assert worker.core.pool.is_idle
            assert worker.decode.num_reserved == worker.decode.num_tasks == 0
            assert worker.prefill.num_attempts == worker.prefill.num_sending == 0
            assert worker.channels.sending_bytes == 0
            assert not worker.core.fills.num_open

    def held(self) -> str:
        """What each worker holds, for the message of a failure."""
        return "; ".join(
            f"{worker.worker_id}: sequences {worker.core.statistics()}, decode "
            f"{worker.decode.num_tasks} tasks, {worker.decode.num_reserved} reserved, arriving "
            f"{'idle' if worker.decode.arriving.is_idle else 'not idle'}, prefill "
            f"{worker.prefill.num_attempts} attempts, {worker.prefill.num_sending} sending, leases "
            f"{worker.pool.statistics()}, fetches {worker.fetcher.is_idle}"
            for worker in self.workers
            if not worker.is_idle
        )


@asynccontextmanager
async def scene(
    monkeypatch: pytest.MonkeyPatch, channels: str, mode: str = "chunked"
) -> AsyncIterator[Scene]:
    section = WorkerSection(
        id="p", role="prefill", channels=channels, transfer_mode=mode, prefill_slots=2
    )
    with Interruptions((CARRY_OUT, COPY, STEPS, *SERVED)) as interruptions:
        async with (
            running_worker(section, ENGINE) as prefill,
            running_worker(
                WorkerSection(id="d", role="decode", prefill_slots=2, lease_s=LEASE_S), ENGINE
            ) as decode,
        ):
            made = Scene(prefill, decode, interruptions)
            made.sets_clock(decode, monkeypatch)
            yield made


Deed = Callable[[Scene], None]
DEEDS: tuple[Deed, ...] = (
    Scene.cancel,
    Scene.cancel_prefill,
    Scene.cancel_decode,
    Scene.hang_up,
    Scene.lease_ends,
    Scene.preempt,
    Scene.cut,
)


async def interrupt(scene: Scene, number: int, deed: Deed, *, late: bool) -> bool:
    """One request and its neighbour; returns whether there was such a point."""
    points = scene.interruptions
    scene.victim, expected = scene.request()
    scene.neighbour, others = scene.request()
    await scene.prepare()
    expired = scene.num_expired
    points.arm(number, lambda: deed(scene), late=late)
    scene.victim.start(scene.source, at_once=scene.starts_at_once)
    scene.neighbour.start(at_once=scene.starts_at_once)
    await scene.victim.over()
    await scene.neighbour.over()
    has_struck = points.has_struck
    points.disarm()
    told = f"{deed.__name__}, {'going on' if late else 'waiting'} at {number} of {points.seen}"
    if deed is Scene.cut:  # ends the neighbour's transfers, too
        others = others[: len(scene.neighbour.tokens)]
    assert scene.neighbour.tokens == others, told
    if has_struck and deed is not Scene.preempt:
        expected = expected[: len(scene.victim.tokens)]
    assert scene.victim.tokens == expected, told
    scene.victim.cancel()  # as a gateway does that goes elsewhere
    scene.neighbour.cancel()
    await scene.settled(told)
    assert scene.num_expired == expired or deed is Scene.read_lease_ends, told
    return points.was_reached


async def interrupt_at(scene: Scene, deeds: Sequence[Deed]) -> None:
    """Does each deed at every so many points, while tasks wait and as they go on."""
    for late in (False, True):
        for index, deed in enumerate(deeds):
            number = 1 + index % EVERY
            while await interrupt(scene, number, deed, late=late):
                number += EVERY
            assert number > MOST_FEW, f"{deed.__name__}: no more than {number} points"


@pytest.mark.parametrize(
    ("channels", "mode"), [("tcp", "chunked"), ("shm", "layered"), ("local", "whole")]
)
async def test_handoffs(monkeypatch: pytest.MonkeyPatch, channels: str, mode: str) -> None:
    async with scene(monkeypatch, channels, mode) as made:
        await interrupt_at(made, DEEDS)


@pytest.mark.parametrize("at_once", [False, True], ids=["offered", "with the reservation"])
async def test_prompts_computed_where_they_are_decoded(
    monkeypatch: pytest.MonkeyPatch, at_once: bool
) -> None:
    async with scene(monkeypatch, "local") as made:
        made.prefill, made.starts_at_once = made.decode, at_once
        await interrupt_at(made, DEEDS[:-1])


@pytest.mark.parametrize("channels", ["tcp", "local"])
@pytest.mark.parametrize("is_decoded_there", [False, True], ids=["handed over", "decoded there"])
async def test_prefixes_from_a_third_worker(
    monkeypatch: pytest.MonkeyPatch, is_decoded_there: bool, channels: str
) -> None:
    async with (
        scene(monkeypatch, channels) as made,
        running_worker(
            WorkerSection(id="h"), ENGINE, fetch=FetchSection(lease_s=LEASE_S)
        ) as holder,
    ):
        made.holds(holder, monkeypatch)
        if is_decoded_there:
            made.prefill, made.starts_at_once = made.decode, True
        await interrupt_at(made, (*DEEDS, Scene.fetch_takes_too_long, Scene.read_lease_ends))
