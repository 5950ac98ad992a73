"""A deterministic runner without torch, with the same limits, KV layout and contract.

The "KV" of a position is a 64-bit mix of its token and its position, written into the block like
real KV. The next token is a mix of the KV of all positions that a group sees, read back through its
block table, and of a recurrent state if the model has one. So a block that is lost, stale or
misplaced changes the tokens.
Tests: tests/contract/test_runner_contract.py.
"""

from __future__ import annotations

import hashlib
import math
import struct
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from kvmesh.core.errors import StructureError
from kvmesh.core.kv_groups import KvGroups
from kvmesh.core.types import KvLayout, TokenLogprobs
from kvmesh.engine.adapters import Adapter, check_rank
from kvmesh.engine.checkpoint import load_model_config
from kvmesh.engine.host_memory import HostMemory
from kvmesh.engine.mixing import split_mix
from kvmesh.engine.protocol import (
    EmbeddingSpec,
    ModelSpec,
    SampledToken,
    SequenceChunk,
    StateChunk,
    StepResult,
)
from kvmesh.engine.step_times import StepTimes
from kvmesh.kv.groups import num_blocks_of
from kvmesh.kv.stages import whole_stages

_WORD = 8
_PAIR_SHARE = 1e-4
_EMBEDDING_SIZE = 8


class FakePlaces:
    """Places for adapters, each of which changes the KV of its sequences by its id alone.

    Args:
        adapters: those that it begins with.
    """

    def __init__(self, num_places: int, max_rank: int, adapters: Sequence[Adapter] = ()) -> None:
        self._num_places = num_places
        self._max_rank = max_rank
        self._salts = {"": 0}
        for each in adapters:
            self.add(each)

    @property
    def num_places(self) -> int:
        """See `AdapterPlaces.num_places`."""
        return self._num_places

    def add(self, adapter: Adapter) -> None:
        """See `AdapterPlaces.add`."""
        assert len(self._salts) <= self._num_places, "a place is free"
        check_rank(adapter, self._max_rank)
        digest = hashlib.blake2b(adapter.id.encode(), digest_size=_WORD)
        self._salts[adapter.id] = int.from_bytes(digest.digest(), "little")

    def remove(self, adapter: str) -> None:
        """See `AdapterPlaces.remove`."""
        del self._salts[adapter]

    @property
    def ids(self) -> tuple[str, ...]:
        """Ids of the adapters in its places."""
        return tuple(filter(None, self._salts))

    def salt(self, adapter: str) -> int:
        """The change of an adapter's KV; 0 without one."""
        return self._salts[adapter]


@dataclass(frozen=True, slots=True)
class FakeDevice:
    """The device that the fake imitates.

    Attributes:
        step_s: constant seconds of every step.
        times: seconds by the content of a step, added to `step_s`; None for no addition.
        token_bytes: bytes of KV per position, a multiple of 8; only the first 8 matter.
        places: for adapters; None for an engine that has none.
    """

    step_s: float = 0.0
    times: StepTimes | None = None
    token_bytes: int = _WORD
    places: FakePlaces | None = None

    def __post_init__(self) -> None:
        assert self.token_bytes % _WORD == 0, f"{self.token_bytes} bytes are no whole words"


