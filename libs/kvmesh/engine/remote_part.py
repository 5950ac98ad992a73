"""A rank's part of every block on another host: its bytes come and go over lines to that rank.

A copy is a request with the pieces' places in the part; their bytes follow, in the direction of the
copy, in batches as large as the rank's own staging memory.
Tests: tests/unit/engine/test_remote_part.py.
"""

from __future__ import annotations

import contextlib
import mmap
import socket
import struct
import threading
from collections.abc import Iterator, Sequence
from queue import SimpleQueue

import numpy as np
from torch import Tensor

from kvmesh.core.errors import LostError
from kvmesh.engine.device_driver import DeviceDriver
from kvmesh.engine.part_copies import PartCopies
from kvmesh.engine.vllm_messages import encoded, fill, receive
from kvmesh.telemetry.logs import event_logger
from kvmesh.transfer.device import Moment, Pieces

log = event_logger(__name__)

STAGING_BYTES = 8 << 20
"""A rank's staging memory for one line, unless a piece is larger."""

_REQUEST = struct.Struct("<BIQ")
_BATCH = struct.Struct("<BI")
_GATHER, _SCATTER = 0, 1
_DONE, _LOST = 0, 1
_MAX_PIECES = 1 << 20
_MAX_REASON_BYTES = 64 << 10


class RemotePart:
    """The part of a rank on another host, from its leader's side (`divided_pool.BlocksPart`)."""

    def __init__(self, lines: Sequence[socket.socket], runs: Sequence[tuple[int, int]]) -> None:
        """Takes lines to the rank.

        Args:
            runs: see `BlocksPart`.
        """
        self.runs = runs
        self._all = list(lines)
        self._free: SimpleQueue[socket.socket] = SimpleQueue()
        for line in lines:
            self._free.put(line)

    def copies(self, host: Tensor) -> RemoteCopies:
        """See `BlocksPart.copies`."""
        return RemoteCopies(self, host.numpy().data)

    def close(self) -> None:
        """See `BlocksPart.close`."""
        while self._all:
            self._all.pop().close()

    @contextlib.contextmanager
    def line(self) -> Iterator[socket.socket]:
        """Lends a line for one copy.

        Raises:
            LostError: the rank is gone, or its device failed.
        """
        line = self._free.get()
        try:
            yield line
        except (OSError, EOFError, ValueError, LostError) as error:
            line.close()  # bytes of the copy may be under way
            text = str(error) or "it is gone"
            raise LostError(f"a rank on another host: {text}") from error
        finally:
            self._free.put(line)  # also one that is closed, so that nobody waits for it


class RemoteCopies:
    """Copies between a part on another host and memory of this one (`divided_pool.Copies`)."""

    def __init__(self, part: RemotePart, host: memoryview) -> None:
        self._part = part
        self._host = host

    def gather(self, pieces: Pieces, at: int, stride: int, after: Moment) -> None:
        """See `Copies.gather`."""
        assert after is None, "the rank's steps are done when its leader's are"
        assert pieces.size <= stride, "pieces do not overlap"
        with self._part.line() as line:
            line.sendall(_request(_GATHER, pieces))
            done = 0
            while done < len(pieces.starts):
                count = _batch(line)
                if not 0 < count <= len(pieces.starts) - done:
                    raise ValueError(f"{count} pieces came, {len(pieces.starts) - done} were asked")
                for view in self._views(pieces.size, at + done * stride, stride, count):
                    fill(line, view)
                done += count

    def scatter(self, pieces: Pieces, at: int, stride: int, after: Moment) -> None:
        """See `Copies.scatter`."""
        assert after is None, "the rank's steps are done when its leader's are"
        with self._part.line() as line:
            line.sendall(_request(_SCATTER, pieces))
            for view in self._views(pieces.size, at, stride, len(pieces.starts)):
                line.sendall(view)
            _batch(line)

    def close(self) -> None:
        """See `Copies.close`; the lines belong to the part."""

    def _views(self, size: int, at: int, stride: int, count: int) -> Iterator[memoryview]:
        """The places of pieces in this host's memory, as few ranges as possible."""
        if stride == size:
            yield self._host[at : at + count * size]
            return
        for start in range(at, at + count * stride, stride):
            yield self._host[start : start + size]


