"""Engines with room for the longest sequence and hardly more, for small models of all kinds."""

from __future__ import annotations

import copy
import random
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

from kvmesh.core.clock import ManualClock
from kvmesh.engine.checkpoint import load_model_config
from kvmesh.engine.config import ModelConfig
from kvmesh.engine.core import EngineCore
from kvmesh.engine.host_arena import HostArena
from kvmesh.engine.runner import TorchRunner
from kvmesh.engine.swap_space import SwapSpace
from kvmesh.kv.groups import blocks_at_most, num_blocks_of
from kvmesh.policy.batching import BatchLimits
from kvmesh.policy.prompt_time import PromptTime
from tests.integration.crowd_requests import LONGEST
from tests.integration.families import BLOCK_SIZE, random_model
from tests.integration.family_configs import CONFIGS
from tests.late_copier import LateCopier

ALL_GROUPS = "all-groups"
"""Qwen3-Next with a window in its last layer: full attention, a window and states in one model."""
FAMILIES = (ALL_GROUPS, "qwen3-next", "qwen3.5", "kimi-linear", "minimax", "gemma3")

_WINDOWS = (0, 0, 0, 0, 40)
_NUM_BLOCKS = 96
_LOST = 1e6
"""In blocks that nobody holds."""


class Engine:
    """A runner, the bookkeeping of some of its blocks, and late copies to host memory.

    There is room for the longest sequence alone and hardly more.
    """

    def __init__(self, runner: TorchRunner, draw: random.Random) -> None:
        self.runner = runner
        runner.use_static_steps(draw.choice((0, 3)))
        spec = runner.spec
        size, chunk = spec.layout.block_size, draw.choice((5, 17, 33, 64))
        longest = num_blocks_of(LONGEST, size) * size
        num_blocks = blocks_at_most(spec.groups, longest, chunk, size) + draw.randrange(4)
        assert num_blocks <= _NUM_BLOCKS
        self.copier = LateCopier()
        self.arena = HostArena(
            runner.kv, spec.layout.block_bytes, draw.choice((num_blocks // 2, 2 * num_blocks))
        )
        # On a clock that stands still copies are free, so all that fits is kept.
        swap = SwapSpace(self.arena, PromptTime(chunk), ManualClock(), self.copier)
        self.core = EngineCore(
            spec,
            num_blocks,
            BatchLimits(chunk, draw.randrange(2, 7), draw.choice((None, max(4, chunk // 2)))),
            growth_tokens=draw.choice((0, 0, 20)),
            state_interval_tokens=draw.choice((0, 1, 96)),
            swap=swap if draw.random() < 0.7 else None,
        )
        self.check()

    def check(self) -> None:
        """Asserts that bookkeeping is whole, and overwrites what nobody holds."""
        self.core.check_integrity()
        for first, count in self.core.pool._empty.segments():
            self.runner.kv.tensor[first : first + count] = _LOST

    def check_idle(self) -> None:
        """Asserts that nothing is left."""
        self.core.check_integrity()
        assert self.core.is_idle
        now = self.core.statistics()
        assert (now.num_running, now.num_held, now.num_preempted) == (0, 0, 0)
        assert now.swap.blocks_kept == 0
        assert now.blocks_free == self.core.pool.num_blocks
        assert self.arena.num_free == self.arena.num_places
        assert self.core.fills.num_open == 0


def copy_block(source: Engine, block: int, target: Engine, place: int) -> None:
    target.runner.kv.write_view(place, 1)[:] = source.runner.kv.read_view(block, 1)
    target.runner.kv.written(place, 1)


def load(name: str, folder: Path) -> tuple[TorchRunner, TorchRunner]:
    """Two runners of a random checkpoint, which is written to `folder`.

    Rounding is not to be seen: every row takes all experts, as it would choose between two that are
    as good; and norms have a large epsilon, as a query at right angles to its key leaves of a head
    that forgets hardly more than rounding, which the norm behind it would make as large as others.
    """
    config = copy.deepcopy(CONFIGS["qwen3-next" if name == ALL_GROUPS else name])
    for key in ("num_experts", "num_local_experts", "n_routed_experts"):
        if getattr(config, key, None):
            config.num_experts_per_tok = getattr(config, key)
    if getattr(config, "n_group", None):
        config.topk_group = config.n_group
    config.rms_norm_eps = 0.1
    random_model(config).save_pretrained(folder)
    return load_runners(name, folder)


def load_runners(name: str, folder: Path) -> tuple[TorchRunner, TorchRunner]:
    """Two runners of the checkpoint in `folder`."""

    def config_of(folder: Path) -> ModelConfig:
        found = load_model_config(folder)
        return replace(found, windows=_WINDOWS) if name == ALL_GROUPS else found

    def runner() -> TorchRunner:
        return TorchRunner.load(
            folder,
            served_name=name,
            num_blocks=_NUM_BLOCKS,
            block_size=BLOCK_SIZE,
            max_model_len=2 * LONGEST,
        )

    with patch("kvmesh.engine.runner.load_model_config", config_of):
        return runner(), runner()
