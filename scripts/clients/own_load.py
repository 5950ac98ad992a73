"""`kvmesh bench serve` beside the others."""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from scripts.clients.cases import LOAD, Target, latencies, run_cases, run_command


def _round(name: str, more: Sequence[str]) -> Callable[[Target], str]:
    def run(target: Target) -> str:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "out.json"
            argv = [sys.executable, "-m", "kvmesh.cli", "bench", "serve"]
            argv += ["--url", target.url.removesuffix("/v1"), *more]
            argv += ["--requests", str(LOAD.num_requests), "--prompts", "text"]
            argv += ["--input-tokens", str(LOAD.input_tokens)]
            argv += ["--output-tokens", str(LOAD.output_tokens)]
            run_command([*argv, "--save", str(path)])
            told = json.loads(path.read_text())
        assert told["completed"] == LOAD.num_requests, told
        return latencies(told["median_ttft_ms"], told["mean_itl_ms"])

    run.__name__ = name
    return run


if __name__ == "__main__":
    many = ("--rate", "0", "--concurrency", str(LOAD.concurrency))
    rate = ("--rate", str(LOAD.rate))
    run_cases([_round("completions", many), _round("completions at a rate", rate)])
