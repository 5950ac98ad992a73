"""What a worker's engine is made with and computes, as its ranks tell each other. Torch-free.

Messages are JSON behind their length: they cross sockets between processes of one worker, and what
is read from there makes no objects by itself. Tests: tests/unit/engine/test_vllm_ranks.py.
"""

from __future__ import annotations

import json
import socket
import struct
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from kvmesh.engine.adapters import Adapter

_LENGTH = struct.Struct("<I")


@dataclass(frozen=True, slots=True)
class EngineRequest:
    """What a vLLM engine on a CPU is made with.

    Attributes:
        max_model_len: 0 for as many positions as the model was made for and blocks hold.
        num_blocks: those that are given away; one more is allocated.
        max_tokens, max_sequences: of one step.
        num_ranks: processes that share each layer, this one among them.
        spin: ranks wait for each other in shared memory, and keep their cores meanwhile; else in
            sockets.
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
    spin: bool = False


@dataclass(frozen=True, slots=True)
class NewSequence:
    """A sequence that vLLM has not seen, or not with these blocks.

    Attributes:
        name: used for no other.
        start: positions before it have KV in the blocks.
        adapter: its name; empty is none.
    """

    name: str
    token_ids: list[int]
    blocks: list[int]
    start: int
    adapter: str


@dataclass(frozen=True, slots=True)
class KnownSequence:
    """A sequence that goes on.

    Attributes:
        more_blocks: those after the ones that vLLM was told of.
        num_sampled: tokens that were chosen since it was new.
    """

    name: str
    more_blocks: list[int]
    start: int
    num_sampled: int


@dataclass(frozen=True, slots=True)
class VllmStep:
    """What one step computes.

    Attributes:
        finished: names that will not come again.
        num_tokens: positions to compute by name, of all in `new` and `known`.
    """

    new: list[NewSequence]
    known: list[KnownSequence]
    finished: set[str]
    num_tokens: dict[str, int]


@dataclass(frozen=True, slots=True)
class Place:
    """Which rank of an engine a process is.

    Attributes:
        rank: 0 leads.
        meeting: a path of the file that the ranks of this engine, and nobody else, find each other
            by. Where its name is the same for all, vLLM shares memory between them.
    """

    rank: int = 0
    meeting: str = ""


def request_message(request: EngineRequest, place: Place) -> dict[str, Any]:
    """How a rank is told what to load."""
    return {"request": asdict(request), **asdict(place)}


def read_request(message: Mapping[str, Any]) -> tuple[EngineRequest, Place]:
    """What `request_message` said."""
    fields = dict(message["request"])
    fields["folder"] = Path(fields["folder"])
    fields["adapters"] = tuple(
        Adapter(each["name"], Path(each["folder"]), each["rank"]) for each in fields["adapters"]
    )
    return EngineRequest(**fields), Place(message["rank"], message["meeting"])


def step_message(step: VllmStep) -> dict[str, Any]:
    """How a rank is told what to compute."""
    new = [(each.name, each.token_ids, each.blocks, each.start, each.adapter) for each in step.new]
    known = [(each.name, each.more_blocks, each.start, each.num_sampled) for each in step.known]
    return {
        "new": new,
        "known": known,
        "finished": list(step.finished),
        "num_tokens": step.num_tokens,
    }


def read_step(message: Mapping[str, Any]) -> VllmStep:
    """What `step_message` said."""
    return VllmStep(
        [NewSequence(*each) for each in message["new"]],
        [KnownSequence(*each) for each in message["known"]],
        set(message["finished"]),
        dict(message["num_tokens"]),
    )


def encoded(message: Mapping[str, Any]) -> bytes:
    """As `receive` takes it."""
    body = json.dumps(message, default=str, separators=(",", ":")).encode()
    return _LENGTH.pack(len(body)) + body


def receive(end: socket.socket) -> dict[str, Any]:
    """The next message.

    Raises:
        EOFError: the other end is closed.
    """
    (size,) = _LENGTH.unpack(_take(end, _LENGTH.size))
    message: dict[str, Any] = json.loads(_take(end, size))
    return message


def _take(end: socket.socket, size: int) -> bytes:
    taken = bytearray(size)
    view, got = memoryview(taken), 0
    while got < size:
        count = end.recv_into(view[got:])
        if not count:
            raise EOFError
        got += count
    return bytes(taken)
