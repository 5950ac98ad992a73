"""What one engine alone generates: the reference of everything that takes two."""

from __future__ import annotations

from kvmesh.core.types import SequenceSpec
from kvmesh.engine.core import EngineCore
from kvmesh.engine.protocol import ModelRunner
from kvmesh.engine.sequence import Sequence
from tests.ranked_engine import RankedRunner


def tokens_of(runner: ModelRunner | RankedRunner, spec: SequenceSpec) -> list[int]:
    """All tokens that it generates for `spec`."""
    core = EngineCore(runner.spec, runner.kv.num_blocks)
    sequence = core.admit_decode(spec)
    assert isinstance(sequence, Sequence), sequence
    core.run(sequence)
    while core.has_work:
        chunks = core.plan_step()
        core.finish_step(chunks, runner.execute(chunks))
    return list(sequence.tokens[len(spec.token_ids) :])
