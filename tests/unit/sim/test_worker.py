from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest

from kvmesh.core.types import Refusal, RefusalReason, Role
from kvmesh.policy.curves import Quadratic
from kvmesh.sim.events import EventQueue
from kvmesh.sim.fleet import SimFleet, WorkerGroup
from kvmesh.sim.requests import SimSequence
from kvmesh.sim.steps import ChunkTokens
from kvmesh.sim.trace_request import TRACE_BLOCK
from kvmesh.sim.worker import SimWorker
from kvmesh.sim.worker_rules import WorkerRules
from tests.unit.sim.examples import profile, request


@dataclass
class Log:
    """Remembers what happened when."""

    events: EventQueue
    seen: list[tuple[str, float]] = field(default_factory=list)

    def on_chunk(self, worker: SimWorker, sequence: SimSequence) -> None:
        self._note(f"chunk {sequence.request.request_id}")

    def on_first_token(self, worker: SimWorker, sequence: SimSequence) -> None:
        self._note(f"first {sequence.request.request_id}")

    def on_finished(self, worker: SimWorker, sequence: SimSequence) -> None:
        self._note(f"done {sequence.request.request_id}")

    def on_change(self, worker: SimWorker) -> None:
        return

    def on_opening(self) -> None:
        return

    def _note(self, text: str) -> None:
        self.seen.append((text, round(self.events.now(), 4)))

    def at(self, text: str) -> float:
        return dict(self.seen)[text]


def start(*, queue_offers: bool = False, chunk: int = 4096, **device: Any) -> tuple[SimWorker, Log]:
    events = EventQueue()
    log = Log(events)
    fleet = SimFleet(
        events,
        profile(**device),
        log,
        WorkerRules(queue_offers, ChunkTokens(chunk, chunk)),
        report_interval_s=0.0,
    )
    fleet.build((WorkerGroup("home", "d", Role.HYBRID, 1),))
    return next(iter(fleet.workers.values())), log


def accepted(outcome: SimSequence | Refusal) -> SimSequence:
    assert isinstance(outcome, SimSequence), outcome
    return outcome


def refused(outcome: SimSequence | Refusal) -> RefusalReason:
    assert isinstance(outcome, Refusal)
    return outcome.reason


def run_local(worker: SimWorker, index: int, **changes: Any) -> SimSequence:
    asked = request(index, **changes)
    return accepted(worker.offer(asked, accepted(worker.reserve(asked))))


def finish(worker: SimWorker, log: Log) -> None:
    log.events.run(lambda: False)
    worker.pool.check_integrity()
    worker.handoff.check_integrity()
    assert worker.pool.is_idle
    assert worker.handoff.is_idle


def test_a_prompt_then_a_step_per_token() -> None:
    worker, log = start()
    run_local(worker, 0, blocks=2, output=4)
    finish(worker, log)
    assert log.at("first r0") == pytest.approx(1.025)
    assert log.at("done r0") == pytest.approx(1.025 + 0.03)


def test_the_second_prompt_waits_for_the_first() -> None:
    worker, log = start()
    run_local(worker, 0, blocks=2, output=1)
    run_local(worker, 1, blocks=2, output=1, first_id=100)
    finish(worker, log)
    assert log.at("first r0") == pytest.approx(1.025)
    assert log.at("first r1") == pytest.approx(2.05)


def test_a_cached_prefix_is_not_computed_again() -> None:
    worker, log = start()
    run_local(worker, 0, blocks=4, output=1)
    log.events.run(lambda: False)
    sequence = run_local(worker, 1, blocks=4, output=1)
    assert sequence.num_cached == 4 * TRACE_BLOCK
    finish(worker, log)
    # Only the last token is left, and it takes one step.
    assert log.at("first r1") - log.at("first r0") == pytest.approx(0.01)


def test_a_prompt_behind_a_cached_prefix_attends_to_it() -> None:
    curve = Quadratic(0.1, 1e-3, 1e-6)
    worker, log = start(prefill_s=curve)
    run_local(worker, 0, blocks=4, output=1)
    log.events.run(lambda: False)
    begun = log.events.now()
    sequence = run_local(worker, 1, blocks=6, output=1)
    assert sequence.num_cached == 4 * TRACE_BLOCK
    finish(worker, log)
    alone = curve(2 * TRACE_BLOCK + 1)
    behind = 0.1 + curve(6 * TRACE_BLOCK + 1) - curve(4 * TRACE_BLOCK)
    assert log.at("first r1") - begun == pytest.approx(behind, abs=1e-3)
    assert behind > alone + 4


def test_decode_steps_join_at_the_next_step() -> None:
    worker, log = start()
    run_local(worker, 0, blocks=1, output=1000)
    log.events.run(lambda: ("first r0", 0.513) in log.seen)
    log.events.after(0.0151, lambda: run_local(worker, 1, blocks=1, output=1, first_id=9))
    finish(worker, log)
    # The run ends after the step in progress; the prompt and one decode step share the next.
    assert log.at("first r1") == pytest.approx(0.513 + 0.02 + 0.513 + 0.01)


