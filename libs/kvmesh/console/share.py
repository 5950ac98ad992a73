"""One gateway process's requests as a value that can be summed over processes.

Pure. Tests: tests/unit/console/test_share.py.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from kvmesh.console.request_log import RequestLog, RequestTrace
from kvmesh.console.rows import Json, flows, request_row, ttft_s
from kvmesh.core.types import Placement

MAX_REQUESTS = 100
"""Maximum number of request rows; older requests can be looked up by id."""

WINDOW_S = 30.0
"""Seconds after its end in which a request counts in the quantiles and fractions."""


@dataclass(frozen=True, slots=True)
class Share:
    """Requests of one process, or the sum over several.

    Attributes:
        arrived_total, ended_total: since the process started.
        ttfts: arrival to first token in seconds, of requests that are open or ended in the window,
            each with the worker that decodes it.
        num_aggregated, num_disaggregated: the same requests by placement.
        refusals: refusals since start, by (stage, reason).
        flows: number of requests at each stage on each pair of workers.
        requests: rows, open ones first, the last of each kind first; empty if not asked for.
    """

    num_open: int = 0
    arrived_total: int = 0
    ended_total: int = 0
    ttfts: tuple[tuple[str, float], ...] = ()
    num_aggregated: int = 0
    num_disaggregated: int = 0
    refusals: Mapping[tuple[str, str], float] = field(default_factory=dict)
    flows: tuple[Json, ...] = ()
    requests: tuple[Json, ...] = ()

    @property
    def ttfts_s(self) -> tuple[float, ...]:
        """The times to first token, of all workers."""
        return tuple(seconds for _, seconds in self.ttfts)

    @property
    def disaggregated_share(self) -> float | None:
        """Fraction of the placed requests in the window, 0 to 1; None without any."""
        placed = self.num_aggregated + self.num_disaggregated
        return self.num_disaggregated / placed if placed else None

    def past(self) -> Share:
        """The part that remains after the end of its process: the totals."""
        return Share(
            arrived_total=self.arrived_total,
            ended_total=self.arrived_total,  # open requests ended with the process
            refusals=self.refusals,
        )


def share_of(
    log: RequestLog,
    refusals: Mapping[tuple[str, str], float],
    now: float,
    *,
    with_rows: bool,
) -> Share:
    """The share of the process that keeps `log`.

    Args:
        now: on the log's clock.
        with_rows: whether to include single requests.
    """
    recent = _recent(log, now)
    placed = Counter(each.placement for each in recent)
    running = list(log.running())
    shown = [*reversed(running), *log.latest()][:MAX_REQUESTS] if with_rows else []
    return Share(
        log.num_open,
        log.arrived_total,
        log.ended_total,
        tuple(
            (each.decode_worker or each.prefill_worker, value)
            for each in recent
            if (value := ttft_s(each)) is not None
        ),
        placed[Placement.AGGREGATED],
        placed[Placement.DISAGGREGATED],
        refusals,
        tuple(flows(running)) if with_rows else (),
        tuple(request_row(each, log, now) for each in shown),
    )


def _recent(log: RequestLog, now: float) -> list[RequestTrace]:
    recent = list(log.running())
    for trace in log.latest():
        if trace.ended_at is not None and trace.ended_at < now - WINDOW_S:
            break
        recent.append(trace)
    return recent


def added(shares: Iterable[Share]) -> Share:
    """Sums several shares."""
    shares = tuple(shares)
    refusals: dict[tuple[str, str], float] = {}
    where: Counter[tuple[str, str, str]] = Counter()
    for share in shares:
        for who, count in share.refusals.items():
            refusals[who] = refusals.get(who, 0.0) + count
        for flow in share.flows:
            where[flow["stage"], flow["prefill"], flow["decode"]] += flow["count"]
    rows = sorted((row for share in shares for row in share.requests), key=_in_order)
    return Share(
        sum(each.num_open for each in shares),
        sum(each.arrived_total for each in shares),
        sum(each.ended_total for each in shares),
        tuple(found for each in shares for found in each.ttfts),
        sum(each.num_aggregated for each in shares),
        sum(each.num_disaggregated for each in shares),
        refusals,
        tuple(
            {"stage": stage, "prefill": prefill, "decode": decode, "count": count}
            for (stage, prefill, decode), count in sorted(where.items())
        ),
        tuple(rows[:MAX_REQUESTS]),
    )


def _in_order(row: Json) -> tuple[bool, float]:
    """Sort key: open requests by arrival, last first; then ended ones by end, last first."""
    if not row["finish"]:
        return False, -row["at"]
    return True, -(row["at"] + row["elapsed_ms"] / 1000)


def share_to_json(share: Share) -> Json:
    """Converts a share to JSON for another process."""
    content = dataclasses.asdict(share)
    content["refusals"] = [[*who, count] for who, count in share.refusals.items()]
    return content


def share_from_json(content: Json) -> Share:
    """Restores a share from `share_to_json`."""
    return Share(
        **{
            **content,
            "refusals": {(stage, reason): count for stage, reason, count in content["refusals"]},
            "ttfts": tuple((worker, seconds) for worker, seconds in content["ttfts"]),
            **{name: tuple(content[name]) for name in ("flows", "requests")},
        }
    )
