"""Workers of unequal numbers of ranks: equal tokens, equal bytes, for their blocks are equal."""

from __future__ import annotations

import random

import pytest

from kvmesh.core.types import SequenceSpec
from kvmesh.runtime.worker_config import EngineSection, WorkerSection
from tests.one_engine import tokens_of
from tests.ranked_engine import BLOCK_SIZE, VOCAB_SIZE, Memory, RankedRunner
from tests.worker_driver import Key, driving, make_spec, running_worker, until_idle

NUM_BLOCKS = 200
NEW_TOKENS = 8
Ranks = tuple[int, int, Memory]
"""Ranks that share each layer, stages, and where they keep their KV."""
ONE: Ranks = (1, 1, "shared")
TWO: Ranks = (2, 1, "shared")
FOUR: Ranks = (4, 1, "shared")
STAGES: Ranks = (1, 2, "shared")
BOTH: Ranks = (2, 2, "shared")
TWO_DEVICES: Ranks = (2, 1, "devices")
FOUR_DEVICES: Ranks = (4, 1, "devices")
DEVICE_STAGES: Ranks = (1, 2, "devices")
BOTH_ON_DEVICES: Ranks = (2, 2, "devices")
TWO_HOSTS: Ranks = (2, 1, "hosts")
FOUR_HOSTS: Ranks = (2, 2, "hosts")
_DRAW = random.Random(3)
PROMPTS = [
    [_DRAW.randrange(1, VOCAB_SIZE) for _ in range(length)]
    for length in (1, BLOCK_SIZE, BLOCK_SIZE + 1, 100, 300)
]


def alone(ranks: Ranks, spec: SequenceSpec) -> tuple[list[int], bytes]:
    """Returns what one engine generates, and its whole pool afterwards."""
    runner = made(NUM_BLOCKS, ranks)
    found = tokens_of(runner, spec), bytes(runner.kv.read_view(0, NUM_BLOCKS))
    runner.close()
    return found


def made(num_blocks: int, ranks: Ranks) -> RankedRunner:
    """An engine of these ranks."""
    tensor_parallel, stages, memory = ranks
    return RankedRunner(num_blocks, tensor_parallel, stages, memory=memory)


@pytest.mark.parametrize(
    "ranks",
    [
        TWO,
        FOUR,
        STAGES,
        BOTH,
        TWO_DEVICES,
        FOUR_DEVICES,
        DEVICE_STAGES,
        BOTH_ON_DEVICES,
        TWO_HOSTS,
        FOUR_HOSTS,
    ],
)
def test_blocks_are_the_same_for_any_number_of_ranks(ranks: Ranks) -> None:
    spec = make_spec(PROMPTS[-1], max_tokens=NEW_TOKENS)
    assert alone(ranks, spec) == alone(ONE, spec)


@pytest.mark.parametrize(
    ("sender", "receiver"),
    [
        (ONE, TWO),
        (TWO, ONE),
        (TWO, TWO),
        (ONE, FOUR),
        (FOUR, TWO),
        (BOTH, ONE),
        (STAGES, TWO),
        (TWO_DEVICES, TWO_DEVICES),
        (ONE, FOUR_DEVICES),
        (FOUR_DEVICES, TWO),
        (BOTH_ON_DEVICES, DEVICE_STAGES),
        (TWO_HOSTS, ONE),
        (TWO_DEVICES, FOUR_HOSTS),
    ],
)
@pytest.mark.parametrize(("channels", "mode"), [("local", "whole"), ("tcp", "chunked")])
async def test_tokens_and_bytes_of_a_handoff_are_those_of_one_rank(
    sender: Ranks, receiver: Ranks, channels: str, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    of_one = await handed_over(ONE, ONE, channels, mode, monkeypatch)
    assert await handed_over(sender, receiver, channels, mode, monkeypatch) == of_one
    for prompt, (tokens, num_bytes) in zip(PROMPTS, of_one, strict=True):
        assert tokens == alone(ONE, make_spec(prompt, max_tokens=NEW_TOKENS))[0]
        num_blocks = -(-len(prompt) // BLOCK_SIZE)
        assert num_bytes == num_blocks * RankedRunner(1).spec.layout.block_bytes


async def handed_over(
    sender: Ranks, receiver: Ranks, channels: str, mode: str, monkeypatch: pytest.MonkeyPatch
) -> list[tuple[list[int], int]]:
    """Tokens and bytes moved, by prompt."""
    ranks = iter((sender, receiver))
    monkeypatch.setattr(
        "kvmesh.runtime.worker_building.load_runner",
        lambda config, *_: made(config.num_blocks, next(ranks)),
    )
    engine = EngineSection(kind="fake", num_blocks=NUM_BLOCKS, max_batch_tokens=64)
    giver = WorkerSection(id="p", role="prefill", channels=channels, transfer_mode=mode)
    taker = WorkerSection(id="d", role="decode", channels=channels)
    async with (
        running_worker(giver, engine) as prefill,
        running_worker(taker, engine) as decode,
        driving(prefill, decode) as driver,
    ):
        found = []
        for number, prompt in enumerate(PROMPTS):
            key, spec = Key(str(number)), make_spec(prompt, max_tokens=NEW_TOKENS)
            tokens = await driver.generate(prefill, decode, key, spec)
            found.append((tokens, driver.handed_bytes[key]))
        await until_idle(prefill, decode)
    return found
