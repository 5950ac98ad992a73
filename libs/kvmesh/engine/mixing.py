"""SplitMix64 (Steele, Lea, Flood, OOPSLA 2014) without torch.

Tests: tests/unit/engine/test_noise.py.
"""

from __future__ import annotations

_MASK_64 = (1 << 64) - 1
_STEP = 0x9E3779B97F4A7C15


def mix_64(value: int) -> int:
    """Finalizer of SplitMix64: a bijection of 64-bit integers without visible pattern; keeps 0."""
    value &= _MASK_64
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK_64
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK_64
    return value ^ (value >> 31)


def split_mix(value: int) -> int:
    """Returns the output of SplitMix64 in the state `value`; unlike `mix_64` it does not keep 0."""
    return mix_64(value + _STEP)
