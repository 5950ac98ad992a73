"""Messages between the ranks of one worker: how an engine is made, and what a step computes.

A message is its length and JSON, because the processes of a worker speak over sockets, and parsing
JSON cannot run code. Torch-free. Tests: tests/unit/engine/test_vllm_ranks.py.
"""

from __future__ import annotations

import json
import socket
import struct
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from kvmesh.engine.adapters import Adapter

_LENGTH = struct.Struct("<I")

MAX_MESSAGE_BYTES = 256 << 20
"""Longest message; the longest ones hold the tokens of new sequences."""

LEADER = "leader"
"""Stands for the leader's host in a place to meet at: each host may know it by another name."""


@dataclass(frozen=True, slots=True)
class EngineRequest:
    """Arguments of a vLLM engine.

    Attributes:
        max_model_len: longest sequence; 0: what the model supports and the blocks hold.
        num_blocks: blocks that sequences can use; one more is allocated.
        max_tokens, max_sequences: limits of one step.
        adapters: LoRA adapters that it begins with.
        max_adapters, max_adapter_rank: how many it holds at once and of which rank; at least what
            `adapters` need.
        num_ranks: number of processes, the leader included.
        num_stages: parts into which the layers are divided, one after the other; the ranks of a
            part share each of its layers by heads.
        spin: whether ranks wait for each other in shared memory, which keeps their cores busy;
            otherwise they wait on sockets.
        graphs: whether steps are compiled and replayed as CUDA graphs.
        device: number of the CUDA device of this host's first rank; those of its other ranks
            follow. None: ranks compute on CPUs.
        num_hosts: hosts that have as many ranks each, one after the other.
    """

    folder: Path
    dtype: str
    num_blocks: int
    block_size: int
    max_model_len: int
    max_tokens: int
    max_sequences: int
    adapters: tuple[Adapter, ...] = ()
    num_ranks: int = 1
    num_stages: int = 1
    spin: bool = False
    max_adapters: int = 0
    max_adapter_rank: int = 0
    graphs: bool = False
    device: int | None = None
    num_hosts: int = 1

    @property
    def host_ranks(self) -> int:
        """Ranks of each host."""
        return self.num_ranks // self.num_hosts

    @property
    def is_divided(self) -> bool:
        """Whether each rank keeps its part of the KV in memory of its own, not in one pool."""
        return self.device is not None or self.num_hosts > 1

    @property
    def tensor_parallel(self) -> int:
        """Ranks that share a layer."""
        return self.num_ranks // self.num_stages


@dataclass(frozen=True, slots=True)
class NewSequence:
    """A sequence that is new to vLLM, or that has other blocks now.

    Attributes:
        name: unique; never used again.
        blocks: block table of each group of layers, in vLLM's order.
        start: the blocks hold KV of all positions before this one.
        adapter: id of its LoRA adapter; empty: none.
    """

    name: str
    token_ids: list[int]
    blocks: list[list[int]]
    start: int
    adapter: str


@dataclass(frozen=True, slots=True)
class KnownSequence:
    """A sequence that vLLM knows.

    Attributes:
        more_blocks: blocks to append to its tables, by group; empty if no group has any.
        num_sampled: number of tokens sampled since it was new.
    """

    name: str
    more_blocks: list[list[int]]
    start: int
    num_sampled: int


@dataclass(frozen=True, slots=True)
class VllmStep:
    """The sequences and positions of one step.

    Attributes:
        finished: names of sequences that have ended.
        num_tokens: number of positions to compute, by name, for all in `new` and `known`.
        cleared: blocks to set to zeros before.
        copied: blocks to copy before, from and to.
        saved: the same afterwards.
    """

    new: list[NewSequence]
    known: list[KnownSequence]
    finished: set[str]
    num_tokens: dict[str, int] = field(default_factory=dict)
    cleared: list[int] = field(default_factory=list)
    copied: list[tuple[int, int]] = field(default_factory=list)
    saved: list[tuple[int, int]] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Place:
    """The rank of one process of an engine.

    Attributes:
        rank: number of the rank; 0 is the leader.
        meeting: URL through which the ranks of this engine rendezvous: of a file, or of a port of
            the host `LEADER`. If its last part is the same for all ranks, vLLM connects them by
            shared memory, otherwise by sockets.
        local: number of the rank on its host.
    """

    rank: int = 0
    meeting: str = ""
    local: int = 0

    def meets_at(self, leader: str) -> Place:
        """Returns the place of a rank that reaches the leader at a host name or address."""
        name = f"[{leader}]" if ":" in leader else leader
        return replace(self, meeting=self.meeting.replace(f"//{LEADER}:", f"//{name}:"))


