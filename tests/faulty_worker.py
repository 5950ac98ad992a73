"""A worker whose engine can be made ill: `python -m tests.faulty_worker FILE decode --...`.

What is wrong with it is the content of the file, looked at in every step: nothing while there is
none, `hang`, `slow N` for steps that take N times as long, or `nan` for logits that are no numbers.
"""

from __future__ import annotations

import runpy
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from kvmesh.engine.fake import FakeRunner
from kvmesh.engine.protocol import SampledToken, SequenceChunk, StepResult

_execute = FakeRunner.execute


def fall_ill(file: Path) -> None:
    """Makes the fake engine of this process do as the file says."""

    def execute(runner: FakeRunner, chunks: Sequence[SequenceChunk]) -> StepResult:
        started = time.monotonic()
        result = _execute(runner, chunks)
        took_s = time.monotonic() - started
        word, _, factor = file.read_text().partition(" ") if file.exists() else ("", "", "")
        if word == "hang":
            threading.Event().wait()
        if word == "slow":
            time.sleep((float(factor) - 1) * took_s)
        if word == "nan":
            damaged = [each and SampledToken(0, damaged=True) for each in result.tokens]
            return StepResult(damaged, result.prompt_logprobs, result.lost)
        return result

    FakeRunner.execute = execute  # type: ignore[assignment,method-assign]


if __name__ == "__main__":
    fall_ill(Path(sys.argv.pop(1)))
    service = sys.argv.pop(1)
    runpy.run_module(f"services.{service}", run_name="__main__", alter_sys=True)