class PartServer:
    """The rank's side: copies between its memory and the lines of its leader."""

    def __init__(
        self, driver: DeviceDriver, memory: Tensor, runs: Sequence[tuple[int, int]]
    ) -> None:
        """Serves no line yet.

        Args:
            memory: [bytes] uint8 on the device: the part of every block.
            runs: see `BlocksPart`.
        """
        self._driver = driver
        self._memory = memory
        self._piece_bytes = max(size for _, size in runs)

    def serve(self, line: socket.socket) -> None:
        """Answers a line in a thread of its own, until it ends.

        Raises:
            LostError: the device failed.
        """
        served = _ServedLine(line, self._driver, self._memory, self._piece_bytes)
        threading.Thread(target=served.run, name="rank-copies", daemon=True).start()


class _ServedLine:
    def __init__(
        self, line: socket.socket, driver: DeviceDriver, memory: Tensor, piece_bytes: int
    ) -> None:
        self._line = line
        self._driver = driver
        self._num_bytes = memory.nbytes
        self._staging = memoryview(mmap.mmap(-1, max(STAGING_BYTES, piece_bytes)))
        self._pinned = driver.pin(self._staging)
        self._copies = PartCopies(driver, memory, piece_bytes, self._pinned)

    def run(self) -> None:
        """Answers until the line ends."""
        try:
            while True:
                self._answer()
        except LostError as error:
            log.error("rank_copy_failed", reason=str(error))
            with contextlib.suppress(OSError):
                self._line.sendall(_BATCH.pack(_LOST, 0) + encoded({"reason": str(error)}))
        except (EOFError, OSError):
            pass  # the leader has ended
        except ValueError as error:
            log.error("rank_copy_refused", reason=str(error))
        finally:
            self._line.close()
            self._copies.close()
            self._driver.unpin(self._pinned)

    def _answer(self) -> None:
        kind, pieces = self._request()
        size, per_batch = pieces.size, self._staging.nbytes // pieces.size
        for first in range(0, len(pieces.starts), per_batch):
            batch = pieces.cut(first, per_batch)
            staged = self._staging[: batch.num_bytes]
            if kind == _GATHER:
                self._copies.gather(batch, 0, size, None)
                self._line.sendall(_BATCH.pack(_DONE, len(batch.starts)))
                self._line.sendall(staged)
            else:
                fill(self._line, staged)
                self._copies.scatter(batch, 0, size, None)
        if kind == _SCATTER:
            self._line.sendall(_BATCH.pack(_DONE, len(pieces.starts)))

    def _request(self) -> tuple[int, Pieces]:
        head = bytearray(_REQUEST.size)
        fill(self._line, memoryview(head))
        kind, count, size = _REQUEST.unpack(head)
        if kind not in (_GATHER, _SCATTER) or not 0 < count <= _MAX_PIECES:
            raise ValueError(f"not a copy: kind {kind} of {count} pieces")
        if not 0 < size <= self._staging.nbytes:
            raise ValueError(f"pieces of {size} bytes, and {self._staging.nbytes} can be staged")
        starts = np.empty(count, dtype=np.int64)
        fill(self._line, starts.data.cast("B"))
        if starts.min() < 0 or starts.max() > self._num_bytes - size:
            raise ValueError("pieces outside of the rank's memory")
        return kind, Pieces(starts, size)


def _request(kind: int, pieces: Pieces) -> bytes:
    starts = pieces.starts.astype("<i8", copy=False)
    return _REQUEST.pack(kind, len(starts), pieces.size) + starts.tobytes()


def _batch(line: socket.socket) -> int:
    """Waits for the next batch; returns its number of pieces.

    Raises:
        LostError: the rank's device failed.
    """
    head = bytearray(_BATCH.size)
    fill(line, memoryview(head))
    state, count = _BATCH.unpack(head)
    if state == _DONE:
        return int(count)
    raise LostError(str(receive(line, _MAX_REASON_BYTES).get("reason", "")))