@dataclass(frozen=True, slots=True)
class KeptPart:
    """Where a rank's device keeps its part of all blocks.

    Attributes:
        handle, offset, num_bytes: as in `transfer.device.SharedMemory`; an empty handle: the rank
            is on another host, and copies over `NUM_LINES` lines.
        runs: as in `divided_pool.BlocksPart`.
    """

    handle: bytes
    offset: int
    num_bytes: int
    runs: list[tuple[int, int]]


def request_message(request: EngineRequest, place: Place) -> dict[str, Any]:
    """The message that tells a rank what to load."""
    return {"request": asdict(request), **asdict(place)}


def read_request(message: Mapping[str, Any]) -> tuple[EngineRequest, Place]:
    """Reads a message of `request_message`."""
    fields = dict(message["request"])
    fields["folder"] = Path(fields["folder"])
    fields["adapters"] = tuple(_adapter(each) for each in fields["adapters"])
    return EngineRequest(**fields), Place(message["rank"], message["meeting"], message["local"])


def pool_message(num_bytes: int) -> dict[str, Any]:
    """The message that tells a rank to allocate its cache.

    Args:
        num_bytes: size of the pool on the host, whose memfd follows; 0: the rank has a device.
    """
    return {"pool_bytes": num_bytes}


def read_pool(message: Mapping[str, Any]) -> int:
    """Reads a message of `pool_message`."""
    return int(message["pool_bytes"])


def kept_message(kept: KeptPart) -> dict[str, Any]:
    """The message that tells the leader where a rank's device keeps KV."""
    return {**asdict(kept), "handle": kept.handle.hex()}


def read_kept(message: Mapping[str, Any]) -> KeptPart:
    """Reads a message of `kept_message`."""
    runs = [(int(offset), int(size)) for offset, size in message["runs"]]
    return KeptPart(bytes.fromhex(message["handle"]), message["offset"], message["num_bytes"], runs)


def adding_message(adapter: Adapter) -> dict[str, Any]:
    """The message that tells a rank to load an adapter."""
    return {"add_adapter": asdict(adapter)}


def removing_message(adapter: str) -> dict[str, Any]:
    """The message that tells a rank to remove an adapter, by its id."""
    return {"remove_adapter": adapter}


def read_change(message: Mapping[str, Any]) -> Adapter | str | None:
    """Reads a message about adapters: the one to add, or the id to remove; None for a step's."""
    if "add_adapter" in message:
        return _adapter(message["add_adapter"])
    removed: str | None = message.get("remove_adapter")
    return removed


def _adapter(fields: Mapping[str, Any]) -> Adapter:
    return Adapter(**{**fields, "folder": Path(fields["folder"])})


def step_message(step: VllmStep) -> dict[str, Any]:
    """The message that tells a rank what to compute."""
    new = [(each.name, each.token_ids, each.blocks, each.start, each.adapter) for each in step.new]
    known = [(each.name, each.more_blocks, each.start, each.num_sampled) for each in step.known]
    return {
        "new": new,
        "known": known,
        "finished": list(step.finished),
        "num_tokens": step.num_tokens,
        "cleared": step.cleared,
        "copied": step.copied,
        "saved": step.saved,
    }


def read_step(message: Mapping[str, Any]) -> VllmStep:
    """Reads a message of `step_message`."""
    return VllmStep(
        [NewSequence(*each) for each in message["new"]],
        [KnownSequence(*each) for each in message["known"]],
        set(message["finished"]),
        dict(message["num_tokens"]),
        list(message["cleared"]),
        [(source, target) for source, target in message["copied"]],
        [(source, target) for source, target in message["saved"]],
    )


def encoded(message: Mapping[str, Any]) -> bytes:
    """A message as bytes, for `receive`."""
    body = json.dumps(message, default=str, separators=(",", ":")).encode()
    return _LENGTH.pack(len(body)) + body


def receive(end: socket.socket, max_bytes: int = MAX_MESSAGE_BYTES) -> dict[str, Any]:
    """Waits for the next message.

    Raises:
        EOFError: the peer has closed the socket.
        ValueError: it is longer than `max_bytes`, or no JSON.
    """
    (size,) = _LENGTH.unpack(_take(end, _LENGTH.size))
    if size > max_bytes:
        raise ValueError(f"a message of {size} bytes is longer than {max_bytes}")
    message: dict[str, Any] = json.loads(_take(end, size))
    return message


def fill(end: socket.socket, memory: memoryview) -> None:
    """Waits for as many bytes as the memory has.

    Raises:
        EOFError: the peer has closed the socket.
    """
    got = 0
    while got < memory.nbytes:
        count = end.recv_into(memory[got:])
        if not count:
            raise EOFError
        got += count


def _take(end: socket.socket, size: int) -> bytes:
    taken = bytearray(size)
    fill(end, memoryview(taken))
    return bytes(taken)
