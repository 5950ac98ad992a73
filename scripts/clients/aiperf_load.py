"""AIPerf's profiles."""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from scripts.clients.cases import LOAD, Target, latencies, run_cases, run_command

# Its program, by the module that its entry point names.
START = "import sys; from aiperf.cli import app; sys.exit(app())"


def _round(name: str, endpoint: str, more: Sequence[str]) -> Callable[[Target], str]:
    def run(target: Target) -> str:
        with tempfile.TemporaryDirectory() as folder:
            argv = [sys.executable, "-c", START, "profile", "--model", target.model]
            argv += ["--url", target.url.removesuffix("/v1"), "--tokenizer", target.folder]
            argv += ["--endpoint-type", endpoint, "--streaming", "--ui", "none", *more]
            argv += ["--request-count", str(LOAD.num_requests), "--warmup-request-count", "2"]
            argv += ["--synthetic-input-tokens-mean", str(LOAD.input_tokens)]
            argv += ["--synthetic-input-tokens-stddev", "0"]
            argv += ["--output-tokens-mean", str(LOAD.output_tokens)]
            argv += ["--output-tokens-stddev", "0", "--extra-inputs", "ignore_eos:true"]
            # Text cut into tokens again need not give as many as were generated. Of responses it
            # reads the usage in `response.completed`; one at its limit ends in another event.
            is_counted = endpoint != "responses"
            argv += ["--use-server-token-count"] if is_counted else []
            # Told to stay offline it takes the folder for a name on the hub; else for a folder.
            online = {"HF_HUB_OFFLINE": "", "TRANSFORMERS_OFFLINE": ""}
            run_command([*argv, "--artifact-dir", folder], **online)
            # The warm-up has a report too, in a folder of its own.
            paths = Path(folder).rglob("profile_export_aiperf.json")
            told = json.loads(min(paths, key=lambda path: len(path.parts)).read_text())
        failed = (told.get("error_request_count") or {}).get("avg", 0)
        assert not failed, told.get("error_summary")
        assert told["request_count"]["avg"] == LOAD.num_requests, told["request_count"]
        tokens = told["output_sequence_length"]
        counts = {tokens["min"], tokens["max"]}
        assert counts == {LOAD.output_tokens} or not is_counted, tokens
        return latencies(told["time_to_first_token"]["p50"], told["inter_token_latency"]["avg"])

    run.__name__ = name
    return run


if __name__ == "__main__":
    many = ("--concurrency", str(LOAD.concurrency))
    rate = ("--request-rate", str(LOAD.rate))
    run_cases(
        [
            *(_round(name, name, many) for name in ("chat", "completions", "responses")),
            _round("chat at a rate", "chat", rate),
        ]
    )
