"""Steps before the first request: a device compiles a kernel at its first launch, and may hang.

Captured decode steps compile their kernels at capture; these steps cover the others.
Tests: tests/unit/engine/test_warm_up.py, tests/unit/kernels/test_triton_kernels.py.
"""

from __future__ import annotations

from kvmesh.engine.measure import Stage, blocks_of
from kvmesh.engine.protocol import ModelRunner


def first_step(runner: ModelRunner) -> None:
    """Computes one token, so that an engine that cannot compute never joins a fleet.

    A device that hung may hang again in the process's next life. Then this step does not end, and
    no request waits for it.
    """
    if blocks_of(runner, 1) <= runner.kv.num_blocks:
        Stage(runner, [1]).run([0], [1])


def warm_up(runner: ModelRunner, max_tokens: int) -> None:
    """Computes steps so that no later step launches a kernel for the first time.

    Runs prompts of all sizes, since attention and experts use other kernels for many rows than for
    few, and decode rows with a short context (one part) and a long one. The steps write to blocks,
    so no block may be in use.

    Args:
        max_tokens: maximum tokens of a step.
    """
    spec, groups = runner.spec, runner.spec.groups
    blocks = (runner.kv.num_blocks - groups.state_blocks) // len(groups.windows)
    context = min(spec.max_model_len, blocks * spec.layout.block_size)
    longest = min(max_tokens, context)
    if longest < 1:  # the pool has no room for one block; every request is refused
        return
    halves = [longest >> power for power in range(longest.bit_length())]
    prompts = [(0, end) for end in halves if end > 1 or end == longest]
    short = min(2, longest)
    for start, end in (*prompts, (short - 1, short), (context - 1, context)):
        Stage(runner, [end]).run([start], [end])
