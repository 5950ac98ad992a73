"""PrfaaS's hybrid prefix cache over two clusters: linear states, which fit at one position only,
and blocks of full attention, which fit in part, come home together; the next turn goes on there.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from kvmesh.policy.offload import OffloadReason, Reach, choose_cluster
from kvmesh.runtime.worker_config import EngineSection, WorkerSection
from tests.integration.families import BLOCK_SIZE, NEW_TOKENS, Checkpoint
from tests.worker_driver import Driver, Key, make_spec, running_worker, until_idle

THRESHOLD = 200
INTERVAL = 64


async def test_a_turn_after_a_remote_prefill_is_a_short_prompt_at_home(tmp_path: Path) -> None:
    checkpoint = Checkpoint("qwen3-next", tmp_path / "model")
    engine = EngineSection(
        model=str(checkpoint.folder),
        num_blocks=400,
        max_batch_tokens=48,
        state_interval_tokens=INTERVAL,
    )
    remote = WorkerSection(
        id="far", role="prefill", cluster="west", channels="tcp", transfer_mode="chunked"
    )
    local = WorkerSection(id="d0", role="decode", channels="tcp")
    async with running_worker(remote, engine) as far, running_worker(local, engine) as home:
        driver = Driver()
        await driver.connect(far)
        await driver.connect(home)
        prompt, expected = checkpoint.prompts[4], checkpoint.expected[4]
        assert chosen(prompt, cached=0) is OffloadReason.LONG
        first = make_spec(prompt, max_tokens=NEW_TOKENS)
        assert await driver.generate(far, home, Key("first"), first) == expected
        await until_idle(far, home)
        before = home.core.statistics().computed_tokens_total
        assert before < NEW_TOKENS, "at home it only decoded"

        turn = prompt + expected + checkpoint.prompts[3]
        spec = make_spec(turn, max_tokens=NEW_TOKENS)
        held = await driver.reserve(home, Key("look"), spec)
        cached = held.reserved.num_cached_blocks * BLOCK_SIZE
        driver.cancel_decode(home, Key("look"))
        await until_idle(far, home)
        # A whole interval would be lost if only states that were computed here could be used.
        assert cached > len(prompt) - INTERVAL
        assert chosen(turn, cached) is OffloadReason.SHORT, "what came over the link stays home"
        answer = checkpoint.continue_greedily(turn)
        assert await driver.generate(home, home, Key("turn"), spec) == answer
        computed = home.core.statistics().computed_tokens_total - before
        assert computed < len(turn) - cached + NEW_TOKENS
        # Two full blocks are alike, but no state was kept where it leaves the prompt.
        other = make_spec([*turn[: 2 * BLOCK_SIZE], *turn[:100]], max_tokens=NEW_TOKENS)
        fresh = await driver.reserve(home, Key("other"), other)
        assert fresh.reserved.num_cached_blocks == 0
        driver.cancel_decode(home, Key("other"))
        await until_idle(far, home)
        await driver.close()


def chosen(prompt: Sequence[int], cached: int) -> OffloadReason:
    """What the threshold makes of a prompt of which so much is cached at home."""
    return choose_cluster(len(prompt), 0, cached, THRESHOLD, Reach()).reason
