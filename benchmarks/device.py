"""What leaves a device pool, and what comes between two of them, against plain copies of the same
bytes. Needs a CUDA device. Writes bench/results/device.json and device.md.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch

from benchmarks.result import RESULTS, Row, Target, document, save, spread
from kvmesh.core.types import KvLayout
from kvmesh.engine.device_driver import CudaDriver, DeviceDriver
from kvmesh.engine.device_pool import DeviceKvPool
from kvmesh.transfer.device import Pieces, SharedMemory, pieces_of
from kvmesh.transfer.frames import SegmentOffer
from kvmesh.transfer.ipc_channel import ENGINE, memory_of, segment_of
from kvmesh.transfer.memory import create_shared

LAYOUT = KvLayout("bench", "bfloat16", 16, 32, 8, 128)
"""Of an 8B Llama: 2 MiB per block."""
_REPEATS = 7
_BLOCKS = (2, 32, 128)
_ORDERS = ("contiguous", "scattered")


def main() -> None:
    """Measures, or with --hold keeps a pool for another process."""
    options = _parse()
    if not torch.cuda.is_available():
        sys.exit("bench-device needs a CUDA device; `make test` checks the same code on a twin")
    if options.hold:
        hold(CudaDriver("cuda"))
        return
    rows = measure(CudaDriver("cuda"), LAYOUT, _BLOCKS, _REPEATS)
    rows += measure_peer(CudaDriver("cuda"), LAYOUT, _BLOCKS, _REPEATS)
    result = document(rows, targets(rows), 0, notes())
    result["machine"]["device"] = torch.cuda.get_device_name()
    save(result, options.save)
    sys.stdout.write(f"{options.save}\n")


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--hold", action="store_true", help="be the process whose pool is mapped")
    parser.add_argument("--save", type=Path, default=RESULTS / "device.json")
    return parser.parse_args()


def measure(
    driver: DeviceDriver, layout: KvLayout, blocks: tuple[int, ...], repeats: int
) -> list[Row]:
    """Staging both ways beside one plain copy between device and pinned memory."""
    block_bytes, most = layout.block_bytes, max(blocks)
    pool = DeviceKvPool(layout, 2 * most, driver)
    _, memory = create_shared("bench", most * block_bytes)
    staging = pool.staging(memoryview(memory))
    host = driver.pin(memoryview(create_shared("bench", most * block_bytes)[1]))
    device = driver.zeros(most * block_bytes)
    rows = []
    for count in blocks:
        size = count * block_bytes

        def out(size: int = size) -> None:
            driver.run(lambda: _copy(host[:size], device[:size]), driver.moment())

        def back(size: int = size) -> None:
            driver.run(lambda: _copy(device[:size], host[:size]), driver.moment())

        rows += [
            _row("plain copy out", "contiguous", size, out, repeats),
            _row("plain copy in", "contiguous", size, back, repeats),
        ]
        for order in _ORDERS:
            pieces = _pieces(order, count, block_bytes)

            def gather(pieces: Pieces = pieces) -> None:
                staging.gather(pieces, 0, pieces.size, pool.moment())

            def scatter(pieces: Pieces = pieces) -> None:
                staging.scatter(0, pieces, pool.moment())

            rows += [
                _row("gather to the host", order, size, gather, repeats),
                _row("scatter from the host", order, size, scatter, repeats),
            ]
    staging.close()
    driver.unpin(host)
    return rows


def measure_peer(
    driver: DeviceDriver, layout: KvLayout, blocks: tuple[int, ...], repeats: int
) -> list[Row]:
    """Blocks of another process's pool into this one's, beside a plain copy on the device."""
    most = 2 * max(blocks)
    pool = DeviceKvPool(layout, most, driver)
    here, there = (driver.zeros(max(blocks) * layout.block_bytes) for _ in range(2))
    rows = []
    with _holder() as memory:
        peer = pool.map_peer(memory)
        for count in blocks:
            size = count * layout.block_bytes

            def plain(size: int = size) -> None:
                driver.run(lambda: _copy(here[:size], there[:size]), driver.moment())

            rows.append(_row("plain copy on the device", "contiguous", size, plain, repeats))
            for order in _ORDERS:
                pieces = _pieces(order, count, layout.block_bytes)

                def copy(pieces: Pieces = pieces) -> None:
                    peer.copy(pieces, pieces, pool.moment())

                rows.append(_row("from a peer's pool", order, size, copy, repeats))
        peer.close()
    return rows


def hold(driver: DeviceDriver) -> None:
    """Says where a pool is, and keeps it until standard input ends."""
    pool = DeviceKvPool(LAYOUT, 2 * max(_BLOCKS), driver)
    pool.settle(pool.moment())
    segment = segment_of(pool.share())
    sys.stdout.write(f"{segment.address} {segment.metadata.hex()}\n")
    sys.stdout.flush()
    sys.stdin.read()


def targets(rows: list[Row]) -> list[Target]:
    """Shares of the plain copies at the largest size."""
    size = max(row["MiB"] for row in rows)

    def middle(row: Row) -> float:
        return float(row["GB/s"]["median"])

    def share(name: str, order: str, plain: str) -> Target:
        found = {(row["what"], row["blocks"]): row for row in rows if row["MiB"] == size}
        ours, floor = found.get((name, order)), found.get((plain, "contiguous"))
        value = None if ours is None or floor is None else middle(ours) / middle(floor)
        return Target(f"{name}, {order}, {size:g} MiB, of the {plain}", value, 0.9)

    return [
        share("gather to the host", "scattered", "plain copy out"),
        share("scatter from the host", "scattered", "plain copy in"),
        share("from a peer's pool", "scattered", "plain copy on the device"),
    ]


def notes() -> list[str]:
    """What the numbers are."""
    return [
        "GB/s of min / median / max; each call ends when the thread that waits is awake again",
        "plain copies are one call for all bytes in the same queue, with the same end",
        "on the device a byte is read and written once and counted once",
    ]


def _copy(target: torch.Tensor, source: torch.Tensor) -> None:
    target.copy_(source, non_blocking=True)


def _pieces(order: str, count: int, block_bytes: int) -> Pieces:
    """So many blocks of a pool of twice as many: in a row, or every other one out of order."""
    if order == "contiguous":
        return pieces_of([(0, count)], block_bytes, None)
    shuffled = np.random.default_rng(0).permutation(count)
    return pieces_of([(2 * int(block), 1) for block in shuffled], block_bytes, None)


def _row(what: str, blocks: str, size: int, work: Callable[[], None], repeats: int) -> Row:
    sys.stderr.write(f"\r{what}, {blocks}, {size >> 20} MiB\x1b[K")
    work()  # compiles
    rates = []
    for _ in range(repeats):
        begin = time.perf_counter()
        work()
        rates.append(size / (time.perf_counter() - begin) / 1e9)
    return {"what": what, "blocks": blocks, "MiB": size / (1 << 20), "GB/s": spread(rates, 6)}


@contextmanager
def _holder() -> Iterator[SharedMemory]:
    command = [sys.executable, "-m", "benchmarks.device", "--hold"]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as child:
        try:
            assert child.stdout is not None
            address, metadata = child.stdout.readline().split()
            segment = SegmentOffer(ENGINE, int(address), bytes.fromhex(metadata))
            yield memory_of(segment, 2 * max(_BLOCKS) * LAYOUT.block_bytes)
        finally:
            child.kill()


if __name__ == "__main__":
    main()
