"""A process with a device pool that another one maps; says where it is and waits for its end.

Arguments: twin, or a CUDA device; number of blocks; seed of the content.
"""

from __future__ import annotations

import random
import sys

from kvmesh.engine.device_driver import CudaDriver
from kvmesh.transfer.ipc_channel import segment_of
from tests.device_twin import FilledPool, TwinDriver
from tests.transfer_pair import BLOCK, LAYOUT


def main() -> None:
    """Prints the segment's address and metadata, then sleeps on stdin."""
    device, num_blocks, seed = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    content = random.Random(seed).randbytes(num_blocks * BLOCK)
    driver = TwinDriver() if device == "twin" else CudaDriver(device)
    pool = FilledPool(driver, LAYOUT, num_blocks, content)
    pool.settle(pool.moment())
    segment = segment_of(pool.share())
    sys.stdout.write(f"{segment.address} {segment.metadata.hex()}\n")
    sys.stdout.flush()
    sys.stdin.read()


if __name__ == "__main__":
    main()
