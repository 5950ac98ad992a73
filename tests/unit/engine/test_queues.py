from __future__ import annotations

from kvmesh.core.details import QueueLengths
from kvmesh.core.types import Refusal
from kvmesh.engine.core import EngineCore
from kvmesh.engine.fake import FakeRunner
from kvmesh.engine.sequence import Sequence
from kvmesh.policy.batching import BatchLimits
from tests.worker_driver import make_spec


def admitted(found: Sequence | Refusal) -> Sequence:
    assert not isinstance(found, Refusal), found
    return found


def test_each_sequence_is_in_one_queue_of_one_side() -> None:
    runner = FakeRunner(num_blocks=64)
    core = EngineCore(runner.spec, 64, BatchLimits(max_tokens=20), growth_tokens=0)

    def step() -> None:
        chunks = core.plan_step()
        core.finish_step(chunks, runner.execute(chunks))

    sent = admitted(core.admit_prefill(make_spec(list(range(10)))))
    step()
    awaited = admitted(core.admit_prefill(make_spec(list(range(50, 60))), held=True))
    reserved = admitted(core.admit_decode(make_spec(list(range(20, 40)), 5)))
    assert core.queues() == (QueueLengths(sending=1, receiving=1), QueueLengths(receiving=1))

    core.start_decode(reserved, 7)
    core.run(awaited)
    late = admitted(core.admit_prefill(make_spec(list(range(100, 140)))))
    assert core.queues() == (QueueLengths(waiting=2, sending=1), QueueLengths(waiting=1))
    step()  # one token of the answer, ten of one prompt, nine of the other
    assert core.queues()[1] == QueueLengths(running=1)
    assert core.queues()[0] == QueueLengths(running=1, sending=2)
    another = admitted(core.admit_prefill(make_spec(list(range(200, 230)))))
    step()  # the budget is spent before it has a turn
    assert core.queues()[0] == QueueLengths(waiting=1, running=1, sending=2)

    for sequence in (sent, awaited, reserved, late, another):
        core.release(sequence)
    assert core.queues() == (QueueLengths(), QueueLengths())


def test_who_lost_its_blocks_is_swapped() -> None:
    runner = FakeRunner(num_blocks=4)
    core = EngineCore(runner.spec, 4, growth_tokens=0)
    for stem in (0, 100):
        core.run(admitted(core.admit_decode(make_spec([stem + at for at in range(30)], 20))))
    while not core.statistics().num_preempted:
        chunks = core.plan_step()
        core.finish_step(chunks, runner.execute(chunks))
    assert core.queues() == (QueueLengths(), QueueLengths(running=1, swapped=1))
