"""A worker whose engine can be made ill: `python -m tests.faulty_worker FILE decode --...`.

What is wrong with it is the content of the file, looked at in every step: nothing while there is
none, `hang`, `slow N` for steps that take N times as long, or `nan` for logits that are no numbers.
`kill first N` ends the process in layer N of a part of a prompt, `stop first N` halts it there:
`first` is who computes the beginning for another worker, `last` who goes on from another's.

KVMesh's own engine gets logits that are no numbers, so that it finds them itself. Its steps can be
given the least time that a larger model's would take.
"""

from __future__ import annotations

import os
import runpy
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from kvmesh.engine.core import EngineCore
from kvmesh.engine.fake import FakeRunner
from kvmesh.engine.protocol import ModelRunner, SampledToken, SequenceChunk, StepResult
from kvmesh.engine.sequence import Sequence as EngineSequence

SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}

_goes_on = EngineCore._goes_on


def fall_ill(file: Path, *, kind: str = "fake", step_s: float = 0.0) -> None:
    """Makes the engine of this process do as the file says.

    Args:
        kind: `fake` or `kvmesh`, as in `engine.kind`.
        step_s: least time of a step; what is left of it is slept.
    """

    def words() -> list[str]:
        return file.read_text().split() if file.exists() else []

    runner_class: Any = FakeRunner if kind == "fake" else _own_runner(words)
    execute_alone = runner_class.execute

    def execute(runner: ModelRunner, chunks: Sequence[SequenceChunk]) -> StepResult:
        started = time.monotonic()
        result: StepResult = execute_alone(runner, chunks)
        time.sleep(max(0.0, started + step_s - time.monotonic()))
        took_s = time.monotonic() - started
        word, *more = words() or [""]
        if word == "hang":
            threading.Event().wait()
        if word == "slow":
            time.sleep((float(more[0]) - 1) * took_s)
        if word == "nan" and kind == "fake":
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

    runner_class.execute = execute
    EngineCore._goes_on = goes_on  # type: ignore[assignment,method-assign]


def _own_runner(words: Callable[[], list[str]]) -> Any:
    """KVMesh's runner class, changed so that its logits are NaN while the file says `nan`."""
    # Workers with other engines never import torch.
    import torch

    from kvmesh.engine.model import DecoderModel
    from kvmesh.engine.runner import TorchRunner

    bent_alone = DecoderModel.bent

    def bent(model: DecoderModel, logits: torch.Tensor) -> torch.Tensor:
        found = bent_alone(model, logits)
        return torch.full_like(found, torch.nan) if words()[:1] == ["nan"] else found

    DecoderModel.bent = bent  # type: ignore[assignment,method-assign]
    return TorchRunner


if __name__ == "__main__":
    fall_ill(Path(sys.argv.pop(1)))
    service = sys.argv.pop(1)
    runpy.run_module(f"services.{service}", run_name="__main__", alter_sys=True)
