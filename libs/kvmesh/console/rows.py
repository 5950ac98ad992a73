"""Requests as table rows and timelines: JSON values with times from the requests' own log.

Pure. Their shape is documented in docs/console.md. Tests: tests/unit/console/test_rows.py.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

from kvmesh.console.request_log import Moment, RequestLog, RequestTrace, Stage

Json = dict[str, Any]


def ttft_s(trace: RequestTrace) -> float | None:
    """Seconds from arrival to first token; None before it."""
    first = trace.moment(Moment.FIRST_TOKEN)
    return None if first is None else first - trace.arrived_at


def flows(running: Iterable[RequestTrace]) -> list[Json]:
    """Number of requests at each stage on each pair of workers."""
    counts = Counter((each.stage, *_where(each)) for each in running)
    return [
        {"stage": stage.value, "prefill": prefill, "decode": decode, "count": count}
        for (stage, prefill, decode), count in sorted(
            counts.items(), key=lambda item: (item[0][0].value, *item[0][1:])
        )
    ]


def _where(trace: RequestTrace) -> tuple[str, str]:
    waiting = trace.stage is Stage.WAITING
    return ("", "") if waiting else (trace.prefill_worker, trace.decode_worker)


def request_row(trace: RequestTrace, log: RequestLog, now: float) -> Json:
    """One request as a table row."""
    first_s = ttft_s(trace)
    end_s = now if trace.ended_at is None else trace.ended_at
    return {
        "id": trace.request_id,
        "at": round(trace.arrived_at + log.unix_offset_s, 3),
        "stage": trace.stage.value,
        "prompt_tokens": trace.prompt_tokens,
        "cached_tokens": trace.cached_tokens,
        "output_tokens": trace.output_tokens,
        "placement": trace.placement.value,
        "prefill": trace.prefill_worker,
        "decode": trace.decode_worker,
        "refusals": trace.num_refusals,
        "moves": trace.num_moves,
        "ttft_ms": None if first_s is None else round(first_s * 1000, 2),
        "elapsed_ms": round((end_s - trace.arrived_at) * 1000, 2),
        "finish": trace.finish,
    }


def timeline(trace: RequestTrace, log: RequestLog, now: float) -> Json:
    """One request with its phases and all events, in milliseconds after its arrival."""
    return {
        **request_row(trace, log, now),
        "error": trace.error,
        "phases": phases(trace, now),
        "events": [
            {
                "at_ms": round((event.at_s - trace.arrived_at) * 1000, 3),
                "what": event.moment.value,
                "worker": event.worker,
                "text": event.text,
            }
            for event in trace.events
        ],
    }


_BEGINS = {
    Moment.ACCEPTED: "prefill",
    Moment.FIRST_TOKEN: "handoff",
    Moment.HANDED_OFF: "decode",
    Moment.LOST: "waiting",
}


def phases(trace: RequestTrace, now: float) -> list[Json]:
    """Phases without gaps: waiting, prefill, handoff, decode, and again after a loss."""
    end_s = now if trace.ended_at is None else trace.ended_at
    found: list[Json] = []
    phase, worker, since_s = "waiting", "", trace.arrived_at

    def close(until_s: float) -> None:
        start, end = ((at - trace.arrived_at) * 1000 for at in (since_s, until_s))
        found.append(
            {
                "phase": phase,
                "worker": worker,
                "start_ms": round(start, 3),
                "end_ms": round(end, 3),
            }
        )

    for event in trace.events:
        if event.moment in _BEGINS:
            close(event.at_s)
            phase, worker, since_s = _BEGINS[event.moment], event.worker, event.at_s
    close(end_s)
    return found
