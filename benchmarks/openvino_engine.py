"""Times steps of openvino-genai's continuous batching, in the Python that has it; prints JSON."""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

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


def main() -> None:
    """Measures the cells given on the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("dtype", choices=sorted(_DTYPES))
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--context", type=int, required=True)
    parser.add_argument("--prefill", type=int, nargs="*", required=True)
    parser.add_argument("--batch", type=int, nargs="*", required=True)
    parser.add_argument("--repeats", type=int, required=True)
    parser.add_argument("--seconds", type=float, required=True, help="of a cell, but two repeats")
    options = parser.parse_args()
    steps = _load(export(options.folder, options.dtype), options)

    def median(batch: int, tokens: int, new: int) -> float:
        """Seconds of the first step, or of those after it when there is more than one token."""
        steps(batch, tokens, new)
        times: list[float] = []
        begun = time.perf_counter()
        for repeat in range(options.repeats if new == 1 else 2):
            if repeat >= 2 and time.perf_counter() - begun > options.seconds:
                break
            found = steps(batch, tokens, new)
            times += found if new == 1 else found[1:]
        return statistics.median(times)

    cells = {f"prefill {n}": n / median(1, n, 1) for n in options.prefill}
    for batch in options.batch:
        seconds = median(batch, options.context, 1 + options.repeats)
        cells[f"decode {batch}"] = batch / seconds
    sys.stdout.write(json.dumps(cells) + "\n")


def _load(folder: Path, options: argparse.Namespace) -> Any:
    import numpy as np  # noqa: PLC0415 - of the peer's own environment
    import openvino  # type: ignore[import-not-found]  # noqa: PLC0415
    import openvino_genai  # type: ignore[import-not-found]  # noqa: PLC0415

    scheduler = openvino_genai.SchedulerConfig()
    scheduler.cache_size = 3
    scheduler.max_num_batched_tokens = 1 << 16
    scheduler.max_num_seqs = 64
    scheduler.enable_prefix_caching = False
    properties = {
        "INFERENCE_PRECISION_HINT": _DTYPES[options.dtype][1],
        "INFERENCE_NUM_THREADS": options.threads,
    }
    pipeline = openvino_genai.ContinuousBatchingPipeline(
        str(folder), scheduler_config=scheduler, device="CPU", properties=properties
    )
    draw = np.random.default_rng(0)
    numbers = itertools.count()

    def steps(batch: int, tokens: int, new: int) -> list[float]:
        config = openvino_genai.GenerationConfig()
        config.max_new_tokens, config.ignore_eos, config.do_sample = new, True, False
        ids = [openvino.Tensor(draw.integers(3, 32000, (1, tokens))) for _ in range(batch)]
        # A request lives as long as its handle.
        handles = [pipeline.add_request(next(numbers), each, config) for each in ids]
        times = []
        while pipeline.has_non_finished_requests():
            started = time.perf_counter()
            pipeline.step()
            times.append(time.perf_counter() - started)
        del handles
        return times

    return steps


if __name__ == "__main__":
    main()
