"""The mesh as one JSON value: what the console's page draws.

Pure. Its shape is documented in docs/console.md. Tests: tests/unit/console/test_snapshot.py.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvmesh.console.request_log import Moment, RequestLog, RequestTrace, Stage
from kvmesh.console.sampler import LinkName, Sample, Sampler, WorkerRates, ttft_s
from kvmesh.core.types import FleetWorker

MAX_REQUESTS = 100
"""Requests in a snapshot; older ones can be asked for by id."""

Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class ConsoleView:
    """What a snapshot is made of.

    Attributes:
        fresh: whether a scheduler is connected; without one the workers are those known last.
        refusals: met since start, by (stage, reason).
    """

    model: str
    version: str
    fresh: bool
    workers: Sequence[FleetWorker]
    refusals: Mapping[tuple[str, str], float]
    log: RequestLog
    sampler: Sampler


def snapshot(view: ConsoleView, now: float) -> Json:
    """Everything but the history.

    Args:
        now: on the request log's clock.
    """
    running, latest = list(view.log.running()), list(view.log.latest())
    shown = [*reversed(running), *latest][:MAX_REQUESTS]
    return {
        "now": round(now + view.log.unix_offset_s, 3),
        "model": view.model,
        "version": view.version,
        "fresh": view.fresh,
        "workers": [
            worker_row(each, view.sampler.worker_rates.get(each.info.worker_id, WorkerRates()))
            for each in sorted(view.workers, key=lambda each: each.info.worker_id)
        ],
        "links": [row for each in view.workers for row in _link_rows(each, view.sampler)],
        "flows": flows(running),
        "open": len(running),
        "arrived_total": view.log.arrived_total,
        "ended_total": view.log.ended_total,
        "refusals": [
            {"stage": stage, "reason": reason, "count": int(count)}
            for (stage, reason), count in sorted(view.refusals.items(), key=lambda item: -item[1])
        ],
        "requests": [request_row(each, view.log, now) for each in shown],
        "sample": sample_row(view.sampler.samples[-1]) if view.sampler.samples else None,
    }


def history(samples: Iterable[Sample]) -> list[Json]:
    """The samples, oldest first."""
    return [sample_row(each) for each in samples]


def sample_row(sample: Sample) -> Json:
    """One sample, rounded to what can be seen."""
    return {
        name: round(value, 4) if isinstance(value, float) else value
        for name, value in dataclasses.asdict(sample).items()
    }


def worker_row(worker: FleetWorker, rates: WorkerRates) -> Json:
    """One worker."""
    info, load, detail = worker.info, worker.load, worker.detail
    state = "draining" if load.draining else "ready"
    cached = min(detail.blocks_cached, load.blocks_free)
    return {
        "id": info.worker_id,
        "role": info.role.value,
        "cluster": info.cluster,
        # Workers that can hand KV over to each other.
        "group": f"{info.model} {info.layout.model_fingerprint[:8]}",
        "state": "cordoned" if detail.cordoned else state,
        "incarnation": info.incarnation,
        "address": str(info.control_endpoint),
        "prefill": {"active": load.prefill_active, "slots": info.prefill_slots},
        "decode": {
            "running": load.decode_running,
            "reserved": load.decode_reserved,
            "preempted": load.decode_preempted,
            "slots": info.decode_slots,
        },
        "blocks": {
            "total": info.num_blocks,
            "used": info.num_blocks - load.blocks_free,
            "cached": cached,
            "bytes": info.layout.block_bytes,
        },
        "hit_share": rates.hit_share,
        "prefill_tokens_s": round(rates.prefill_tokens_s, 1),
        "decode_tokens_s": round(rates.decode_tokens_s, 1),
    }


def _link_rows(worker: FleetWorker, sampler: Sampler) -> list[Json]:
    sender = worker.info.worker_id
    return [
        {
            "from": sender,
            "to": link.peer,
            "channel": link.channel,
            "bytes_total": link.bytes_total,
            "bytes_s": round(
                sampler.link_rates.get(LinkName(sender, link.peer, link.channel), 0.0)
            ),
            "goodput_bytes_s": round(link.bytes_total / link.busy_s) if link.busy_s > 0 else None,
            "budget_bytes_s": link.budget_bytes_s or None,
            "queued_bytes": link.queued_bytes,
            "rtt_ms": round(link.rtt_s * 1000, 3) if link.rtt_s > 0 else None,
            "retransmits": link.retransmits,
            "failed_total": link.failed_total,
        }
        for link in worker.detail.links
    ]


def flows(running: Iterable[RequestTrace]) -> list[Json]:
    """How many requests are at each stage on each pair of workers."""
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
    """One request in a table."""
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
    """One request with its phases and all that happened, in milliseconds after its arrival."""
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
