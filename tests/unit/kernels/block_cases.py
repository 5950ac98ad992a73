"""Cases of block copies for every place they run at: host, interpreter, device."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from kvmesh.kernels.block_ops import copy_one_by_one

Copy = Callable[[Tensor, Tensor, Tensor, int], None]
Check = Callable[[Copy, int, int, int, str], None]

# (bytes of a block, first byte and size of its part): whole blocks, aligned parts, odd ones.
PARTS = [(4096, 0, 4096), (4096, 1024, 2048), (20_480, 0, 20_480), (96, 16, 48), (70, 3, 33)]
BLOCKS = [7, 0, 3, 4, 5, 8]
NUM_BLOCKS = 9


def _pool(block_bytes: int, device: str) -> Tensor:
    numbers = torch.randint(0, 256, (NUM_BLOCKS * block_bytes,), dtype=torch.uint8)
    return numbers.to(device)


def check_gather(copy: Copy, block_bytes: int, begin: int, size: int, device: str) -> None:
    """Parts of blocks, in order, into one buffer; what is around them stays."""
    pool = _pool(block_bytes, device)
    buffer = torch.full((len(BLOCKS) * size + 64,), 0xEE, dtype=torch.uint8, device=device)
    places = [(index * size, block * block_bytes + begin) for index, block in enumerate(BLOCKS)]

    copy(buffer, pool, torch.tensor(places), size)

    wanted = pool.view(NUM_BLOCKS, block_bytes)[BLOCKS, begin : begin + size].flatten()
    assert torch.equal(buffer[:-64], wanted)
    assert buffer[-64:].eq(0xEE).all()


def check_scatter(copy: Copy, block_bytes: int, begin: int, size: int, device: str) -> None:
    """One buffer into parts of blocks; all other bytes of the pool stay."""
    pool = _pool(block_bytes, device)
    buffer = torch.randint(0, 256, (len(BLOCKS) * size,), dtype=torch.uint8).to(device)
    places = [(block * block_bytes + begin, index * size) for index, block in enumerate(BLOCKS)]
    wanted = pool.clone()
    wanted.view(NUM_BLOCKS, block_bytes)[BLOCKS, begin : begin + size] = buffer.view(-1, size)

    copy(pool, buffer, torch.tensor(places), size)

    assert torch.equal(pool, wanted)


def check_between_pools(copy: Copy, block_bytes: int, begin: int, size: int, device: str) -> None:
    """Blocks of one pool into others of another, as the twin does it."""
    source, target = _pool(block_bytes, device), _pool(block_bytes, device)
    there = BLOCKS[::-1]
    places = torch.tensor(
        [
            (to * block_bytes + begin, from_ * block_bytes + begin)
            for to, from_ in zip(there, BLOCKS, strict=True)
        ]
    )
    wanted = target.clone()
    copy_one_by_one(wanted, source, places, size)

    copy(target, source, places, size)

    assert torch.equal(target, wanted)


CHECKS: list[Check] = [check_gather, check_scatter, check_between_pools]
