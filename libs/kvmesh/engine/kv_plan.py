"""Where each layer keeps its KV: which group, which place in the group's blocks.

Every block of the pool has the same bytes, whatever group it serves. Token groups have equally
many layers, as many as the rarest kind of layer has; states of linear layers are packed as many
per block as fit, and blocks get more positions until one does.
Tests: tests/unit/engine/test_kv_plan.py.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvmesh.core.types import DTYPE_BYTES, KvLayout
from kvmesh.engine.config import ModelConfig
from kvmesh.kv.groups import KvGroups, num_blocks_of

_STATE_VALUE_BYTES = 4


@dataclass(frozen=True, slots=True)
class KvPlace:
    """One layer's place.

    Attributes:
        group: token group; for a linear layer the block among those of a state.
        slot: place within a block of the group.
    """

    group: int
    slot: int


@dataclass(frozen=True, slots=True)
class KvPlan:
    """Groups of a model and the shape of their blocks.

    Attributes:
        places: per layer.
        block_layers: layers in a block of a token group.
        states_per_block: layers whose states one block holds.
        block_size: positions in a block of a token group.
    """

    groups: KvGroups
    places: tuple[KvPlace, ...]
    block_layers: int
    states_per_block: int
    block_size: int


def plan_kv(config: ModelConfig, dtype: str, block_size: int) -> KvPlan:
    """Assigns layers to groups.

    Args:
        dtype: of token groups; states are fp32.
        block_size: positions in a block at least; more where a block could not hold a state.
    """
    linear = [layer for layer in range(config.num_layers) if config.is_linear(layer)]
    kinds: dict[int, list[int]] = {}
    for layer in range(config.num_layers):
        if not config.is_linear(layer):
            kinds.setdefault(config.windows[layer], []).append(layer)
    assert kinds, "a model has a layer with attention"
    block_layers = min(len(layers) for layers in kinds.values())
    position_bytes = block_layers * config.kv_values * DTYPE_BYTES[dtype]
    state_bytes = config.state_values * _STATE_VALUE_BYTES
    if linear:
        fitting = num_blocks_of(state_bytes, position_bytes * block_size)
        block_size *= fitting
    places: dict[int, KvPlace] = {}
    windows: list[int] = []
    # Layers that keep everything first: the first group is the one that others are told about.
    for window in sorted(kinds):
        for index, layer in enumerate(kinds[window]):
            if index % block_layers == 0:
                windows.append(window)
            places[layer] = KvPlace(len(windows) - 1, index % block_layers)
    per_block = position_bytes * block_size // state_bytes if linear else 0
    for index, layer in enumerate(linear):
        places[layer] = KvPlace(index // per_block, index % per_block)
    return KvPlan(
        groups=KvGroups(tuple(windows), num_blocks_of(len(linear), per_block) if linear else 0),
        places=tuple(places[layer] for layer in range(config.num_layers)),
        block_layers=block_layers,
        states_per_block=per_block,
        block_size=block_size,
    )


def kv_layout(config: ModelConfig, plan: KvPlan, *, dtype: str, fingerprint: str) -> KvLayout:
    """The layout of a model's KV blocks; a latent counts as one head of half its size, twice."""
    latent = config.latent
    return KvLayout(
        model_fingerprint=fingerprint,
        dtype=dtype,
        block_size=plan.block_size,
        num_layers=plan.block_layers,
        num_kv_heads=config.num_kv_heads if latent is None else 1,
        head_dim=config.head_dim if latent is None else latent.width // 2,
    )
