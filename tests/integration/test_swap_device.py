"""Preempted sequences of a device give the same tokens, seeded ones too: their KV leaves and comes
back, nothing is computed again, no place is kept; or it is computed again. The device is a twin."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from kvmesh.core.clock import SystemClock
from kvmesh.core.kv_groups import KvGroups
from kvmesh.core.types import KvLayout, SamplingParams, SequenceSpec
from kvmesh.engine.core import EngineCore
from kvmesh.engine.host_arena import HostArena
from kvmesh.engine.runner import TorchRunner
from kvmesh.engine.sequence import Sequence
from kvmesh.engine.swap_space import SwapSpace
from kvmesh.kv.groups import blocks_at_most
from kvmesh.kv.hashing import root_hash
from kvmesh.policy.batching import BatchLimits
from kvmesh.policy.prompt_time import PromptTime
from tests.device_twin import TwinPool
from tests.integration.families import BLOCK_SIZE, Checkpoint
from tests.late_copier import LateCopier

CHUNK = 40
NEW_TOKENS = 24
ROOMY = 600
SAMPLING = (
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=0.8, seed=5, top_k=40, top_p=0.95),
    SamplingParams(temperature=1.3, seed=6, min_p=0.02, repetition_penalty=1.2),
)
KINDS = {
    "qwen3-untied": KvGroups(),
    "gemma3": KvGroups((0, 40, 40)),
    "deepseek-v3": KvGroups(),
    "qwen3-next": KvGroups((0,), state_blocks=2),
}


class DeviceWorker:
    """A runner over a pool of the twin, and the bookkeeping of its blocks."""

    def __init__(self, checkpoint: Checkpoint, num_blocks: int, *, swaps: bool) -> None:
        self.runner = TorchRunner.load(
            checkpoint.folder, served_name="tiny", num_blocks=num_blocks, block_size=BLOCK_SIZE
        )
        self.runner.use_static_steps(4)
        pool = self.runner.kv
        assert isinstance(pool, TwinPool)
        self.pool = pool
        block_bytes = self.runner.spec.layout.block_bytes
        # Three blocks at once: what leaves or comes back takes several copies.
        self.arena = HostArena(pool, block_bytes, num_blocks, copy_bytes=3 * block_bytes)
        self.copier = LateCopier()
        self.swap = SwapSpace(self.arena, PromptTime(CHUNK), SystemClock(), self.copier)
        self.core = EngineCore(
            self.runner.spec,
            num_blocks,
            BatchLimits(max_tokens=CHUNK),
            growth_tokens=0,
            state_interval_tokens=96,
            swap=self.swap if swaps else None,
        )

    def admit(self, tokens: list[int], sampling: SamplingParams) -> Sequence:
        params = replace(sampling, max_tokens=NEW_TOKENS)
        spec = SequenceSpec(tuple(tokens), len(tokens), params, root_hash("test"))
        sequence = self.core.admit_decode(spec)
        assert isinstance(sequence, Sequence), sequence
        return sequence

    def finish(self, sequences: list[Sequence]) -> list[list[int]]:
        """Their outputs; every third step copies are made."""
        for sequence in sequences:
            self.core.run(sequence)
        turn = 0
        while self.core.has_work:
            chunks = self.core.plan_step()
            if chunks:
                self.core.finish_step(chunks, self.runner.execute(chunks))
            self.core.check_integrity()
            turn += 1
            if turn % 3 == 0:
                self.copier.catch_up()
        self.copier.catch_up()
        return [each.tokens[len(each.spec.token_ids) :] for each in sequences]


@pytest.fixture(autouse=True)
def _pools_of_the_twin(monkeypatch: pytest.MonkeyPatch) -> None:
    def allocate(layout: KvLayout, num_blocks: int, _device: str) -> TwinPool:
        return TwinPool(layout, num_blocks)

    monkeypatch.setattr("kvmesh.engine.runner.allocate_pool", allocate)


@pytest.fixture(scope="module", params=KINDS)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    return Checkpoint(request.param, tmp_path_factory.mktemp(request.param))


@pytest.mark.parametrize("swaps", [True, False])
def test_preempted_sequences_go_on_where_they_were(
    checkpoint: Checkpoint, request: pytest.FixtureRequest, swaps: bool
) -> None:
    groups = KINDS[request.node.callspec.params["checkpoint"]]
    prompt = checkpoint.prompts[4]
    prompts = [[(token + shift) % 320 for token in prompt] for shift in range(len(SAMPLING))]
    roomy = DeviceWorker(checkpoint, ROOMY, swaps=False)
    assert roomy.core.spec.groups == groups
    held = [roomy.admit(*each) for each in zip(prompts, SAMPLING, strict=True)]
    taken = ROOMY - roomy.core.pool.num_free
    wanted = roomy.finish(held)
    assert roomy.core.statistics().preemptions_total == 0

    # Room for the prompts and nothing else.
    size = roomy.core.block_size
    alone = blocks_at_most(groups, len(prompt) + NEW_TOKENS, CHUNK, size)
    tight = DeviceWorker(checkpoint, max(alone, taken), swaps=swaps)
    found = tight.finish([tight.admit(*each) for each in zip(prompts, SAMPLING, strict=True)])
    assert found == wanted

    now = tight.core.statistics()
    assert now.preemptions_total > 0
    assert now.swap.swapped_in_total == now.swap.swapped_out_total
    assert (now.swap.swapped_out_total > 0) is swaps
    once = sum(len(each) + NEW_TOKENS - 1 for each in prompts)
    assert (now.computed_tokens_total == once) is swaps
    assert now.swap.blocks_kept == 0
    assert tight.arena.num_free == tight.arena.num_places
    assert tight.core.is_idle
    assert tight.pool.driver.pinned_bytes == 3 * tight.arena.block_bytes
    tight.swap.close()
    assert tight.pool.driver.pinned_bytes == 0
