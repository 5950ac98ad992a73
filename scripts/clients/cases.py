"""How the program of a client tells what worked: one line of standard output per case.

The programs of this folder run in environments of their own, with nothing of KVMesh installed, as
`python -m scripts.clients.NAME URL MODEL FOLDER`: only the standard library may be imported here.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import os
import subprocess
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

MARK = "case: "
"""What the lines begin with that `scripts.try_clients` reads."""

CITIES = ["Berlin", "Lisbon"]
"""What the tools of all programs take; a choice, so that a model this small can only be right."""

WEATHER_TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather of a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "enum": CITIES}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}

_COMMAND_S = 600.0

QUESTION = "What does os.path.join do?"


@dataclass(frozen=True, slots=True)
class Target:
    """Where the model is served.

    Attributes:
        url: with `/v1` at its end.
        model: its name.
        folder: its folder, with the tokenizer.
    """

    url: str
    model: str
    folder: str


Case = Callable[[Target], Any]


@dataclass(frozen=True, slots=True)
class Load:
    """What all load generators are to send, so that their numbers can be compared.

    Attributes:
        rate: requests per second where a generator is asked for a rate.
    """

    num_requests: int = 24
    concurrency: int = 4
    rate: float = 4.0
    input_tokens: int = 64
    output_tokens: int = 16


LOAD = Load()


def latencies(ttft_ms: float, itl_ms: float) -> str:
    """The medians of a load generator, as a note."""
    assert 0 < itl_ms < ttft_ms < 60_000, f"TTFT {ttft_ms} ms, ITL {itl_ms} ms"
    return f"TTFT {ttft_ms:.0f} ms, ITL {itl_ms:.1f} ms"


def run_command(argv: Sequence[str], **more: str) -> None:
    """Runs a load generator without the hub: tokenizers are folders here.

    Args:
        more: environment variables beside those of this process.

    Raises:
        RuntimeError: it failed, or did not end; with the end of what it said.
    """
    offline = dict.fromkeys(("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_DATASETS_OFFLINE"), "1")
    env = {**os.environ, **offline, **more}  # noqa: TID251 the environment of a child, not ours
    done = subprocess.run(
        argv, env=env, capture_output=True, text=True, timeout=_COMMAND_S, check=False
    )
    print(done.stdout, done.stderr, sep="\n", file=sys.stderr)
    if done.returncode:
        said = (done.stderr or done.stdout).strip().splitlines()[-3:]
        raise RuntimeError(f"exit code {done.returncode}: {' | '.join(said)}")


def run_cases(cases: Sequence[Case]) -> None:
    """Runs all cases and tells of each: what it raises is its problem, what it returns its note.

    The target comes from the command line: URL MODEL FOLDER.
    """
    target = Target(*sys.argv[1:4])
    for case in cases:
        try:
            outcome = case(target)
            if inspect.iscoroutine(outcome):
                outcome = asyncio.run(outcome)
            problem, note = "", outcome or ""
        except Exception as error:  # noqa: BLE001 whatever a client raises is what was found out
            traceback.print_exc()
            problem, note = f"{type(error).__name__}: {error}"[:500], ""
        name = case.__name__.replace("_", " ")
        print(f"{MARK}{json.dumps({'name': name, 'problem': problem, 'note': note})}", flush=True)
