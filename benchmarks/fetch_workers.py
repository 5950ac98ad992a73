"""Worker processes of benchmarks without a mesh, and a gateway's end of their Decode streams."""

from __future__ import annotations

import asyncio
import contextlib
import json
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType

from benchmarks.result import ROOT
from kvmesh.core.types import Endpoint, PrefixSource, SamplingParams, SequenceSpec, WorkerId
from kvmesh.kv.hashing import chain_hashes, join_hashes, root_hash
from kvmesh.rpc.channels import open_channel
from kvmesh.rpc.convert import sequence_spec_to_proto
from kvmesh.rpc.convert_route import prefix_source_to_proto
from kvmesh.rpc.stream import PeerStream
from kvmesh.v1 import decode_service_pb2 as pb
from kvmesh.v1.decode_service_pb2_grpc import DecodeServiceStub
from kvmesh.v1.prefill_service_pb2 import PrefillPrefetch, PrefillRequest, PrefillResponse
from kvmesh.v1.prefill_service_pb2_grpc import PrefillServiceStub

ANSWER_S = 120.0
"""For a first token, on a machine that does other things too."""

_ROOT = root_hash("benchmark")


@dataclass(frozen=True, slots=True)
class Address:
    """Where a worker process is, and which life of it."""

    worker_id: WorkerId
    incarnation: int
    control: Endpoint

    def source(self, num_blocks: int) -> PrefixSource:
        """As the holder of a prefix."""
        return PrefixSource(self.worker_id, self.incarnation, self.control, num_blocks)

    def part(self, num_blocks: int) -> PrefixSource:
        """As the worker that computes the beginning of a prompt."""
        return replace(self.source(num_blocks), computes=True)


@contextlib.contextmanager
def worker_process(
    name: str,
    model: Path,
    num_blocks: int,
    channels: str,
    dtype: str,
    more: Mapping[str, object] = MappingProxyType({}),
) -> Iterator[Address]:
    """A worker without a mesh; ends with the block.

    Args:
        more: flags; without others it has one engine thread.
    """
    flags = {
        "server.port": 0,
        "worker.id": name,
        "worker.scheduler-targets": "",
        "worker.kvmanager-target": "",
        "worker.channels": channels,
        "worker.lease-s": ANSWER_S,  # nobody renews
        "engine.model": model,
        "engine.num-blocks": num_blocks,
        "engine.dtype": dtype,
        **more,
    }
    command = [sys.executable, "-m", "services.prefill"]
    command += [f"--{flag}={value}" for flag, value in flags.items()]
    process = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    try:
        facts: dict[str, str] = {}
        while "address" not in facts:
            line = process.stderr.readline()
            assert line, f"{name} ended with {process.wait()}"
            event = json.loads(line) if line.startswith("{") else {}
            if event.get("event") == "worker_ready":
                facts["incarnation"] = event["incarnation"]
            if event.get("event") == "serving":
                facts["address"] = event["address"]
        host, _, port = facts["address"].rpartition(":")
        yield Address(WorkerId(name), int(facts["incarnation"]), Endpoint(host, int(port)))
    finally:
        process.terminate()
        process.communicate(timeout=30)


@dataclass(frozen=True, slots=True)
class FirstToken:
    """What a prompt came to.

    Attributes:
        request_id: by which the worker's spans name it.
    """

    request_id: str
    token_id: int
    milliseconds: float
    cached_tokens: int


class Asker:
    """Asks one worker for first tokens, one after the other.

    Args:
        events: from the worker.
    """

    def __init__(
        self,
        stream: PeerStream[pb.DecodeRequest, pb.DecodeResponse],
        events: asyncio.Queue[pb.DecodeEvent],
    ) -> None:
        self._stream = stream
        self._events = events
        self._num_asked = 0

    async def first_token(
        self, tokens: Sequence[int], source: PrefixSource | None = None
    ) -> FirstToken:
        """Milliseconds from the request to its first token; the request ends with it."""
        self._num_asked += 1
        sampling = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
        spec = SequenceSpec(tuple(tokens), len(tokens), sampling, _ROOT)
        name = f"r{self._num_asked}"
        reserve = pb.DecodeReserve(
            request_id=name,
            attempt=1,
            sequence=sequence_spec_to_proto(spec),
            start_within_ms=round(ANSWER_S * 1000),
            source=None if source is None else prefix_source_to_proto(source),
        )
        started = time.perf_counter()
        self._stream.send(pb.DecodeRequest(reserve=reserve))
        while True:
            event = await asyncio.wait_for(self._events.get(), ANSWER_S)
            if event.request_id != name:
                continue  # what became of an earlier one
            kind = event.prefill.WhichOneof("event")
            if kind == "first_token":
                first = event.prefill.first_token
                spent_ms = (time.perf_counter() - started) * 1e3
                cancel = pb.DecodeCancel(request_id=name, attempt=1)
                self._stream.send(pb.DecodeRequest(cancel=cancel))
                return FirstToken(name, first.token_id, spent_ms, first.cached_tokens)
            assert kind == "accepted", event


class Prefetcher:
    """Tells one worker of prompts that may be offered."""

    def __init__(self, stream: PeerStream[PrefillRequest, PrefillResponse]) -> None:
        self._stream = stream
        self._num_told = 0

    def prefetch(self, tokens: Sequence[int], num_blocks: int, block_size: int) -> None:
        """Names the first blocks of a prompt, as a gateway does when it is routed."""
        self._num_told += 1
        hashes = chain_hashes(_ROOT, tokens, block_size)[:num_blocks]
        told = PrefillPrefetch(request_id=f"p{self._num_told}", block_hashes=join_hashes(hashes))
        self._stream.send(PrefillRequest(prefetch=told))


@contextlib.asynccontextmanager
async def prefetching(worker: Address) -> AsyncIterator[Prefetcher]:
    """The other stream that a gateway has to a worker."""
    async with open_channel(str(worker.control)) as channel:
        stream: PeerStream[PrefillRequest, PrefillResponse] = PeerStream(
            worker.worker_id, PrefillServiceStub(channel).Prefill, lambda _: None
        )
        task = asyncio.create_task(stream.run())
        try:
            assert await stream.wait_connected(10), f"{worker.worker_id} does not answer"
            yield Prefetcher(stream)
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


@contextlib.asynccontextmanager
async def asking(worker: Address) -> AsyncIterator[Asker]:
    """A stream to a worker, as a gateway has."""
    async with open_channel(str(worker.control)) as channel:
        events: asyncio.Queue[pb.DecodeEvent] = asyncio.Queue()

        def take(message: pb.DecodeResponse) -> None:
            for event in message.events:
                events.put_nowait(event)

        stream: PeerStream[pb.DecodeRequest, pb.DecodeResponse] = PeerStream(
            worker.worker_id, DecodeServiceStub(channel).Decode, take
        )
        task = asyncio.create_task(stream.run())
        try:
            assert await stream.wait_connected(10), f"{worker.worker_id} does not answer"
            yield Asker(stream, events)
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
