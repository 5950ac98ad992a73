"""Checks of the draw kernel that the interpreter and the GPU share."""

from __future__ import annotations

import random
from collections.abc import Mapping

import torch
from torch import Tensor

from kvmesh.engine import noise
from kvmesh.kernels import draw


def run_kernel(logits: Tensor, keys: Mapping[int, int]) -> Tensor:
    rows = range(len(logits))
    halves = [[keys.get(row, 0) & 0xFFFFFFFF for row in rows]]
    halves += [[keys.get(row, 0) >> 32 for row in rows]]
    # The cast wraps: the same 32 bits with a sign.
    low, high = (torch.tensor(half).to(torch.int32).to(logits.device) for half in halves)
    is_random = torch.tensor([int(row in keys) for row in rows], dtype=torch.int32)
    return draw.draw(logits, low, high, is_random.to(logits.device))


def check_draw(rows: int, vocab_size: int, device: str) -> None:
    """Rows with noise and greedy ones, against the twin on the host."""
    numbers = random.Random(vocab_size)
    logits = torch.randn(rows, vocab_size, generator=torch.Generator().manual_seed(3)) * 2
    keys = {row: noise.stream_key(numbers.getrandbits(63), row) for row in range(rows) if row % 3}
    drawn = run_kernel(logits.to(device), keys)
    assert drawn.tolist() == noise.draw(logits.clone(), keys).tolist()
