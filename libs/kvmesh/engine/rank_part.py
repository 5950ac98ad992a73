"""A rank's part of the KV blocks of a worker, in a pool of all ranks or alone. Torch-free.

Tests: tests/integration/test_unequal_ranks.py, tests/vllm/test_ranks.py.
"""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class RankPart:
    """A rank's part of each block, whose order is BHLNC: heads, layers, positions, content.

    So a block has the same bytes for any number of ranks, and a head is one range of them. All
    numbers below are in values of the KV's dtype.

    Attributes:
        rank: of all stages' ranks; those of a stage follow each other.
        tensor_parallel: ranks that share a layer.
        heads: KV heads of this rank.
        first_layer: the first of this rank's layers.
        layers: this rank's layers.
        num_layers: layers of all stages.
        positions: of a block.
        content: values per head and position, of key and value together.
    """

    rank: int
    tensor_parallel: int
    heads: int
    first_layer: int
    layers: int
    num_layers: int
    positions: int
    content: int

    @property
    def alone(self) -> RankPart:
        """This part in memory that has no other: blocks of its heads and layers."""
        return replace(self, rank=0, tensor_parallel=1, first_layer=0, num_layers=self.layers)

    @property
    def head_values(self) -> int:
        """Values of one head in a block, over all layers."""
        return self.num_layers * self.positions * self.content

    @property
    def block_values(self) -> int:
        """Values of a block, of all ranks."""
        return self.tensor_parallel * self.heads * self.head_values

    @property
    def strides(self) -> tuple[int, int, int, int]:
        """Of a layer's cache, whose axes are blocks, heads, positions and content."""
        return (self.block_values, self.head_values, self.content, 1)

    def start(self, layer: int) -> int:
        """Where the cache of a layer starts in the pool.

        Args:
            layer: counted from this rank's first one.
        """
        first_head = self.rank % self.tensor_parallel * self.heads
        before = (self.first_layer + layer) * self.positions * self.content
        return first_head * self.head_values + before

    def runs(self, value_bytes: int) -> list[tuple[int, int]]:
        """Offset in a block and number of bytes of each range of this part, in bytes.

        Args:
            value_bytes: bytes of a value.
        """
        size = self.layers * self.positions * self.content * value_bytes
        if self.layers == self.num_layers:
            return [(self.start(0) * value_bytes, self.heads * size)]
        first = self.start(0) * value_bytes
        return [(first + head * self.head_values * value_bytes, size) for head in range(self.heads)]
