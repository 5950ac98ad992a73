"""The stack that the programs are run against, and whether it let go of all they asked for."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
import time
import urllib.request
from collections.abc import Sequence
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from kvmesh.core.config import child_environment
from scripts.try_clients.environments import ROOT

MODEL = "pydoc-6m"

HELD_NOWHERE = (
    "kvmesh_gateway_requests_open",
    "vllm:num_requests_running",
    "vllm:num_requests_waiting",
    "vllm:kv_cache_usage_perc",  # blocks that are only cached do not count
    "kvmesh_sequences_held",
    "kvmesh_prefill_slots_used",
    "kvmesh_decode_sequences",
    "kvmesh_decode_reservations_open",
)
"""Gauges of gateways and workers that are zero when no request is anywhere."""

_EMBEDDED = ROOT / "models" / MODEL
_CHAT_TEMPLATE = ROOT / "tests" / "unit" / "gateway" / "templates" / "qwen2.5.jinja"

_SETTLE_S = 20.0
_POLL_S = 0.2
_TIMEOUT_S = 5.0


def run_in_stack(inside: Sequence[str], folder: Path) -> int:
    """Starts a stack of this checkout's code and runs a command in it; the exit code.

    Args:
        inside: finds the stack by its environment, `KVMESH_URL` and `KVMESH_STATE_DIR`.
        folder: for the model, and for the stack in `state`.
    """
    command = [sys.executable, "-m", "kvmesh.cli", "up", "--port", "0", "--prefill", "1"]
    command += ["--decode", "1", "--model", str(make_model(folder)), "--model-name", MODEL]
    command += ["--dtype", "float32", "--state-dir", str(folder / "state")]
    command += ["--run", shlex.join(inside)]
    env = child_environment({"PYTHONPATH": f"{ROOT / 'libs'}:{ROOT}"})
    return subprocess.run(command, cwd=ROOT, env=env, check=False).returncode


def make_model(folder: Path) -> Path:
    """The embedded model with a chat template that has tools; returns its folder."""
    model = folder / "model"
    model.mkdir(parents=True, exist_ok=True)
    for path in (*_EMBEDDED.iterdir(), _CHAT_TEMPLATE):
        name = "chat_template.jinja" if path is _CHAT_TEMPLATE else path.name
        (model / name).unlink(missing_ok=True)
        (model / name).symlink_to(path)
    return model


def held(families: str, owner: str) -> dict[str, float]:
    """What a process still holds, by the text of its metrics."""
    return {
        f"{owner} {sample.name}": sample.value
        for family in text_string_to_metric_families(families)
        for sample in family.samples
        if sample.name in HELD_NOWHERE and sample.value
    }


def left_behind(state: Path) -> dict[str, float]:
    """What the stack holds when it has had time to let go; empty is right.

    Args:
        state: its folder.
    """
    members = json.loads((state / "stack.json").read_text())["members"]
    deadline_s = time.monotonic() + _SETTLE_S
    while True:
        found: dict[str, float] = {}
        for member in members:
            if member["metrics_port"]:
                url = f"http://127.0.0.1:{member['metrics_port']}/metrics"
                with urllib.request.urlopen(url, timeout=_TIMEOUT_S) as answer:
                    found |= held(answer.read().decode(), member["name"])
        if not found or time.monotonic() > deadline_s:
            return found
        time.sleep(_POLL_S)


def logged_errors(state: Path) -> list[str]:
    """Lines of level error and tracebacks in the stack's logs."""
    return [
        f"{path.name}: {line}"
        for path in sorted((state / "logs").glob("*.log"))
        for line in path.read_text(errors="replace").splitlines()
        if " ERROR " in line or line.startswith("Traceback")
    ]
