"""The groups of layers whose KV a model keeps apart; what they are is in `kv/groups.py`."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class KvGroups:
    """The groups of a model.

    Attributes:
        windows: per token group, number of latest positions that a query sees; 0 for all. Other
            processes are told the block hashes of the first group.
        state_blocks: number of blocks of one saved state; 0 without linear layers.
    """

    windows: tuple[int, ...] = (0,)
    state_blocks: int = 0

    @property
    def is_plain(self) -> bool:
        """Whether each block holds all layers, in their order."""
        return len(self.windows) == 1 and not self.state_blocks

    def __post_init__(self) -> None:
        assert self.windows, "a model has a token group"
        assert min(self.windows) >= 0
        assert self.state_blocks >= 0

    def handed_off(self, num_tokens: float, block_size: int) -> float:
        """Returns how many blocks of a prompt go to the decode worker: what its next query sees.

        Blocks count as whole ones only in states, so that the curve has no steps.
        """
        seen = [min(num_tokens, window) if window else num_tokens for window in self.windows]
        return sum(seen) / block_size + self.state_blocks


PLAIN = KvGroups()
"""Of a model whose layers all see every position."""
