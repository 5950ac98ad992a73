"""Host memory for the KV of a worker's preempted sequences, from its config.

Tests: tests/unit/runtime/test_worker_swap.py.
"""

from __future__ import annotations

from kvmesh.core.clock import Clock
from kvmesh.core.errors import ConfigError
from kvmesh.engine.copier import Copier
from kvmesh.engine.host_arena import HostArena
from kvmesh.engine.protocol import ModelRunner
from kvmesh.engine.swap_space import SwapSpace
from kvmesh.policy.prompt_time import PromptTime
from kvmesh.runtime.worker_config import EngineSection

_GIB = 1 << 30
_DEVICE_GIB = 4.0


def make_swap_space(
    config: EngineSection,
    runner: ModelRunner,
    prompt_time: PromptTime,
    clock: Clock,
    copier: Copier,
) -> SwapSpace | None:
    """Makes the space for preempted sequences' KV; None if their KV is computed again.

    On the CPU the pool itself is host memory, which is better spent on more blocks.

    Raises:
        ConfigError: the size is negative, or smaller than one block.
        LostError: the device has no room for the copies' buffers.
    """
    gib = config.swap_gib
    if gib == -1:
        gib = 0.0 if config.device == "cpu" else _DEVICE_GIB
    if gib == 0:
        return None
    block_bytes = runner.spec.layout.block_bytes
    num_places = int(gib * _GIB) // block_bytes
    if num_places <= 0:
        raise ConfigError(
            f"engine.swap_gib {gib:g} holds no block of {block_bytes} bytes: give more, or 0"
        )
    return SwapSpace(HostArena(runner.kv, block_bytes, num_places), prompt_time, clock, copier)