def test_chunks_of_a_prompt_leave_room_for_decode() -> None:
    worker, log = start(chunk=256)
    run_local(worker, 0, blocks=1, output=500)
    log.events.run(lambda: any(text == "first r0" for text, _ in log.seen))
    begun = log.events.now()
    run_local(worker, 1, blocks=2, output=1, first_id=9)
    log.events.run(lambda: any(text == "first r1" for text, _ in log.seen))
    # 1025 tokens take five steps of 255, since the running sequence has one token of each.
    assert log.events.now() - begun == pytest.approx(0.01 + 1.025 + 5 * 0.01, abs=0.011)
    finish(worker, log)


def test_slots_and_blocks_are_the_limits() -> None:
    worker, _ = start(num_blocks=8, decode_slots=3)
    assert refused(worker.reserve(request(blocks=8))) is RefusalReason.TOO_LONG
    first = accepted(worker.reserve(request(0, blocks=4)))
    assert refused(worker.reserve(request(1, blocks=4, first_id=9))) is RefusalReason.NO_BLOCKS
    worker.release(first)
    assert worker.pool.is_idle
    for index in range(3):
        accepted(worker.reserve(request(index, blocks=1, first_id=index)))
    assert refused(worker.reserve(request(9, blocks=1))) is RefusalReason.NO_SLOTS


def test_a_busy_worker_rejects_offers() -> None:
    worker, log = start(prefill_slots=1)
    run_local(worker, 0)
    asked = request(1, first_id=50)
    reserved = accepted(worker.reserve(asked))
    assert refused(worker.offer(asked, reserved)) is RefusalReason.BUSY
    worker.release(reserved)
    finish(worker, log)


def test_a_local_queue_accepts_and_waits() -> None:
    worker, log = start(prefill_slots=1, queue_offers=True)
    elsewhere, _ = start()
    for index in range(3):
        asked = request(index, blocks=1, first_id=100 * index)
        accepted(worker.offer(asked, accepted(elsewhere.reserve(asked))))
    assert (worker.num_waiting, worker.load().prefill_active) == (2, 3)
    assert worker.waiting_tokens == 3 * 513
    log.events.run(lambda: False)
    assert [text for text, _ in log.seen] == ["first r0", "chunk r0"], "its slot is still held"


def test_preempted_sequences_come_back_and_finish() -> None:
    worker, log = start(num_blocks=5, decode_slots=2)
    # Two blocks each at first; both need a third one, and there is one.
    run_local(worker, 0, blocks=1, output=700)
    run_local(worker, 1, blocks=1, output=700, first_id=9)
    finish(worker, log)
    assert worker.steps.preemptions == 1
    assert {text for text, _ in log.seen} >= {"done r0", "done r1"}
    assert log.at("done r0") < log.at("done r1")


def test_preempted_sequences_come_back_when_a_reservation_ends() -> None:
    worker, log = start(num_blocks=4, decode_slots=2)
    run_local(worker, 0, blocks=1, output=700)
    reserved = accepted(worker.reserve(request(1, blocks=1, first_id=9)))
    log.events.run(lambda: worker.steps.preemptions > 0)
    assert worker.steps.num_preempted == 1, "all other blocks are reserved"
    worker.release(reserved)
    finish(worker, log)
    assert "done r0" in dict(log.seen)


def test_kv_of_another_worker_starts_decode() -> None:
    worker, log = start()
    sequence = accepted(worker.reserve(request(blocks=2, output=3)))
    assert worker.load().decode_reserved == 1
    worker.end_write(worker.begin_write(sequence, 0, 2), ok=True)
    worker.end_write(worker.begin_write(sequence, 2, 1), ok=True)
    worker.start_decode(sequence)
    assert (worker.load().decode_reserved, worker.load().decode_running) == (0, 1)
    finish(worker, log)
    assert log.seen == [("done r0", 0.02)]


def test_blocks_stay_while_a_transfer_writes_into_them() -> None:
    worker, log = start()
    sequence = accepted(worker.reserve(request(blocks=2)))
    write = worker.begin_write(sequence, 0, 3)
    worker.release(sequence)
    assert not worker.pool.is_idle
    worker.end_write(write, ok=False)
    finish(worker, log)


def test_a_dead_worker_refuses_and_computes_no_more() -> None:
    worker, log = start()
    sequence = run_local(worker, 0, blocks=1, output=100)
    log.events.run(lambda: any(text == "first r0" for text, _ in log.seen))
    log.events.after(0.055, lambda: None)
    log.events.run(lambda: log.events.now() >= 0.568)
    assert worker.fail() == [sequence]
    assert sequence.left == 100 - 1 - 5, "five whole steps"
    log.events.run(lambda: False)
    assert not any(text == "done r0" for text, _ in log.seen)
    assert refused(worker.reserve(request(1))) is RefusalReason.LOST
