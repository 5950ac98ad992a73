"""Any interleaving of admission, steps, cancels and preemption: right tokens, nothing lost."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvmesh.core.clock import ManualClock
from kvmesh.core.kv_groups import KvGroups
from kvmesh.core.types import Refusal
from kvmesh.engine.copier import Copier, InlineCopier
from kvmesh.engine.core import EngineCore
from kvmesh.engine.fake import FakeRunner
from kvmesh.engine.host_arena import HostArena
from kvmesh.engine.protocol import SequenceChunk
from kvmesh.engine.sequence import Sequence, SequenceState
from kvmesh.engine.swap_space import SwapSpace
from kvmesh.engine.tier_stores import HostStore
from kvmesh.engine.tiered_cache import LoadResult, TieredCache
from kvmesh.kv.tiers import Tier
from kvmesh.policy.batching import BatchLimits
from kvmesh.policy.prompt_time import PromptTime
from kvmesh.policy.step_rules import StepRules
from tests.late_copier import LateCopier
from tests.worker_driver import make_spec, reference_tokens


class EngineMachine(RuleBasedStateMachine):
    """A small pool, so that sharing, eviction and preemption all happen."""

    groups = KvGroups()
    num_blocks = 12
    swap_places = 0
    growth_tokens = 2

    def __init__(self) -> None:
        super().__init__()
        self.runner = FakeRunner(num_blocks=self.num_blocks, block_size=4, groups=self.groups)
        limits = BatchLimits(max_tokens=10, max_sequences=3)
        self.core = EngineCore(
            self.runner.spec,
            self.num_blocks,
            limits,
            self.growth_tokens,
            swap=self.swap_space(),
        )
        self.sequences: list[Sequence] = []
        self.in_flight: list[SequenceChunk] | None = None

    def swap_space(self) -> SwapSpace | None:
        if not self.swap_places:
            return None
        block_bytes = self.runner.spec.layout.block_bytes
        # On a clock that stands still copies are free, so all that fits is kept.
        arena = HostArena(self.runner.kv, block_bytes, self.swap_places)
        return SwapSpace(arena, PromptTime(64), ManualClock(), self.copier())

    def copier(self) -> Copier:
        return InlineCopier()

    @rule(
        length=st.integers(1, 24),
        stem=st.integers(1, 2),
        max_tokens=st.integers(1, 12),
        only_prefill=st.booleans(),
    )
    def admit(self, length: int, stem: int, max_tokens: int, only_prefill: bool) -> None:
        # Few stems, so that prompts share prefixes.
        spec = make_spec([stem * 100 + position for position in range(length)], max_tokens)
        admit = self.core.admit_prefill if only_prefill else self.core.admit_decode
        sequence = admit(spec)
        if isinstance(sequence, Refusal):
            return
        self.sequences.append(sequence)

    @rule(prompts_first=st.booleans(), beside_decode=st.none() | st.integers(1, 4))
    def take_a_role(self, prompts_first: bool, beside_decode: int | None) -> None:
        self.core.set_rules(StepRules(prompts_first, beside_decode))

    @precondition(lambda self: self.held())
    @rule(data=st.data())
    def run_held(self, data: st.DataObject) -> None:
        self.core.run(data.draw(st.sampled_from(self.held())))

    @precondition(lambda self: self.sequences)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        sequence = data.draw(st.sampled_from(self.sequences))
        self.core.release(sequence)
        self.sequences.remove(sequence)

    @precondition(lambda self: self.in_flight is None)
    @rule()
    def begin_step(self) -> None:
        chunks = self.core.plan_step()
        self.in_flight = chunks or None

    @precondition(lambda self: self.in_flight is not None)
    @rule()
    def end_step(self) -> None:
        assert self.in_flight is not None
        # The memory is computed on only now: whoever was released in between must not have lost it.
        self.core.finish_step(self.in_flight, self.runner.execute(self.in_flight))
        self.in_flight = None

    def held(self) -> list[Sequence]:
        return [
            sequence
            for sequence in self.sequences
            if sequence.state is SequenceState.HELD and not sequence.hold_after_first
        ]

    @invariant()
    def bookkeeping_is_whole(self) -> None:
        self.core.check_integrity()

    @invariant()
    def tokens_are_those_of_an_engine_alone(self) -> None:
        for sequence in self.sequences:
            generated = sequence.tokens[len(sequence.spec.token_ids) :]
            if sequence.state is SequenceState.GONE:
                assert generated == reference_tokens(
                    sequence.spec, block_size=4, groups=self.groups
                )

    def teardown(self) -> None:
        if self.in_flight is not None:
            self.end_step()
        for sequence in self.sequences:
            self.core.release(sequence)
        self.core.check_integrity()
        assert self.core.is_idle
        assert self.core.statistics().swap.blocks_kept == 0


class WindowMachine(EngineMachine):
    """Full attention beside two groups with a window."""

    groups = KvGroups((0, 6, 6))
    num_blocks = 40


class StateMachine(EngineMachine):
    """Full attention beside linear states."""

    groups = KvGroups((0,), state_blocks=2)
    num_blocks = 17


class OnlyWindowMachine(EngineMachine):
    """No group keeps all positions."""

    groups = KvGroups((5,), state_blocks=1)
    num_blocks = 14


class SwapMachine(EngineMachine):
    """Preempted sequences go to host memory, which is sometimes full."""

    num_blocks = 10
    swap_places = 8
    growth_tokens = 0

    @precondition(lambda self: self.in_flight is None)
    @rule(stems=st.lists(st.integers(3, 9), min_size=3, max_size=5), count=st.integers(4, 12))
    def crowd(self, stems: list[int], count: int) -> None:
        """More sequences than there is room for, grown until some are preempted."""
        for stem in stems:
            self.admit(length=2 + stem, stem=stem, max_tokens=12, only_prefill=False)
        for sequence in self.held():
            self.core.run(sequence)
        for _ in range(count):
            self.begin_step()
            if self.in_flight is not None:
                self.end_step()


class SwapGroupsMachine(SwapMachine):
    """All kinds of groups in host memory."""

    groups = KvGroups((0, 6), state_blocks=2)
    num_blocks = 24
    swap_places = 16


class LateSwapMachine(SwapMachine):
    """Copies are made some time after they were started, steps and cancels between them."""

    def copier(self) -> Copier:
        self.late = LateCopier()
        return self.late

    @precondition(lambda self: self.late.jobs)
    @rule()
    def copy(self) -> None:
        self.late.run_one()

    @precondition(lambda self: self.in_flight is None)
    @rule()
    def finish_all(self) -> None:
        """With copies made as soon as nothing else can be done, everybody ends."""
        for sequence in [each for each in self.sequences if each.hold_after_first]:
            # It would keep its blocks for somebody to take.
            self.core.release(sequence)
            self.sequences.remove(sequence)
        for sequence in self.held():
            self.core.run(sequence)
        for _ in range(1000):
            if not self.core.has_work:
                return
            self.begin_step()
            if self.in_flight is not None:
                self.end_step()
            else:
                self.late.run_one()
        pytest.fail("they take room from each other for ever")

    def teardown(self) -> None:
        if self.in_flight is not None:
            self.end_step()
        for sequence in self.sequences:
            self.core.release(sequence)
        while self.late.jobs:
            self.late.run_one()
        super().teardown()


class LateSwapGroupsMachine(LateSwapMachine):
    """The same with all kinds of groups."""

    groups = KvGroups((0, 6), state_blocks=2)
    num_blocks = 24
    swap_places = 16


class TierMachine(EngineMachine):
    """What is evicted can be brought back from host memory before a sequence runs."""

    num_places = 14

    def __init__(self) -> None:
        super().__init__()
        self.late = LateCopier()
        block_bytes = self.runner.spec.layout.block_bytes
        arena = HostArena(self.runner.kv, block_bytes, self.num_places)
        self.tiers = TieredCache(
            self.core.pool,
            self.core.fills,
            [Tier("host", self.num_places)],
            [HostStore(arena, self.late)],
            PromptTime(64),
            ManualClock(),
        )
        self.loading: list[Sequence] = []

    @precondition(lambda self: self.held())
    @rule(data=st.data())
    def load(self, data: st.DataObject) -> None:
        sequence = data.draw(st.sampled_from(self.held()))
        if sequence.num_computed >= len(sequence.tokens) - 1:
            return
        self.loading.append(sequence)
        before = sequence.num_computed // 4

        def done(result: LoadResult) -> None:
            assert result.num_blocks >= before
            self.loading.remove(sequence)
            if sequence.state is not SequenceState.GONE:
                assert sequence.num_computed == result.num_blocks * 4

        self.tiers.load(self.core.begin_fill(sequence), done)

    @precondition(lambda self: self.late.jobs)
    @rule()
    def copy(self) -> None:
        self.late.run_one()

    def held(self) -> list[Sequence]:
        return [each for each in super().held() if each not in self.loading]

    @invariant()
    def tiers_are_whole(self) -> None:
        self.tiers.check_integrity()

    def teardown(self) -> None:
        if self.in_flight is not None:
            self.end_step()
        for sequence in self.sequences:
            self.core.release(sequence)
        self.late.catch_up()
        assert self.tiers.is_idle
        super().teardown()


class TierGroupsMachine(TierMachine):
    """All kinds of groups."""

    groups = KvGroups((0, 6), state_blocks=2)
    num_blocks = 28
    num_places = 40


TestEngine = EngineMachine.TestCase
TestWindows = WindowMachine.TestCase
TestStates = StateMachine.TestCase
TestOnlyWindow = OnlyWindowMachine.TestCase
TestSwap = SwapMachine.TestCase
TestSwapGroups = SwapGroupsMachine.TestCase
TestLateSwap = LateSwapMachine.TestCase
TestLateSwapGroups = LateSwapGroupsMachine.TestCase
TestTiers = TierMachine.TestCase
TestTierGroups = TierGroupsMachine.TestCase
for _case in (TestEngine, TestWindows, TestStates, TestOnlyWindow, TestTiers, TestTierGroups):
    _case.settings = settings(max_examples=60, stateful_step_count=40)
for _case in (
    TestSwap,
    TestSwapGroups,
    TestLateSwap,
    TestLateSwapGroups,
):  # each of their examples preempts
    _case.settings = settings(max_examples=20, stateful_step_count=30)
del _case  # a class in a module is collected under every name it has
