"""The benchmark of long prompts: what it computes, and that it leaves nothing behind."""

from __future__ import annotations

from benchmarks.long_prompt import GENERATED, PARTS, prefill_in_parts
from kvmesh.engine.fake import FakeRunner


def test_parts_of_a_prompt_are_told_in_order() -> None:
    num_tokens = 1000
    runner = FakeRunner(num_blocks=-(-(num_tokens + GENERATED) // 16) + 1, block_size=16)
    rows = list(prefill_in_parts(runner, num_tokens, chunk=64))
    assert len(rows) == PARTS
    assert [row["tokens"] for row in rows] == sorted({row["tokens"] for row in rows})
    assert rows[-1]["tokens"] == num_tokens
    seconds = [row["seconds"] for row in rows]
    assert seconds == sorted(seconds)
