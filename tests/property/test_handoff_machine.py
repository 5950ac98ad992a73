"""The handoff table over a real block pool and a model of the memory, under every interleaving.

The model writes down who wrote each block. A write in flight tears its blocks; a block counts as
good for a commit only if its last bytes came from one writer of this reservation.
"""

from dataclasses import dataclass, field

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvmesh.core.types import Refusal, RequestId
from kvmesh.kv.block_pool import BlockPool
from kvmesh.kv.handoff import HandoffTable
from kvmesh.kv.handoff_types import (
    AllWritten,
    Awaited,
    BlockGrant,
    Committed,
    Outcome,
    WriteClaim,
)

LIFE, LEASE_S, NUM_BLOCKS = 3, 10.0, 16
TORN = (0, 0)


@dataclass
class Model:
    """What one reservation should be."""

    reservation_id: int
    request_id: RequestId
    blocks: list[int]
    num_cached: int
    capability: bytes
    deadline: float
    generation: int
    awaited: bool = False
    committed: bool = False
    outcome: Outcome | None = None
    answers: list[Committed] = field(default_factory=list)

    @property
    def to_write(self) -> list[int]:
        return self.blocks[self.num_cached :]


@dataclass
class Grant:
    """A writer that is in memory."""

    reservation_id: int
    generation: int
    blocks: tuple[int, ...]


class HandoffMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.pool = BlockPool(NUM_BLOCKS, 4)
        self.shared = self.pool.allocate(2)  # a cached prefix that several requests hold
        self.table = HandoffTable(LIFE, LEASE_S)
        self.models: list[Model] = []
        self.grants: dict[int, Grant] = {}
        self.memory: dict[int, tuple[int, int]] = {}
        self.decoding: list[Model] = []

    # -- What the model knows -------------------------------------------------------------------

    def is_live(self, model: Model) -> bool:
        return model.outcome is None and self.now < model.deadline

    def writers_in(self, blocks: list[int]) -> bool:
        return any(set(grant.blocks) & set(blocks) for grant in self.grants.values())

    def is_stale(self, grant: Grant) -> bool:
        model = self.models[grant.reservation_id - 1]
        return model.outcome is not None

    def pick(self, data: st.DataObject) -> Model:
        """Mostly a reservation that is open, else one of the last that ended."""
        live = [model for model in self.models if self.is_live(model)]
        ended = [model for model in self.models if not self.is_live(model)]
        return data.draw(st.sampled_from(live * 2 + ended[-2:]))

    # -- The decode worker ----------------------------------------------------------------------

    @precondition(lambda self: sum(map(self.is_live, self.models)) < 3)
    @rule(num_new=st.integers(0, 4), share=st.booleans(), attempt=st.integers(1, 3))
    def reserve(self, num_new: int, share: bool, attempt: int) -> None:
        if num_new > self.pool.num_free:
            return
        cached = list(self.shared) if share else []
        self.pool.acquire(cached)
        blocks = cached + self.pool.allocate(num_new)
        number = len(self.models) + 1
        request_id, capability = RequestId(f"r{number}"), bytes([number % 256, 1])
        reserved = self.table.reserve(
            request_id, blocks, len(cached), capability, attempt, self.now
        )
        assert reserved == number
        deadline = self.now + LEASE_S
        model = Model(number, request_id, blocks, len(cached), capability, deadline, attempt)
        self.models.append(model)

    @precondition(lambda self: self.models)
    @rule(data=st.data())
    def renew(self, data: st.DataObject) -> None:
        model = self.pick(data)
        live = self.is_live(model)
        assert self.table.renew(model.reservation_id, self.now) == live
        if live:
            model.deadline = self.now + LEASE_S

    @precondition(lambda self: self.models)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        model = self.pick(data)
        assert self.table.cancel(model.reservation_id) == (model.outcome is None)
        if model.outcome is None:
            model.outcome = Outcome.CANCELLED

    @precondition(lambda self: self.models)
    @rule(data=st.data())
    def take(self, data: st.DataObject) -> None:
        model = self.pick(data)
        answer = self.table.take(model.reservation_id)
        if not model.committed or model.outcome is not None:
            assert isinstance(answer, Refusal)
            return
        assert answer == (model.request_id, tuple(model.blocks), model.num_cached)
        model.outcome = Outcome.TAKEN
        self.decoding.append(model)

    @precondition(lambda self: self.decoding)
    @rule()
    def finish_decoding(self) -> None:
        self.pool.release(self.decoding.pop(0).blocks)

    @rule(seconds=st.sampled_from([0.5, 1.0, 4.0, LEASE_S]), sweep=st.booleans())
    def time_passes(self, seconds: float, sweep: bool) -> None:
        self.now += seconds
        if not sweep:
            return
        overdue = [m for m in self.models if m.outcome is None and m.deadline <= self.now]
        assert self.table.expire(self.now) == [model.request_id for model in overdue]
        for model in overdue:
            model.outcome = Outcome.EXPIRED

    @rule()
    def drain(self) -> None:
        for _, request_id, blocks, outcome in self.table.drain_released():
            model = next(m for m in self.models if m.request_id == request_id)
            assert outcome is model.outcome
            assert list(blocks) == model.blocks
            assert not self.writers_in(model.blocks[model.num_cached :])
            self.pool.release(blocks)
            model.blocks = []  # a second release would not compare equal

    # -- Prefill workers, those that should have stopped included -------------------------------

    def write(self, model: Model, first: int, count: int, older: int = 0, **wrong: int) -> int:
        """Asks for a write and checks the answer; the write's id, or 0 if it was refused."""
        life, capability = wrong.get("life", LIFE), model.capability
        capability = b"forged" if "forged" in wrong else capability
        answer = self.table.begin_write(
            WriteClaim(model.reservation_id, life, model.generation - older, capability),
            range(first, first + count),
            self.now,
        )
        in_range = first >= 0 and count >= 1 and first + count <= len(model.to_write)
        known = model.outcome in (None, Outcome.TAKEN) and self.now < model.deadline
        if known and model.committed and not older and not wrong:
            assert answer == AllWritten(model.reservation_id)
            return 0
        current = not older and not wrong and self.is_live(model)
        wanted = model.to_write[first : first + count] if in_range else []
        if not (current and in_range) or self.writers_in(wanted):
            assert isinstance(answer, Refusal)
            return 0
        assert isinstance(answer, BlockGrant)
        assert list(answer.blocks) == wanted
        assert answer.write_id not in self.grants
        self.grants[answer.write_id] = Grant(model.reservation_id, model.generation, answer.blocks)
        self.memory.update(dict.fromkeys(wanted, TORN))
        model.deadline = self.now + LEASE_S
        return answer.write_id

    @precondition(lambda self: self.models)
    @rule(data=st.data(), first=st.integers(-1, 3), count=st.integers(0, 4))
    def begin_write(self, data: st.DataObject, first: int, count: int) -> None:
        self.write(self.pick(data), first, count)

    @precondition(lambda self: self.models)
    @rule(data=st.data(), left_out=st.sampled_from([-1, -1, 0, 1]))
    def write_what_is_missing(self, data: st.DataObject, left_out: int) -> None:
        model = self.pick(data)
        content = (model.reservation_id, model.generation)
        for index, block in enumerate(model.to_write):
            if self.memory.get(block) != content and index != left_out:
                write_id = self.write(model, index, 1)
                if write_id:
                    self.finish(write_id, ok=True)

    @precondition(lambda self: self.models)
    @rule(
        data=st.data(),
        older=st.integers(-1, 2),
        wrong=st.sampled_from([{}, {}, {"life": LIFE - 1}, {"forged": True}]),
    )
    def stale_or_strange_writer(
        self, data: st.DataObject, older: int, wrong: dict[str, int]
    ) -> None:
        self.write(self.pick(data), 0, 1, older, **wrong)

    def finish(self, write_id: int, ok: bool) -> None:
        grant = self.grants.pop(write_id)
        content = (grant.reservation_id, grant.generation) if ok else TORN
        self.memory.update(dict.fromkeys(grant.blocks, content))
        answer = self.table.end_write(write_id, ok, self.now)
        model = self.models[grant.reservation_id - 1]
        waits = model.awaited and not model.committed and self.is_live(model)
        if ok and waits and self.is_whole(model):
            assert answer is not None
            self.has_committed(model, answer)
        else:
            assert answer is None

    @precondition(lambda self: self.grants)
    @rule(data=st.data(), ok=st.sampled_from([True, True, True, False]))
    def end_write(self, data: st.DataObject, ok: bool) -> None:
        self.finish(data.draw(st.sampled_from(sorted(self.grants))), ok)

    @precondition(lambda self: self.grants)
    @rule(data=st.data())
    def prefill_crashes(self, data: st.DataObject) -> None:
        victim = self.grants[data.draw(st.sampled_from(sorted(self.grants)))]
        for write_id, grant in list(self.grants.items()):
            lost = (grant.reservation_id, grant.generation)
            if lost == (victim.reservation_id, victim.generation):
                self.finish(write_id, ok=False)

    @rule()
    def channel_cuts_stale_writers(self) -> None:
        for write_id, grant in list(self.grants.items()):
            if self.is_stale(grant):
                self.finish(write_id, ok=False)

    @precondition(lambda self: self.models)
    @rule(data=st.data(), older=st.sampled_from([0, 0, 0, 1]), forged=st.booleans())
    def commit(self, data: st.DataObject, older: int, forged: bool) -> None:
        model = self.pick(data)
        forged = forged and older == 1
        secret = b"forged" if forged else model.capability
        claim = WriteClaim(model.reservation_id, LIFE, model.generation - older, secret)
        answer = self.table.commit(claim, self.now)
        known = model.outcome in (None, Outcome.TAKEN) and self.now < model.deadline
        if older or not known:
            assert isinstance(answer, Refusal)
            return
        if not (model.committed or self.is_whole(model)):
            assert answer == Awaited(model.reservation_id)
            model.awaited = True
            model.deadline = self.now + LEASE_S
            return
        assert isinstance(answer, Committed)
        self.has_committed(model, answer)

    def is_whole(self, model: Model) -> bool:
        content = (model.reservation_id, model.generation)
        return all(self.memory.get(block) == content for block in model.to_write)

    def has_committed(self, model: Model, answer: Committed) -> None:
        if not model.committed:
            model.committed = True
            model.deadline = self.now + LEASE_S
        model.answers.append(answer)
        assert answer == model.answers[0], "a repeated commit got another answer"

    # -- Always ---------------------------------------------------------------------------------

    @invariant()
    def records_agree(self) -> None:
        self.table.check_integrity()
        self.pool.check_integrity()
        statistics = self.table.statistics()
        outcomes = [model.outcome for model in self.models]
        assert statistics.taken_total == outcomes.count(Outcome.TAKEN)
        assert statistics.cancelled_total == outcomes.count(Outcome.CANCELLED)
        assert statistics.expired_total == outcomes.count(Outcome.EXPIRED)
        live = outcomes.count(None)
        assert statistics.num_reserved + statistics.num_committed == live
        assert statistics.num_writes == len(self.grants)

    @invariant()
    def no_block_with_a_writer_is_free(self) -> None:
        free = set(range(NUM_BLOCKS)) - {b for m in self.models for b in m.blocks}
        assert not self.writers_in(sorted(free))
        written = [block for grant in self.grants.values() for block in grant.blocks]
        assert len(set(written)) == len(written), "two writers are in one block"
        assert not set(written) & set(self.shared), "a shared block is written"

    def teardown(self) -> None:
        self.time_passes(LEASE_S, sweep=True)
        self.channel_cuts_stale_writers()
        self.drain()
        while self.decoding:
            self.finish_decoding()
        self.pool.release(self.shared)
        assert self.table.is_idle
        assert self.pool.is_idle
        assert self.table.statistics().reserved_total == len(self.models)
        assert all(model.outcome is not None for model in self.models)


TestHandoffMachine = HandoffMachine.TestCase
TestHandoffMachine.settings = settings(max_examples=150, stateful_step_count=50)
