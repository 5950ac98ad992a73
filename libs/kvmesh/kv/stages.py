"""In which order a model fills its blocks, so that some of their bytes can leave early. Pure.

A stage is one layer that keeps something: keys and values in blocks of a token group, or its part
of the state. Stages follow one another as the model computes them, and together they are all bytes
of all blocks. Tests: tests/unit/kv/test_stages.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvmesh.kv.groups import KvGroups


@dataclass(frozen=True, slots=True)
class Stage:
    """`size` bytes from `offset` on of each block of one kind.

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
    """The kind of one block of a state; token groups are their own."""
    return -1 - part


def plain_stages(num_layers: int, block_bytes: int) -> Stages:
    """Of a model whose blocks hold all layers in their order."""
    size = block_bytes // num_layers
    return tuple(Stage(0, layer * size, size) for layer in range(num_layers))


def whole_stages(groups: KvGroups, block_bytes: int) -> Stages:
    """Of an engine that fills its blocks at once."""
    kinds = [*range(len(groups.windows)), *map(state_kind, range(groups.state_blocks))]
    return tuple(Stage(kind, 0, block_bytes) for kind in kinds)


def tiled(begins: Sequence[tuple[int, int]], block_bytes: int) -> Stages:
    """Stages from the kind and the offset of each layer, in the order in which they are computed.

    What no layer fills belongs to the one before it, so that stages are whole blocks together.

    Args:
        begins: of each kind the first offset is 0, and offsets rise.
    """
    stages: list[Stage] = []
    for index, (kind, offset) in enumerate(begins):
        later = (begin for other, begin in begins[index + 1 :] if other == kind)
        end = next(later, block_bytes)
        assert end > offset, "the layers of a block are computed in their order"
        stages.append(Stage(kind, offset, end - offset))
    return tuple(stages)


def joined(stages: Sequence[Stage]) -> list[Stage]:
    """As few as there are kinds where stages of a kind follow one another in its blocks."""
    found: dict[int, Stage] = {}
    for stage in stages:
        before = found.get(stage.kind)
        size = stage.size if before is None else before.size + stage.size
        found[stage.kind] = Stage(
            stage.kind, stage.offset if before is None else before.offset, size
        )
    return list(found.values())
