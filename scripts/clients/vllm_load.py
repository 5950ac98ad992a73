"""`vllm bench serve`.

Only the load generator runs, without vLLM's compiled parts and without its command line, which
would load them.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from scripts.clients.cases import LOAD, Target, latencies, run_cases, run_command

START = (
    "from vllm.benchmarks import serve as s; p = s.FlexibleArgumentParser(); "
    "s.add_cli_args(p); s.main(p.parse_args())"
)
PATHS = {"openai": "/v1/completions", "openai-chat": "/v1/chat/completions"}


def _round(name: str, backend: str, more: Sequence[str]) -> Callable[[Target], str]:
    def run(target: Target) -> str:
        with tempfile.TemporaryDirectory() as folder:
            argv = [sys.executable, "-c", START, "--backend", backend]
            argv += ["--base-url", target.url.removesuffix("/v1"), "--endpoint", PATHS[backend]]
            argv += ["--model", target.model, "--tokenizer", target.folder, *more]
            argv += ["--dataset-name", "random", "--random-input-len", str(LOAD.input_tokens)]
            argv += ["--random-output-len", str(LOAD.output_tokens), "--ignore-eos"]
            argv += ["--num-prompts", str(LOAD.num_requests), "--num-warmups", "2"]
            argv += ["--percentile-metrics", "ttft,tpot,itl,e2el", "--save-result"]
            run_command([*argv, "--result-dir", folder, "--result-filename", "out.json"])
            told = json.loads((Path(folder) / "out.json").read_text())
        assert told["completed"] == LOAD.num_requests, told["completed"]
        assert told["total_output_tokens"] == LOAD.num_requests * LOAD.output_tokens, told
        return latencies(told["median_ttft_ms"], told["mean_itl_ms"])

    run.__name__ = name
    return run


if __name__ == "__main__":
    many = ("--max-concurrency", str(LOAD.concurrency))
    rate = ("--request-rate", str(LOAD.rate))
    run_cases(
        [
            _round("completions", "openai", many),
            _round("chat", "openai-chat", many),
            _round("chat at a rate", "openai-chat", rate),
        ]
    )
