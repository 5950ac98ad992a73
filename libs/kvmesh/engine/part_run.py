"""A part of a prompt, computed layer by layer, in each layer piece by piece.

Each piece is an ordinary forward pass of its rows. It pauses after it has written the keys and
values of a layer, or before it reads a state. It resumes when all pieces have got as far and the
same layer has arrived from upstream. So a layer's KV is sent early, only the paused passes occupy
memory between two layers, and other work can run between any two pieces.
Why in this order: docs/adr/0036-prompt-chains.md. Tests: tests/unit/engine/test_prompt_chain.py,
tests/integration/test_chained_families.py.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from greenlet import greenlet
from torch import Tensor

from kvmesh.engine.protocol import SampledToken, SequenceChunk
from kvmesh.engine.stage_progress import StageProgress
from kvmesh.kv.stages import Stages, state_kind

Forward = Callable[[SequenceChunk, "Pauses"], tuple[Tensor, Tensor]]
"""Computes one piece and calls the pauses in each layer; see `DecoderModel.forward`."""

Choose = Callable[[SequenceChunk, Tensor, Tensor], SampledToken]
"""Samples the token after a piece from the result of its pass."""


def pieces_of(chunk: SequenceChunk, piece_tokens: int) -> list[SequenceChunk]:
    """Splits a part into ordinary chunks.

    A chunk of one token would be a decode step, so the last one joins the chunk before it.
    """
    starts = [*range(chunk.start, chunk.end, piece_tokens)]
    if len(starts) > 1 and chunk.end - starts[-1] == 1:
        starts.pop()
    ends = [*starts[1:], chunk.end]
    return [
        replace(
            chunk,
            start=start,
            end=end,
            sample=chunk.sample and end == chunk.end,
            state=chunk.state and chunk.state.within(start, end, is_first=start == chunk.start),
            on_layers=None,
            pace=None,
            upstream=None,
        )
        for start, end in zip(starts, ends, strict=True)
    ]


class UpstreamLostError(Exception):
    """The worker upstream sends no further layers, so the part cannot be computed."""


class Pauses:
    """Interrupts the passes of one part after each layer; a `LayerWatch`.

    Args:
        tell: called with the number of leading stages that are complete for all positions.
    """

    def __init__(self, stages: Stages, tell: Callable[[int], None]) -> None:
        self._progress = StageProgress(stages, tell)
        self.is_last = False
        """Whether the running pass computes the last piece."""

    def written(self, group: int, slot: int) -> None:
        """Pauses the pass between writing a layer's keys and values and its attention."""
        self._leave(self._progress.number_of(group, slot))

    def before_states(self, part: int, slot: int) -> None:
        """See `StateWatch`."""
        self._leave(self._progress.number_of(state_kind(part), slot))

    def after_states(self, part: int, slot: int) -> None:
        """See `StateWatch`."""
        if self.is_last:
            self.computed(self._progress.number_of(state_kind(part), slot))

    def computed(self, stage: int) -> None:
        """Records that a stage is complete for all positions. Repeated calls have no effect."""
        self._progress.complete(stage)

    @staticmethod
    def _leave(stage: int) -> None:
        parent = greenlet.getcurrent().parent
        assert parent is not None, "a pass runs beside whoever resumes it"
        parent.switch(stage)


class PartRun:
    """The passes of one part. All calls come from one thread.

    Args:
        chunk: the part; its `pace` is set.
        stages: stages of the model.
        forward: computes one piece.
        choose: samples after the last piece.

    Attributes:
        token: token sampled after the part; None before, and if the part does not sample.
    """

    def __init__(
        self, chunk: SequenceChunk, stages: Stages, forward: Forward, choose: Choose
    ) -> None:
        pace = chunk.pace
        assert pace is not None, "an ordinary chunk is one step"
        self.token: SampledToken | None = None
        self._gate = None if chunk.upstream is None else chunk.upstream.gate
        self._stages = stages
        self._pieces = pieces_of(chunk, pace.piece_tokens)
        self._pauses = Pauses(stages, chunk.on_layers or (lambda _: None))
        self._forward, self._choose = forward, choose
        self._passes = [greenlet(self._pass) for _ in self._pieces]
        # A pass is resumed once for each stage, and once more after the last one.
        whole = (len(stages) + 1) * pace.step_tokens
        self._per_step = max(1, whole // max(pace.piece_tokens, 1))
        self._next = 0
        self._stage = -1
        """Stage at which all passes are paused; -1 before the first one."""

    @property
    def is_done(self) -> bool:
        """Whether the whole part is computed."""
        return all(each.dead for each in self._passes)

    def advance(self) -> int:
        """Computes about as much as one step.

        Returns:
            The number of stages from upstream that the part needs to continue.

        Raises:
            UpstreamLostError: these stages will not arrive.
        """
        for _ in range(self._per_step):
            if self._next == 0 and not self._may_go_on():
                break
            self._resume(self._next)
            self._next = (self._next + 1) % len(self._passes)
            if self._next == 0 and self.is_done:
                break
        return self._stage + 1

    def close(self) -> None:
        """Abandons the rest of the part."""
        for each in self._passes:
            if each and not each.dead:
                each.throw()

    def _may_go_on(self) -> bool:
        """Whether the stage at which all passes are paused has also arrived from upstream."""
        passes = True if self._gate is None else self._gate.passes(self._stage + 1)
        if passes is False:
            raise UpstreamLostError
        if passes and self._stage >= 0 and self._stages[self._stage].kind >= 0:
            self._pauses.computed(self._stage)
        return passes is True

    def _resume(self, index: int) -> None:
        one = self._passes[index]
        self._pauses.is_last = index == len(self._passes) - 1
        left_at = one.switch() if one else one.switch(self._pieces[index])
        if self._pauses.is_last and not one.dead:
            self._stage = left_at
            self._may_go_on()  # reports the stage now, even if the part must wait

    def _pass(self, piece: SequenceChunk) -> None:
        x, delta = self._forward(piece, self._pauses)
        if piece.sample:
            self.token = self._choose(piece, x, delta)
