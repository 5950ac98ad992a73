"""openvino-genai's continuous batching, step by step."""

from __future__ import annotations

import itertools
import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks.engines.child import BatchingEngine, serve

_DTYPES = {"bfloat16": ("fp16", "bf16"), "float32": ("fp32", "f32")}


def export(folder: Path, dtype: str) -> Path:
    """Converts the checkpoint; returns the folder."""
    out = folder.parent / f"{folder.name}-openvino-{dtype}"
    if not (out / "openvino_model.xml").is_file():
        tool = Path(sys.executable).with_name("optimum-cli")
        weights = _DTYPES[dtype][0]
        command = [str(tool), "export", "openvino", "--model", str(folder)]
        command += ["--task", "text-generation-with-past", "--weight-format", weights, str(out)]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    return out


class _Engine(BatchingEngine):
    """The pipeline, step by step."""

    def __init__(self, folder: Path, dtype: str, threads: int) -> None:
        import numpy as np  # noqa: PLC0415 - of the peer's own environment
        import openvino_genai  # type: ignore[import-not-found]  # noqa: PLC0415

        scheduler = openvino_genai.SchedulerConfig()
        scheduler.cache_size = 1
        scheduler.max_num_batched_tokens = 1 << 16
        scheduler.max_num_seqs = 64
        scheduler.enable_prefix_caching = False
        properties = {
            "INFERENCE_PRECISION_HINT": _DTYPES[dtype][1],
            "INFERENCE_NUM_THREADS": threads,
        }
        self._pipeline: Any = openvino_genai.ContinuousBatchingPipeline(
            str(export(folder, dtype)),
            scheduler_config=scheduler,
            device="CPU",
            properties=properties,
        )
        self._draw = np.random.default_rng(0)
        self._numbers = itertools.count()
        # A request lives as long as its handle.
        self._handles: list[Any] = []

    def drain(self) -> float:
        """See `SteppingEngine.drain`."""
        seconds = super().drain()
        self._handles.clear()
        return seconds

    def _compute(self) -> None:
        self._pipeline.step()

    def _is_busy(self) -> bool:
        return bool(self._pipeline.has_non_finished_requests())

    def _add(self, tokens: int, new: int) -> None:
        import openvino  # type: ignore[import-not-found]  # noqa: PLC0415
        import openvino_genai  # noqa: PLC0415

        config = openvino_genai.GenerationConfig()
        config.max_new_tokens, config.ignore_eos, config.do_sample = new, True, False
        ids = openvino.Tensor(self._draw.integers(3, 32000, (1, tokens)))
        self._handles.append(self._pipeline.add_request(next(self._numbers), ids, config))


if __name__ == "__main__":
    serve(_Engine, __doc__)
