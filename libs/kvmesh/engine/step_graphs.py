"""Captures a static step as CUDA graphs, one per batch size, and replays them.

The largest batch is captured first, and all graphs share one memory pool, so a smaller graph reuses
the memory of a larger one. If time or memory runs out, every batch still has a graph that is large
enough.
Tests: tests/unit/engine/test_step_graphs.py, tests/gpu/test_graphs.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch

from kvmesh.core.clock import Clock
from kvmesh.telemetry.logs import event_logger

log = event_logger(__name__)
_WARM_UPS = 2


class Graph(Protocol):
    """A captured step."""

    def replay(self) -> None:
        """Launches the step again."""
        ...


class GraphDevice(Protocol):
    """A device that captures graphs: CUDA, or a test's replacement."""

    def capture(self, run: Callable[[], None]) -> Graph:
        """Runs `run` a few times to warm up, then captures it.

        Raises:
            RuntimeError: an operation cannot be captured, or memory ran out.
        """
        ...

    def free_bytes(self) -> int:
        """Returns the free device memory in bytes."""
        ...


class CudaGraphDevice:
    """Captures on a CUDA device, on a stream of its own."""

    def __init__(self, device: str) -> None:
        self._device = torch.device(device)
        self._pool = torch.cuda.graph_pool_handle()
        self._stream: torch.cuda.Stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]

    def capture(self, run: Callable[[], None]) -> Graph:
        """See `GraphDevice.capture`."""
        before = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(before)
        with torch.cuda.stream(self._stream):
            # Compiles kernels and lets libraries allocate workspaces, which a capture forbids.
            for _ in range(_WARM_UPS):
                run()
        torch.cuda.synchronize(self._device)
        graph = torch.cuda.CUDAGraph()
        # In a stream context of our own: torch's context stays on its stream if a capture fails.
        # Other threads may use the device meanwhile.
        with (
            torch.cuda.stream(before),
            torch.cuda.graph(
                graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"
            ),
        ):
            run()
        before.wait_stream(self._stream)
        return graph

    def free_bytes(self) -> int:
        """See `GraphDevice.free_bytes`."""
        return torch.cuda.mem_get_info(self._device)[0]


@dataclass(frozen=True, slots=True)
class CaptureBounds:
    """Limits beyond which only the largest graph is captured.

    Attributes:
        seconds: seconds since the first capture began.
        used_bytes: bytes of device memory.
    """

    seconds: float = 120.0
    used_bytes: int = 4 << 30


class StepGraphs:
    """The graphs of a step, by bucket.

    Attributes:
        buckets: buckets with a captured graph, ascending.
    """

    def __init__(self) -> None:
        self._graphs: dict[int, Graph] = {}
        self.buckets: tuple[int, ...] = ()

    def capture(
        self,
        compute: Callable[[int], None],
        buckets: Sequence[int],
        device: GraphDevice,
        clock: Clock,
        bounds: CaptureBounds,
    ) -> None:
        """Captures until done, a limit is reached or the device fails; logs the reason."""
        started, free = clock.now(), device.free_bytes()
        reason = ""
        for bucket in sorted(buckets, reverse=True):
            used = free - device.free_bytes()
            over = clock.now() - started > bounds.seconds or used > bounds.used_bytes
            # The largest is always tried, since it fits every batch.
            if over and self._graphs:
                reason = f"{clock.now() - started:.0f} s and {used >> 20} MiB are enough"
                break
            begun = clock.now()
            try:
                self._graphs[bucket] = device.capture(partial(compute, bucket))
            except RuntimeError as error:
                reason = f"{bucket} rows: {error}".splitlines()[0]
                break
            log.info("graph_captured", rows=bucket, seconds=round(clock.now() - begun, 2))
        self.buckets = tuple(sorted(self._graphs))
        say = log.warning if reason else log.info
        say(
            "graphs_ready",
            rows=list(self.buckets),
            seconds=round(clock.now() - started, 2),
            mib=(free - device.free_bytes()) >> 20,
            left_out=reason,
            plain="steps with prompts or scores of prompts, and larger batches",
        )

    def replay(self, bucket: int) -> None:
        """Launches a captured step."""
        self._graphs[bucket].replay()
