"""`kvmesh top`: shows workers and requests live. Tests: tests/unit/cli/test_top.py, tests/e2e."""

from __future__ import annotations

import argparse
import asyncio
import json
import ssl
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from prometheus_client.parser import text_string_to_metric_families
from rich.console import Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from kvmesh.cli.fleet import described, described_empty, state_of, state_of_empty
from kvmesh.cli.https import trust
from kvmesh.cli.probes import http_get
from kvmesh.cli.scheduler_access import (
    LiveFleet,
    NoAnswerError,
    live_fleet,
    scheduler_access,
)
from kvmesh.cli.screen import terminal
from kvmesh.cli.stack_state import gateway_url
from kvmesh.cli.top_flags import parser
from kvmesh.console.sampler import Sampler, WorkerRates, per_second
from kvmesh.console.share import Share
from kvmesh.core.details import FleetWorker
from kvmesh.core.empty_spare import EmptySpare
from kvmesh.core.types import Role

_BAR = 20
_WIDE = 104
"""Number of terminal columns that the table needs with its bars."""
_SCRAPE_S = 2.0
_ROLE_STYLES = {"prefill": "blue", "decode": "yellow", "hybrid": "green", "spare": "dim"}


@dataclass(frozen=True, slots=True)
class GatewayTotals:
    """Counters of a gateway; all zero before the first scrape.

    Attributes:
        ttft_sum_s, ttft_count: sum and count of the TTFT histogram.
    """

    requests_open: float = 0.0
    finished: float = 0.0
    tokens: float = 0.0
    refusals: float = 0.0
    ttft_sum_s: float = 0.0
    ttft_count: float = 0.0


@dataclass(frozen=True, slots=True)
class GatewayRates:
    """Rates of a gateway, per second.

    Attributes:
        ttft_s: mean TTFT of the requests that got their first token meanwhile; None without any.
    """

    requests_open: int
    finished_s: float
    tokens_s: float
    refusals_s: float
    ttft_s: float | None


@dataclass(frozen=True, slots=True)
class Frame:
    """One snapshot of the mesh.

    Attributes:
        rates: rates of each worker.
        gateway: rates of the gateway; None if it does not answer.
        fresh: whether a scheduler is connected.
        kvmanager_connected: whether the scheduler reaches its kvmanager; None: not known.
        empties: workers without a model.
    """

    workers: tuple[FleetWorker, ...]
    rates: dict[str, WorkerRates]
    gateway: GatewayRates | None
    fresh: bool
    kvmanager_connected: bool | None = None
    empties: tuple[EmptySpare, ...] = ()


