"""KV events: a worker's read by vLLM's decoder, and vLLM's own read by ours."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest

from kvmesh.cli.probes import free_ports
from kvmesh.core.types import SamplingParams, SequenceSpec
from kvmesh.engine.core import EngineCore
from kvmesh.engine.sequence import Sequence as Line
from kvmesh.kv.hashing import root_hash
from kvmesh.policy.batching import BatchLimits
from kvmesh.runtime.kv_event_reader import HeldBlocks, KvEventReader, ReadBatch, Stored
from kvmesh.runtime.kv_event_wire import WireFormat
from kvmesh.runtime.kv_events import log_of_pool
from tests.mesh_processes import MODEL_FOLDER
from tests.vllm.oracle import VllmAlone, some_prompts
from tests.vllm_engine import BLOCK_SIZE, load_vllm
from tests.waiting import until

COUNT = 40
"""Tokens generated: some of them fill blocks."""
PROMPTS = [prompt for prompt in some_prompts(8, 300, seed=14) if len(prompt) > BLOCK_SIZE]
Blocks = dict[tuple[int, ...], tuple[int, str | None]]
"""By all tokens up to the end of a block: its size and its adapter."""


def told_by(events: Sequence[Any]) -> Blocks:
    """Returns the facts that an indexer reads from events, without the hashes themselves."""
    before: dict[Any, tuple[int, ...]] = {None: ()}
    found: Blocks = {}
    for event in events:
        if type(event).__name__ != "BlockStored":
            continue
        tokens = before[event.parent_block_hash]
        for number, name in enumerate(event.block_hashes):
            start = number * event.block_size
            tokens += tuple(event.token_ids[start : start + event.block_size])
            before[name] = tokens
            found[tokens] = (event.block_size, event.lora_name)
    return found


@pytest.fixture(scope="module")
def told_by_vllm() -> Blocks:
    """The events of `vllm.LLM`."""
    from vllm.config.kv_events import KVEventsConfig

    config = KVEventsConfig(enable_kv_cache_events=True, publisher="null")
    alone = VllmAlone(MODEL_FOLDER, "float32", kv_events_config=config)
    batches: list[Any] = []
    alone.publish_kv_events(batches.append)
    alone.greedy(PROMPTS, COUNT)
    return told_by([event for batch in batches for event in batch.events])


def told_by_worker(wire: WireFormat) -> tuple[Blocks, list[Any]]:
    """The events of our scheduler over vLLM, and all of them as vLLM's decoder reads them."""
    from vllm.distributed.kv_events import KVEventBatch

    runner = load_vllm(MODEL_FOLDER, num_blocks=400, dtype="float32")
    core = EngineCore(runner.spec, 400, BatchLimits(), growth_tokens=0)
    log = log_of_pool(core.pool, "CPU")

    def sealed(line: Line, first: int) -> None:
        log.stored(line.chain.hashes[: line.kv.num_sealed], line.tokens, first)

    core.on_sealed = sealed
    sampling = SamplingParams(temperature=0.0, max_tokens=COUNT, ignore_eos=True)
    for prompt in PROMPTS:
        line = core.admit_decode(SequenceSpec(tuple(prompt), len(prompt), sampling, root_hash("")))
        assert isinstance(line, Line), line
        core.run(line)
    while core.has_work:
        chunks = core.plan_step()
        runner.forget(core.take_gone())
        core.finish_step(chunks, runner.execute(chunks))
    runner.close()
    message = wire.encode(log.take(), 1.5)
    batch: Any = msgspec.msgpack.Decoder(KVEventBatch).decode(message)
    assert batch.ts == 1.5
    return told_by(batch.events), batch.events


@pytest.mark.parametrize("int_hashes", [True, False], ids=["numbers", "bytes"])
def test_an_indexer_for_vllm_learns_the_same_from_a_worker(
    told_by_vllm: Blocks, int_hashes: bool
) -> None:
    found, events = told_by_worker(WireFormat(BLOCK_SIZE, as_map=True, int_hashes=int_hashes))
    assert type(events[0]).__name__ == "AllBlocksCleared"
    assert found == told_by_vllm
    assert max(map(len, found)) > max(map(len, PROMPTS)), "also blocks of generated tokens"


async def test_a_vllm_that_publishes_is_followed(told_by_vllm: Blocks) -> None:
    """vLLM's own publisher, live and what it published before."""
    from vllm.config.kv_events import KVEventsConfig

    endpoint, replay = (f"tcp://127.0.0.1:{port}" for port in free_ports("127.0.0.1", 2))
    config = KVEventsConfig(
        enable_kv_cache_events=True,
        publisher="zmq",
        endpoint=endpoint.replace("127.0.0.1", "*"),
        replay_endpoint=replay,
    )
    alone = VllmAlone(MODEL_FOLDER, "float32", kv_events_config=config)
    half = len(PROMPTS) // 2
    await asyncio.to_thread(alone.greedy, PROMPTS[:half], COUNT)
    reader, held = KvEventReader(endpoint, replay), HeldBlocks()
    read: list[ReadBatch] = []

    async def follow() -> None:
        async for batch in reader.batches():
            held.apply(batch)
            read.append(batch)

    following = asyncio.create_task(follow())
    await until(lambda: read, "what was published before")
    await asyncio.to_thread(alone.greedy, PROMPTS[half:], COUNT)
    await until(lambda: held.num_stored == len(told_by_vllm), "what is published now")
    following.cancel()
    reader.close()
    assert (held.num_missed, held.num_unknown, held.num_removed) == (0, 0, 0)
    assert held.media == {"GPU": len(told_by_vllm)}, "as vLLM names its cache, also on a CPU"
    assert told_of(read) == told_by_vllm


def told_of(batches: Sequence[ReadBatch]) -> Blocks:
    """As `told_by`, of what was read."""
    before: dict[Any, tuple[int, ...]] = {None: ()}
    found: Blocks = {}
    for event in (event for batch in batches for event in batch.events):
        assert isinstance(event, Stored)
        tokens = before[event.parent]
        for number, name in enumerate(event.names):
            start = number * event.block_size
            tokens += event.token_ids[start : start + event.block_size]
            before[name] = tokens
            found[tokens] = (event.block_size, event.adapter or None)
    return found
