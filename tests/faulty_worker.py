"""A worker whose engine can be made ill: `python -m tests.faulty_worker FILE decode --...`.

What is wrong with it is the content of the file, looked at in every step: nothing while there is
none, `hang`, `slow N` for steps that take N times as long, or `nan` for logits that are no numbers.
`kill first N` ends the process in layer N of a part of a prompt, `stop first N` halts it there:
`first` is who computes the beginning for another worker, `last` who goes on from another's.
"""

from __future__ import annotations

import os
import runpy
import signal
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from kvmesh.engine.core import EngineCore
from kvmesh.engine.fake import FakeRunner
from kvmesh.engine.protocol import SampledToken, SequenceChunk, StepResult
from kvmesh.engine.sequence import Sequence as EngineSequence

SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}

_execute = FakeRunner.execute
_goes_on = EngineCore._goes_on


def fall_ill(file: Path) -> None:
    """Makes the engine of this process do as the file says."""

    def words() -> list[str]:
        return file.read_text().split() if file.exists() else []

    def execute(runner: FakeRunner, chunks: Sequence[SequenceChunk]) -> StepResult:
        started = time.monotonic()
        result = _execute(runner, chunks)
        took_s = time.monotonic() - started
        word, *more = words() or [""]
        if word == "hang":
            threading.Event().wait()
        if word == "slow":
            time.sleep((float(more[0]) - 1) * took_s)
        if word == "nan":
            damaged = [each and SampledToken(0, damaged=True) for each in result.tokens]
            return StepResult(damaged, result.prompt_logprobs, result.lost)
        return result

    def goes_on(core: EngineCore, sequence: EngineSequence, num_stages: int | None) -> bool:
        word, *more = words() or [""]
        if word in SIGNALS and num_stages is not None:
            which, number = more
            is_last = sequence.upstream is not None
            if is_last == (which == "last") and num_stages > int(number):
                os.kill(os.getpid(), SIGNALS[word])
        return _goes_on(core, sequence, num_stages)

    FakeRunner.execute = execute  # type: ignore[assignment,method-assign]
    EngineCore._goes_on = goes_on  # type: ignore[assignment,method-assign]


if __name__ == "__main__":
    fall_ill(Path(sys.argv.pop(1)))
    service = sys.argv.pop(1)
    runpy.run_module(f"services.{service}", run_name="__main__", alter_sys=True)