def main(argv: Sequence[str]) -> int:
    """Shows the mesh until Ctrl-C; exit code 1 if no scheduler answers."""
    arguments = parser().parse_args(argv)
    try:
        return asyncio.run(_run(arguments))
    except NoAnswerError as error:
        print(f"kvmesh top: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 0


async def _run(arguments: argparse.Namespace) -> int:
    url = gateway_url(arguments)
    console = terminal()
    live = None if arguments.once or arguments.json else Live(console=console, screen=True)
    # The named CA is for the schedulers and for the gateway.
    tls = trust(arguments.tls_ca)
    async with live_fleet(scheduler_access(arguments), "kvmesh top") as view:
        camera = Camera(view, url, tls)
        first = await camera.frame()  # rates need two frames
        if live is not None:
            live.start()
            live.update(picture(first, console.width), refresh=True)
        try:
            while True:
                await asyncio.sleep(arguments.interval)
                frame = await camera.frame()
                if arguments.json:
                    print(json.dumps(as_json(frame)), flush=True)
                elif live is None:
                    console.print(picture(frame, console.width))
                else:
                    live.update(picture(frame, console.width), refresh=True)
                if arguments.once:
                    return 0
        finally:
            if live is not None:
                live.stop()


class Camera:
    """Makes frames from the live fleet and the gateway's metrics."""

    def __init__(self, view: LiveFleet, url: str, tls: ssl.SSLContext) -> None:
        self._view = view
        self._url = url
        self._tls = tls
        self._sampler = Sampler()
        self._before: tuple[float, GatewayTotals] | None = None

    async def frame(self) -> Frame:
        """Returns a snapshot of the mesh now."""
        text = await self._scrape()
        now = time.monotonic()
        workers = self._view.workers
        self._sampler.take(workers, Share(), now)
        gateway = None
        if text is None:
            self._before = None
        else:
            totals = gateway_totals(text)
            since, before = self._before or (now, totals)
            gateway = gateway_rates(before, totals, now - since)
            self._before = (now, totals)
        rates = {str(name): each for name, each in self._sampler.worker_rates.items()}
        view = self._view
        connected = view.kvmanager_connected
        return Frame(workers, rates, gateway, view.fresh, connected, view.empty_spares)

    async def _scrape(self) -> str | None:
        metrics = f"{self._url}/metrics"
        status, body = await asyncio.to_thread(http_get, metrics, _SCRAPE_S, self._tls)
        return body if status == 200 else None


def gateway_totals(exposition: str) -> GatewayTotals:
    """Parses a gateway's metrics."""
    sums: dict[str, float] = {}
    for family in text_string_to_metric_families(exposition):
        for sample in family.samples:
            sums[sample.name] = sums.get(sample.name, 0.0) + sample.value
    return GatewayTotals(
        requests_open=sums.get("kvmesh_gateway_requests_open", 0.0),
        finished=sums.get("vllm:request_success_total", 0.0),
        tokens=sums.get("vllm:generation_tokens_total", 0.0),
        refusals=sums.get("kvmesh_gateway_refusals_total", 0.0),
        ttft_sum_s=sums.get("vllm:time_to_first_token_seconds_sum", 0.0),
        ttft_count=sums.get("vllm:time_to_first_token_seconds_count", 0.0),
    )


def gateway_rates(before: GatewayTotals, now: GatewayTotals, elapsed_s: float) -> GatewayRates:
    """Returns the differences per second; all 0 if no time has passed."""
    first_tokens = now.ttft_count - before.ttft_count
    return GatewayRates(
        requests_open=int(now.requests_open),
        finished_s=per_second(now.finished - before.finished, elapsed_s),
        tokens_s=per_second(now.tokens - before.tokens, elapsed_s),
        refusals_s=per_second(now.refusals - before.refusals, elapsed_s),
        ttft_s=(now.ttft_sum_s - before.ttft_sum_s) / first_tokens if first_tokens > 0 else None,
    )


def picture(frame: Frame, columns: int = _WIDE) -> Group:
    """Returns a frame for a terminal of so many columns; a narrow one gets no bars."""
    return Group(_headline(frame), "", _workers(frame, with_bars=columns >= _WIDE))


def _headline(frame: Frame) -> Text:
    gateway = frame.gateway
    if gateway is None:
        line = Text("gateway does not answer", style="yellow")
    else:
        first = "–" if gateway.ttft_s is None else f"{gateway.ttft_s * 1000:.0f} ms"
        line = Text(
            f"{gateway.requests_open} open   {gateway.finished_s:.1f} req/s   "
            f"{gateway.tokens_s:.0f} tokens/s   first token {first}   "
            f"{gateway.refusals_s:.1f} refusals/s"
        )
    if not frame.fresh:
        line.append("   no scheduler: last known fleet", style="yellow")
    elif missing := _missing(frame.workers):
        line.append(f"   {missing}", style="yellow")
    elif frame.kvmanager_connected is False:
        line.append("   no kvmanager: cached prefixes unknown", style="yellow")
    elif slower := [each.info.worker_id for each in frame.workers if each.info.missing_native]:
        line.append(f"   slower, no native code: {', '.join(slower)}", style="yellow")
    return line


def _missing(workers: Sequence[FleetWorker]) -> str:
    """Returns which required workers are missing, in the words of the console's page."""
    roles = {each.info.role for each in workers if state_of(each) == "ready"}
    if not roles:
        return "no worker is ready"
    for role, other in ((Role.PREFILL, Role.DECODE), (Role.DECODE, Role.PREFILL)):
        if roles == {other}:
            return f"no {role.value} worker is ready"
    return ""


def _workers(frame: Frame, *, with_bars: bool) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for heading in ("worker", "state", *(["KV"] if with_bars else [])):
        table.add_column(heading, no_wrap=True)
    for heading in ("used", "cached", "hits", "prefill", "decode", "prompt tok/s", "tok/s"):
        table.add_column(heading, justify="right", no_wrap=True)
    for worker in frame.workers:
        info, load = worker.info, worker.load
        rates = frame.rates.get(info.worker_id, WorkerRates())
        state = state_of(worker)
        used = 1 - load.blocks_free / info.num_blocks
        cached = worker.detail.blocks_cached / info.num_blocks
        table.add_row(
            Text(info.worker_id, style=_ROLE_STYLES[info.role.value]),
            Text(state, style="" if state == "ready" else "yellow"),
            *([bar(used, cached)] if with_bars else []),
            f"{used:.0%}",
            f"{cached:.0%}",
            "–" if rates.hit_share is None else f"{rates.hit_share:.0%}",
            f"{load.prefill_active}/{info.prefill_slots}",
            f"{load.decode_running + load.decode_reserved}/{info.decode_slots}",
            f"{rates.prefill_tokens_s:.0f}",
            f"{rates.decode_tokens_s:.0f}",
        )
    for spare in frame.empties:
        name = Text(spare.worker_id, style=_ROLE_STYLES["spare"])
        table.add_row(name, Text(state_of_empty(spare), style="yellow"))
    return table


def bar(used: float, cached: float) -> Text:
    """Returns a bar with the fractions of KV blocks in use, cached but free, and empty."""
    num_used = round(used * _BAR)
    num_cached = min(round(cached * _BAR), _BAR - num_used)
    text = Text("█" * num_used)
    text.append("▒" * num_cached, style="cyan")
    text.append("·" * (_BAR - num_used - num_cached), style="dim")
    return text


def as_json(frame: Frame) -> dict[str, Any]:
    """Returns a frame as JSON values."""
    gateway = frame.gateway
    return {
        "fresh": frame.fresh,
        "kvmanager": frame.kvmanager_connected,
        "gateway": None
        if gateway is None
        else {
            "requests_open": gateway.requests_open,
            "finished_s": round(gateway.finished_s, 2),
            "tokens_s": round(gateway.tokens_s, 1),
            "refusals_s": round(gateway.refusals_s, 2),
            "ttft_s": gateway.ttft_s,
        },
        "workers": [
            described(worker)
            | {
                "prefill_tokens_s": round(rates.prefill_tokens_s, 1),
                "decode_tokens_s": round(rates.decode_tokens_s, 1),
                "hit_share": rates.hit_share,
            }
            for worker in frame.workers
            for rates in (frame.rates.get(worker.info.worker_id, WorkerRates()),)
        ]
        + [described_empty(spare) for spare in frame.empties],
    }
