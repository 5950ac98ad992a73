"""Counts a worker's sequences by side and by queue (FlowKV 3.4 and appendix B.2).

Tests: tests/unit/engine/test_queues.py.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from kvmesh.core.details import QueueLengths
from kvmesh.engine.running import RunningSequences
from kvmesh.engine.sequence import Sequence


def queue_lengths(
    held: Iterable[Sequence], running: RunningSequences, preempted: Iterable[Sequence]
) -> tuple[QueueLengths, QueueLengths]:
    """Returns the queues of prefill and of decode.

    A sequence is on the prefill side until its prompt is computed; if it is computed for another
    worker, until its KV was taken. A prompt that another worker computes is on the decode side.
    """
    sides: tuple[Counter[str], Counter[str]] = Counter(), Counter()
    # Metrics count in another thread, so the sequences are copied before they are looked at.
    for each in list(held):
        is_computed = each.num_generated > 0
        if each.hold_after_first:
            sides[0]["sending" if is_computed else "receiving"] += 1
        else:
            sides[1]["receiving"] += 1
    latest = running.latest
    for each in list(running):
        sides[_side(each)]["running" if each in latest else "waiting"] += 1
    for each in list(preempted):
        sides[_side(each)]["swapped"] += 1
    return QueueLengths(**sides[0]), QueueLengths(**sides[1])


def _side(sequence: Sequence) -> int:
    prompt = len(sequence.spec.token_ids)
    return 0 if sequence.hold_after_first or len(sequence.tokens) == prompt else 1
