"""Encodes KV events for vLLM's subscribers: msgpack, with vLLM's names and order of fields.

There are two encodings: events as arrays with their name first, and, since vLLM 0.28, as maps with
their name under `type`. The batch around them is an array in both.
Tests: tests/integration/test_kv_events.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from kvmesh.core.types import BlockHash
from kvmesh.kv.events import AllCleared, BlocksRemoved, BlocksStored, KvEvent

_INT64_MASK = (1 << 64) - 1


@dataclass(frozen=True, slots=True)
class WireFormat:
    """Encoding of events.

    Attributes:
        block_size: tokens per block.
        as_map: events as maps instead of arrays.
        int_hashes: the last 64 bits of a hash as a number, which is vLLM's default; else all its
            bytes.
    """

    block_size: int
    as_map: bool = False
    int_hashes: bool = True

    def encode(self, events: Sequence[KvEvent], unix_s: float) -> bytes:
        """Encodes one batch."""
        batch = [unix_s, [self._event(event) for event in events]]
        return msgspec.msgpack.encode(batch)

    def name(self, block_hash: BlockHash) -> int | bytes:
        """A block's hash in the encoding."""
        if self.int_hashes:
            return int.from_bytes(block_hash, "big") & _INT64_MASK
        return bytes(block_hash)

    def _event(self, event: KvEvent) -> object:
        tag, fields = self._fields(event)
        return {"type": tag, **fields} if self.as_map else [tag, *fields.values()]

    def _fields(self, event: KvEvent) -> tuple[str, dict[str, object]]:
        """Name and fields of an event. In arrays, the fields' order is part of the protocol."""
        match event:
            case BlocksStored():
                return "BlockStored", {
                    "block_hashes": [self.name(each) for each in event.hashes],
                    "parent_block_hash": None if event.parent is None else self.name(event.parent),
                    "token_ids": list(event.token_ids),
                    "block_size": self.block_size,
                    "lora_id": None,
                    "medium": event.medium,
                    "lora_name": event.adapter or None,
                }
            case BlocksRemoved():
                return "BlockRemoved", {
                    "block_hashes": [self.name(each) for each in event.hashes],
                    "medium": event.medium,
                }
            case AllCleared():
                return "AllBlocksCleared", {}
