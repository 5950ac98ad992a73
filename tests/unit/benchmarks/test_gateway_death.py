"""A stream's longest pause, and whether it came to its end, over several answers."""

from __future__ import annotations

import json
import time

import pytest

from benchmarks.gateway_death import WAYS, Stream, row_of


def _event(number: int, text: str) -> list[str]:
    body = json.dumps({"choices": [{"delta": {"content": text}}]})
    return [f"id: key:{number}\n", f"data: {body}\n", "\n"]


def test_a_stream_goes_on_in_another_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([1.0, 1.5, 4.0])
    monkeypatch.setattr(time, "perf_counter", lambda: next(clock))
    stream = Stream()
    for line in [*_event(1, "a"), *_event(2, "b")]:
        stream.take(line)
    assert (stream.last_id, stream.is_done) == ("key:2", False)
    for line in [*_event(3, "c"), *_event(3, ""), "data: [DONE]\n"]:
        stream.take(line)
    assert (stream.text, stream.num_events, stream.is_done) == ("abc", 3, True)
    assert stream.pause_s == 2.5


def test_a_stream_that_did_not_end_counts_as_wrong() -> None:
    way = next(iter(WAYS))
    streams = [Stream(is_done=number > 0, pause_s=0.5) for number in range(4)]
    row = row_of(way, 0.02, [streams, streams])
    assert (row["wrong"], row["pause p50 ms"]) == (2, 500)