class FakeRunner:
    """Computes deterministic tokens.

    Args:
        device: durations of steps, and size of the KV.
        groups: KV groups.
    """

    def __init__(
        self,
        *,
        name: str = "fake",
        vocab_size: int = 1000,
        max_model_len: int = 8192,
        num_blocks: int = 512,
        block_size: int = 16,
        eos_token_ids: frozenset[int] = frozenset({0}),
        device: FakeDevice | None = None,
        groups: KvGroups | None = None,
    ) -> None:
        self._device = device or FakeDevice()
        self._places = places = self._device.places
        groups = groups or KvGroups()
        kind = "" if groups == KvGroups() else f"-{groups}"
        layout = KvLayout(
            model_fingerprint=f"fake-{vocab_size}-{block_size}{kind}",
            dtype="float32",
            block_size=block_size,
            num_layers=1,
            num_kv_heads=self._device.token_bytes // _WORD,
            head_dim=1,  # keys and values of one head and position: 8 bytes, one word
            engine="fake",
        )
        self._spec = ModelSpec(
            name,
            vocab_size,
            max_model_len,
            eos_token_ids,
            layout,
            groups,
            () if places is None else places.ids,
            group_stages=whole_stages(groups, layout.block_bytes),
            embedding=EmbeddingSpec(_EMBEDDING_SIZE, range(1, _EMBEDDING_SIZE)),
        )
        self._memory = HostMemory(num_blocks, layout.block_bytes)

    @classmethod
    def for_checkpoint(
        cls,
        folder: Path,
        *,
        name: str,
        num_blocks: int,
        block_size: int,
        device: FakeDevice | None = None,
    ) -> FakeRunner:
        """Returns a fake with the vocabulary of a checkpoint, which fits a real tokenizer.

        Raises:
            CheckpointError: config.json cannot be read, or its family is not supported.
        """
        config = load_model_config(folder)
        return cls(
            name=name,
            vocab_size=config.vocab_size,
            max_model_len=config.max_position_embeddings,
            num_blocks=num_blocks,
            block_size=block_size,
            eos_token_ids=frozenset(),
            device=device,
        )

    @property
    def spec(self) -> ModelSpec:
        """Facts about the imitated model."""
        return self._spec

    @property
    def kv(self) -> HostMemory:
        """The KV pool."""
        return self._memory

    @property
    def partial_attention(self) -> None:
        """None: the fake has no attention."""
        return

    @property
    def pair_share(self) -> float:
        """Its attention costs nothing, and yet the beginning of a prompt may come from another."""
        return _PAIR_SHARE

    @property
    def adapter_places(self) -> FakePlaces | None:
        """See `ModelRunner.adapter_places`."""
        return self._places

    def execute(self, chunks: Sequence[SequenceChunk]) -> StepResult:
        """Writes the KV of all chunks, then samples."""
        started = time.perf_counter()
        num_stages = len(self._spec.stages)
        upstream = chunks[0].upstream if chunks else None  # such a chunk is alone in its step
        came = True if upstream is None else upstream.gate.passes(num_stages)
        if came is None:
            return StepResult([None], unfinished={0: num_stages})
        if not came:
            return StepResult([None], lost=frozenset({0}))
        for chunk in chunks:
            salt = 0 if self._places is None else self._places.salt(chunk.adapter)
            for table in chunk.tables:
                for position in range(chunk.start, chunk.end):
                    self._write(table, chunk.token_ids[position], position, salt)
            if chunk.state is not None:
                self._carry_on(chunk, chunk.state)
        tokens = [self._sample(chunk) if chunk.sample else None for chunk in chunks]
        self._wait(chunks, started)
        for chunk in chunks:
            if chunk.on_layers is not None:
                chunk.on_layers(num_stages)
        scores = {index: _score(chunk) for index, chunk in enumerate(chunks) if chunk.num_scored}
        return StepResult(tokens, scores)

    def forget(self, sequence_ids: Sequence[int]) -> None:
        """Does nothing: all data of a sequence is in its blocks."""

    def close(self) -> None:
        """Closes the pool's descriptor."""
        self._memory.close()

    def _wait(self, chunks: Sequence[SequenceChunk], started: float) -> None:
        """Sleeps for the rest of the step's duration, which includes the fake's own work."""
        device = self._device
        length_s = device.step_s
        if device.times is not None:
            length_s += device.times.of((chunk.start, chunk.end) for chunk in chunks)
        if length_s:
            time.sleep(max(0.0, started + length_s - time.perf_counter()))

    def _write(self, table: Sequence[int], token_id: int, position: int, salt: int) -> None:
        size = self._spec.layout.block_size
        # The words of a block lie at its start; the other bytes only make it larger.
        place = table[position // size] * self._spec.layout.block_bytes + position % size * _WORD
        word = split_mix((token_id << 32 | position) ^ salt)
        struct.pack_into("<Q", self._memory.view, place, word)

    def _carry_on(self, chunk: SequenceChunk, state: StateChunk) -> None:
        """Mixes the chunk's tokens into the state, and writes the copies to save."""
        values = [self._read_word(block) for block in state.source] or [0] * len(state.live)
        saves = dict(state.saves)
        for position in range(chunk.start, chunk.end):
            token_id = chunk.token_ids[position]
            values = [split_mix(value ^ (token_id + part)) for part, value in enumerate(values)]
            self._write_words(saves.get(position + 1, ()), values)
        self._write_words(state.live, values)

    def _read_word(self, block: int) -> int:
        offset = block * self._spec.layout.block_bytes
        value: int = struct.unpack_from("<Q", self._memory.view, offset)[0]
        return value

    def _write_words(self, blocks: Sequence[int], values: Sequence[int]) -> None:
        for block, value in zip(blocks, values, strict=False):
            struct.pack_into("<Q", self._memory.view, block * self._spec.layout.block_bytes, value)

    def _sample(self, chunk: SequenceChunk) -> SampledToken:
        digest = hashlib.blake2b(digest_size=8)
        for window, table in zip(self._spec.groups.windows, chunk.tables, strict=True):
            first = max(0, chunk.end - window) if window else 0
            self._read_positions(digest, table, first, chunk.end)
        if chunk.state is not None:
            for block in chunk.state.live:
                digest.update(self._read_word(block).to_bytes(_WORD, "little"))
        value = int.from_bytes(digest.digest(), "little")
        if chunk.sampling.temperature > 0:
            value = split_mix(value ^ split_mix(chunk.sampling.seed ^ chunk.end))
        # Token 0 is the usual end of sequence and never drawn.
        token = 1 + value % (self._spec.vocab_size - 1)
        if chunk.constraint is not None:
            try:
                mask = chunk.constraint.allowed(chunk.token_ids[chunk.num_prompt_tokens :])
            except StructureError as error:
                return SampledToken(token, error=str(error))
            (ids,) = mask.nonzero()
            token = int(ids[value % len(ids)])
        embedding = _embedding(digest.digest(), chunk.embedding)
        count = chunk.sampling.num_logprobs
        if count < 0:
            return SampledToken(token, embedding=embedding)
        others = tuple(1 + (token + i) % (self._spec.vocab_size - 1) for i in range(count))
        top = (token, *others)[:count]
        scores = TokenLogprobs(-0.5, top, tuple(-0.5 - i for i in range(count)))
        return SampledToken(token, scores, embedding=embedding)

    def _read_positions(
        self, digest: hashlib.blake2b, table: Sequence[int], first: int, end: int
    ) -> None:
        size, block_bytes = self._spec.layout.block_size, self._spec.layout.block_bytes
        for index in range(first // size, num_blocks_of(end, size)):
            start = table[index] * block_bytes
            begin = max(0, first - index * size) * _WORD
            stop = min(size, end - index * size) * _WORD
            digest.update(self._memory.view[start + begin : start + stop])


def _embedding(content: bytes, wanted: int) -> bytes:
    """Returns a made-up vector of length 1 that differs by `content`; nothing if not wanted."""
    if wanted < 0:
        return b""
    values = [byte - 127.5 for byte in content[: wanted or _EMBEDDING_SIZE]]
    length = math.hypot(*values)
    return struct.pack(f"<{len(values)}f", *(value / length for value in values))


def _score(chunk: SequenceChunk) -> list[TokenLogprobs]:
    """Returns made-up log-probabilities that differ by prompt token and position."""
    entries: list[TokenLogprobs] = []
    for position in range(chunk.start + 1, chunk.start + 1 + chunk.num_scored):
        token_id = chunk.token_ids[position]
        top = (token_id,)[: chunk.sampling.num_prompt_logprobs]
        logprob = -token_id / 1024 - position / 4096
        entries.append(TokenLogprobs(logprob, top, (logprob,)[: len(top)], 1))
    return entries
