"""A set of small integers that finds the nearest member below a number.

A tree of 64-bit words: a set bit of an upper level means that the word below it is not empty.
Tests: tests/unit/kv/test_bit_tree.py.
"""

from __future__ import annotations

_SHIFT, _MASK = 6, 63
_HEIGHT = 5
LIMIT = 1 << (_SHIFT * _HEIGHT)
"""Members are below this number."""


class BitTree:
    """Integers from 0 to `LIMIT`; each operation visits at most five words."""

    def __init__(self) -> None:
        self._levels: list[dict[int, int]] = [{} for _ in range(_HEIGHT)]

    def __contains__(self, item: int) -> bool:
        return bool(self._levels[0].get(item >> _SHIFT, 0) >> (item & _MASK) & 1)

    def add(self, item: int) -> None:
        """Adds a number; it may be a member already."""
        assert 0 <= item < LIMIT, f"{item} is out of range"
        for level in self._levels:
            index = item >> _SHIFT
            word = level.get(index, 0)
            level[index] = word | 1 << (item & _MASK)
            if word:
                return
            item = index

    def remove(self, item: int) -> None:
        """Removes a number; it must be a member."""
        for level in self._levels:
            word, bit = level.get(item >> _SHIFT, 0), 1 << (item & _MASK)
            assert word & bit, f"{item} is not in the set"
            if word != bit:
                level[item >> _SHIFT] = word ^ bit
                return
            del level[item >> _SHIFT]
            item >>= _SHIFT

    def at_or_before(self, item: int) -> int | None:
        """Returns the largest member that is not above `item`, or None."""
        for height, level in enumerate(self._levels):
            word = level.get(item >> _SHIFT, 0) & ((2 << (item & _MASK)) - 1)
            if word:
                item = (item & ~_MASK) + word.bit_length() - 1
                for below in reversed(self._levels[:height]):
                    item = (item << _SHIFT) + below[item].bit_length() - 1
                return item
            item = (item >> _SHIFT) - 1
            if item < 0:
                return None
        return None
