"""GuideLLM's rounds."""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from scripts.clients.cases import LOAD, Target, latencies, run_cases, run_command

# Its worker processes see no device, which what they import would look for; each starts for the
# better part of a minute.
WORKERS = {"CUDA_VISIBLE_DEVICES": "", "GUIDELLM__MAX_WORKER_PROCESSES": "1"}
FORMATS = {
    "chat": "/v1/chat/completions",
    "completions": "/v1/completions",
    "responses": "/v1/responses",
}


def _round(name: str, request_format: str, profile: str) -> Callable[[Target], str]:
    def run(target: Target) -> str:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "out.json"
            backend = f"kind=openai_http,target={target.url.removesuffix('/v1')}"
            argv = [sys.executable, "-m", "guidellm", "run", "--disable-progress"]
            argv += ["--backend", f"{backend},request_format={request_format}"]
            argv += ["--tokenizer", f"kind=huggingface_auto,model={target.folder}"]
            lengths = f"prompt_tokens={LOAD.input_tokens},output_tokens={LOAD.output_tokens}"
            argv += ["--data", f"kind=synthetic_text,{lengths}", "--profile", profile]
            argv += ["--constraint", f"kind=max_requests,count={LOAD.num_requests}"]
            run_command([*argv, "--output", f"kind=json,path={path}"], **WORKERS)
            (report,) = json.loads(path.read_text())["benchmarks"]
        metrics = report["metrics"]
        totals = metrics["request_totals"]
        assert totals["successful"] == totals["total"] == LOAD.num_requests, totals
        tokens = metrics["output_token_count"]["successful"]
        assert tokens["min"] == tokens["max"] == LOAD.output_tokens, tokens
        ttft = metrics["time_to_first_token_ms"]["successful"]["median"]
        return latencies(ttft, metrics["inter_token_latency_ms"]["successful"]["mean"])

    run.__name__ = name
    return run


if __name__ == "__main__":
    many = f"kind=concurrent,streams={LOAD.concurrency}"
    rate = f"kind=poisson,rate={LOAD.rate:.0f}"
    run_cases(
        [
            *(_round(name, path, many) for name, path in FORMATS.items()),
            _round("chat at a rate", FORMATS["chat"], rate),
        ]
    )
