"""What vLLM's own loop generates."""

from __future__ import annotations

import random
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from kvmesh.core.config import default_environment
from kvmesh.engine.vllm_check import engine_environment
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
            max_model_len=2048,
            enforce_eager=True,
            block_size=BLOCK_SIZE,
            kv_cache_memory_bytes=1 << 28,
            seed=0,
            **{"skip_tokenizer_init": True, **more},
        )
        self._sampling = vllm.SamplingParams

    def publish_kv_events(self, publish: Callable[[Any], object]) -> None:
        """Gives each batch of KV events to a function; load it with `kv_events_config`."""
        core = self._llm.llm_engine.engine_core.engine_core
        core.scheduler.kv_event_publisher.publish = publish

    def embeddings(
        self, prompts: Sequence[Sequence[int]], dimensions: int | None = None
    ) -> list[list[float]]:
        """The vector of each prompt; load it with runner="pooling".

        Args:
            dimensions: of each; None for all.
        """
        from vllm import PoolingParams

        asked = [{"prompt_token_ids": list(prompt)} for prompt in prompts]
        params = PoolingParams(task="embed", dimensions=dimensions)
        found = self._llm.embed(asked, use_tqdm=False, pooling_params=params)
        return [each.outputs.embedding for each in found]

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
