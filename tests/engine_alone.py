"""What one runner generates under our scheduler, in one process."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from kvmesh.core.types import SamplingParams, SequenceSpec
from kvmesh.engine.core import EngineCore
from kvmesh.engine.protocol import ModelRunner
from kvmesh.engine.sequence import Emission
from kvmesh.engine.sequence import Sequence as Line
from kvmesh.kv.hashing import root_hash
from kvmesh.policy.batching import BatchLimits

ONE_TOKEN = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)


def generated(
    runner: ModelRunner,
    prompts: Sequence[Sequence[int]],
    sampling: SamplingParams,
    *,
    max_tokens: int = 512,
    num_blocks: int = 0,
    adapters: Sequence[str] = (),
) -> list[list[int]]:
    """Tokens after each prompt, all of them at once under our scheduler.

    Args:
        max_tokens: of one step.
        num_blocks: that it may use; 0 for all.
        adapters: of each prompt; empty for none at all.
    """
    specs = [
        SequenceSpec(
            tuple(prompt), len(prompt), sampling, root_hash("", adapter=name), adapter=name
        )
        for prompt, name in zip(prompts, adapters or [""] * len(prompts), strict=True)
    ]
    found = emitted(runner, specs, max_tokens=max_tokens, num_blocks=num_blocks)
    return [[emission.token_id for emission in each] for each in found]


def embedded(
    runner: ModelRunner,
    prompts: Sequence[Sequence[int]],
    dimensions: int = 0,
    *,
    max_tokens: int = 512,
) -> list[bytes]:
    """Embeddings of prompts, all of them at once under our scheduler.

    Args:
        dimensions: of each; 0 for all.
        max_tokens: of one step.
    """
    specs = [
        SequenceSpec(tuple(prompt), len(prompt), ONE_TOKEN, root_hash(""), embedding=dimensions)
        for prompt in prompts
    ]
    found = emitted(runner, specs, max_tokens=max_tokens)
    return [emission.embedding for (emission,) in found]


def emitted(
    runner: ModelRunner,
    specs: Sequence[SequenceSpec],
    *,
    max_tokens: int = 512,
    num_blocks: int = 0,
) -> list[list[Emission]]:
    """What each of some sequences emits, all of them at once under our scheduler.

    Args:
        max_tokens: of one step.
        num_blocks: that it may use; 0 for all.
    """
    blocks = num_blocks or runner.kv.num_blocks
    # Those that were added after the start are not in the runner's own spec.
    adapters = tuple({spec.adapter for spec in specs} - {""})
    spec = replace(runner.spec, adapters=adapters)
    core = EngineCore(spec, blocks, BatchLimits(max_tokens=max_tokens), growth_tokens=0)
    found: list[list[Emission]] = [[] for _ in specs]
    waiting, admitted = list(specs), 0
    while admitted < len(waiting) or core.has_work:
        while admitted < len(waiting):
            line = core.admit_decode(waiting[admitted])
            if not isinstance(line, Line):
                assert core.has_work, line
                break
            line.on_emission = found[admitted].append
            core.run(line)
            admitted += 1
        chunks = core.plan_step()
        runner.forget(core.take_gone())
        core.finish_step(chunks, runner.execute(chunks))
    core.check_integrity()
    assert core.is_idle
    return found
