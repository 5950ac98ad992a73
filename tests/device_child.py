"""A process with a device pool that another one maps; says where it is and waits for its end.

Arguments: twin, or a CUDA device; number of blocks; seed of the content.
"""

from __future__ import annotations

import random
import sys

import torch

from kvmesh.engine.device_driver import CudaDriver
from kvmesh.engine.device_pool import DeviceKvPool
from kvmesh.transfer.ipc_channel import segment_of
from tests.device_twin import TwinPool
from tests.transfer_pair import BLOCK, LAYOUT


def main() -> None:
    """Prints the segment's address and metadata, then sleeps on stdin."""
    device, num_blocks, seed = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    content = random.Random(seed).randbytes(num_blocks * BLOCK)
    if device == "twin":
        pool: DeviceKvPool = TwinPool(LAYOUT, num_blocks, content)
    else:
        pool = DeviceKvPool(LAYOUT, num_blocks, CudaDriver(device))
        given = torch.frombuffer(bytearray(content), dtype=torch.uint8)
        pool.tensor.view(torch.uint8).view(-1).copy_(given)
        pool.computed()
    pool.settle()
    segment = segment_of(pool.share())
    sys.stdout.write(f"{segment.address} {segment.metadata.hex()}\n")
    sys.stdout.flush()
    sys.stdin.read()


if __name__ == "__main__":
    main()
