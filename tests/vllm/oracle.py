"""What one engine alone generates: vLLM's own loop, and our scheduler over vLLM in one process."""

from __future__ import annotations

import random
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvmesh.core.config import default_environment
from kvmesh.core.types import SamplingParams, SequenceSpec
from kvmesh.engine.core import EngineCore
from kvmesh.engine.protocol import ModelRunner
from kvmesh.engine.sequence import Emission
from kvmesh.engine.sequence import Sequence as Line
from kvmesh.engine.vllm_check import engine_environment
from kvmesh.kv.hashing import root_hash
from kvmesh.policy.batching import BatchLimits
from tests.vllm_engine import BLOCK_SIZE

VOCAB_SIZE = 4096


def some_prompts(count: int, longest: int, seed: int = 1) -> list[list[int]]:
    """Prompts of 1 to `longest` tokens."""
    draw = random.Random(seed)
    lengths = [1, longest, *(draw.randint(1, longest) for _ in range(count - 2))]
    return [[draw.randrange(5, VOCAB_SIZE) for _ in range(length)] for length in lengths]


class VllmAlone:
    """`vllm.LLM` as its users have it, on one thread."""

    def __init__(self, folder: Path, dtype: str, **more: Any) -> None:
        default_environment(engine_environment(1))
        import vllm

        self._llm: Any = vllm.LLM(
            model=str(folder),
            dtype=dtype,
            skip_tokenizer_init=True,
            max_model_len=2048,
            enforce_eager=True,
            block_size=BLOCK_SIZE,
            kv_cache_memory_bytes=1 << 28,
            seed=0,
            **more,
        )
        self._sampling = vllm.SamplingParams

    def greedy(
        self, prompts: Sequence[Sequence[int]], count: int, adapter: Path | None = None
    ) -> list[list[int]]:
        """`count` tokens after each prompt.

        Args:
            adapter: whose weights are added.
        """
        from vllm.lora.request import LoRARequest

        number = 0 if adapter is None else zlib.crc32(str(adapter).encode()) >> 1
        lora = None if adapter is None else LoRARequest(adapter.name, number, str(adapter))
        sampling = self._sampling(
            temperature=0.0, max_tokens=count, ignore_eos=True, detokenize=False
        )
        asked = [{"prompt_token_ids": list(prompt)} for prompt in prompts]
        found = self._llm.generate(asked, sampling, use_tqdm=False, lora_request=lora)
        return [list(each.outputs[0].token_ids) for each in found]


def generated(
    runner: ModelRunner,
    prompts: Sequence[Sequence[int]],
    sampling: SamplingParams,
    *,
    max_tokens: int = 512,
    num_blocks: int = 0,
    adapters: Sequence[str] = (),
) -> list[list[int]]:
    """Tokens after each prompt, all of them at once under our scheduler.

    Args:
        max_tokens: of one step.
        num_blocks: that it may use; 0 for all.
        adapters: of each prompt; empty for none at all.
    """
    blocks = num_blocks or runner.kv.num_blocks
    core = EngineCore(runner.spec, blocks, BatchLimits(max_tokens=max_tokens), growth_tokens=0)
    found: list[list[int]] = [[] for _ in prompts]
    waiting = [
        SequenceSpec(
            tuple(prompt), len(prompt), sampling, root_hash("", adapter=name), adapter=name
        )
        for prompt, name in zip(prompts, adapters or [""] * len(prompts), strict=True)
    ]
    admitted = 0
    while admitted < len(waiting) or core.has_work:
        while admitted < len(waiting):
            line = core.admit_decode(waiting[admitted])
            if not isinstance(line, Line):
                break

            def take(emission: Emission, tokens: list[int] = found[admitted]) -> None:
                tokens.append(emission.token_id)

            line.on_emission = take
            core.run(line)
            admitted += 1
        chunks = core.plan_step()
        runner.forget(core.take_gone())
        core.finish_step(chunks, runner.execute(chunks))
    core.check_integrity()
    assert core.is_idle
    return found
