"""The order in which a model fills its blocks, so that finished bytes can be sent early. Pure.

A stage is what one layer keeps: keys and values in the blocks of a token group, or a part of the
state. Stages are in the order in which the model computes them and together cover all bytes of all
blocks. Tests: tests/unit/kv/test_stages.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvmesh.core.kv_groups import KvGroups


@dataclass(frozen=True, slots=True)
class Stage:
    """A range of bytes, `size` from `offset`, in each block of one kind.

    Attributes:
        kind: see `ArrivingBlock`.
    """

    kind: int
    offset: int
    size: int

    @property
    def end(self) -> int:
        """One past the last byte."""
        return self.offset + self.size


Stages = tuple[Stage, ...]


def state_kind(part: int) -> int:
    """Returns the kind of a block of a state. A token group's kind is its index."""
    return -1 - part


def plain_stages(num_layers: int, block_bytes: int) -> Stages:
    """Returns the stages of a model whose blocks hold all layers in order."""
    size = block_bytes // num_layers
    return tuple(Stage(0, layer * size, size) for layer in range(num_layers))


def whole_stages(groups: KvGroups, block_bytes: int) -> Stages:
    """Returns the stages of an engine that fills each block in one go."""
    kinds = [*range(len(groups.windows)), *map(state_kind, range(groups.state_blocks))]
    return tuple(Stage(kind, 0, block_bytes) for kind in kinds)


def tiled(begins: Sequence[tuple[int, int]], block_bytes: int) -> Stages:
    """Returns the stages of layers in the order in which they are computed.

    Bytes that no layer fills belong to the layer before them, so that stages cover whole blocks.

    Args:
        begins: kind and offset of each layer; offsets of a kind begin at 0 and rise.
    """
    stages: list[Stage] = []
    for index, (kind, offset) in enumerate(begins):
        later = (begin for other, begin in begins[index + 1 :] if other == kind)
        end = next(later, block_bytes)
        assert end > offset, "the layers of a block are computed in their order"
        stages.append(Stage(kind, offset, end - offset))
    return tuple(stages)


def joined(stages: Sequence[Stage]) -> list[Stage]:
    """Joins adjacent stages of the same kind; returns one stage per kind."""
    found: dict[int, Stage] = {}
    for stage in stages:
        before = found.get(stage.kind)
        size = stage.size if before is None else before.size + stage.size
        found[stage.kind] = Stage(
            stage.kind, stage.offset if before is None else before.offset, size
        )
    return list(found.values())
