from __future__ import annotations

import dataclasses
import io

import pytest
from rich.console import Console

from kvmesh.cli.top import Frame, as_json, bar, gateway_rates, gateway_totals, picture
from kvmesh.console.sampler import WorkerRates
from kvmesh.core.details import WorkerDetail
from kvmesh.core.empty_spare import Assignment, EmptySpare
from kvmesh.core.types import FinishReason, Role, WorkerId
from services.gateway.metrics import GatewayMetrics
from tests.unit.console.examples import fleet_worker


def exposition(metrics: GatewayMetrics) -> str:
    from prometheus_client import CollectorRegistry, generate_latest

    registry = CollectorRegistry()
    registry.register(metrics)
    return generate_latest(registry).decode()


def test_the_gateway_s_own_metrics_are_understood() -> None:
    metrics = GatewayMetrics()
    one, another = metrics.of("m"), metrics.of("n")
    before = gateway_totals(exposition(metrics))
    metrics.requests_open.inc()
    one.ttft_s.observe(0.25)
    one.generation_tokens.inc(30)
    another.generation_tokens.inc(10)
    metrics.refused("busy", "prefill")
    metrics.refused("no_slots", "decode")
    one.finished(FinishReason.STOP)
    rates = gateway_rates(before, gateway_totals(exposition(metrics)), 2.0)
    assert (rates.requests_open, rates.finished_s, rates.tokens_s) == (1, 0.5, 20.0)
    assert (rates.refusals_s, rates.ttft_s) == (1.0, 0.25)


def test_no_time_and_no_request_are_no_error() -> None:
    nothing = gateway_totals("")
    rates = gateway_rates(nothing, nothing, 0.0)
    assert (rates.finished_s, rates.ttft_s) == (0.0, None)


def shown(frame: Frame, columns: int = 140) -> str:
    console = Console(file=io.StringIO(), width=columns)
    console.print(picture(frame, columns))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_a_picture_names_what_is_wrong() -> None:
    cordoned = dataclasses.replace(
        fleet_worker("d0", Role.DECODE, draining=True), detail=WorkerDetail(cordoned=True)
    )
    text = shown(Frame((fleet_worker("p0"), cordoned), {}, None, fresh=False))
    assert "gateway does not answer" in text
    assert "no scheduler" in text
    assert "cordoned" in text
    assert "p0" in text


@pytest.mark.parametrize(
    ("roles", "said"),
    [
        ([Role.PREFILL, Role.DECODE], ""),
        ([Role.HYBRID], ""),
        ([Role.DECODE], "no prefill worker is ready"),
        ([Role.PREFILL], "no decode worker is ready"),
        ([], "no worker is ready"),
    ],
)
def test_a_picture_names_who_is_missing(roles: list[Role], said: str) -> None:
    ready = tuple(fleet_worker(f"w{n}", role) for n, role in enumerate(roles))
    away = fleet_worker("away", Role.HYBRID, draining=True)
    text = shown(Frame((*ready, away), {}, None, fresh=True))
    assert (said in text) if said else ("is ready" not in text)


def test_a_picture_tells_of_a_kvmanager_that_is_gone() -> None:
    workers = (fleet_worker("w", Role.HYBRID),)
    gone = Frame(workers, {}, None, fresh=True, kvmanager_connected=False)
    assert "no kvmanager" in shown(gone)
    assert as_json(gone)["kvmanager"] is False
    assert "no kvmanager" not in shown(Frame(workers, {}, None, fresh=True))


def test_a_picture_names_who_runs_without_native_code() -> None:
    worker = fleet_worker("h0", Role.HYBRID)
    slow = dataclasses.replace(
        worker, info=dataclasses.replace(worker.info, missing_native=("transfer",))
    )
    assert "slower" not in shown(Frame((worker,), {}, None, fresh=True))
    frame = Frame((slow,), {}, None, fresh=True)
    assert "slower, no native code: h0" in shown(frame)
    assert as_json(frame)["workers"][0]["missing_native"] == ["transfer"]


def test_a_narrow_terminal_cuts_nothing() -> None:
    workers = (fleet_worker("prefill-0"), fleet_worker("decode-10", Role.DECODE, draining=True))
    narrow = shown(Frame(workers, {}, None, fresh=True), 80)
    assert "…" not in narrow
    assert all(word in narrow for word in ("decode-10", "draining", "prompt tok/s"))
    assert "·" in shown(Frame(workers, {}, None, fresh=True), 110)


def test_json_has_the_same() -> None:
    rates = WorkerRates(10.0, 2.0, 0.5)
    row = as_json(Frame((fleet_worker("p0"),), {"p0": rates}, None, fresh=True))["workers"][0]
    assert (row["worker_id"], row["prefill_tokens_s"], row["hit_share"]) == ("p0", 10.0, 0.5)


@pytest.mark.parametrize(
    ("used", "cached", "drawn"),
    [
        (0.0, 0.0, "·" * 20),
        (0.5, 0.25, "█" * 10 + "▒" * 5 + "·" * 5),
        (0.99, 0.5, "█" * 20),
        (1.0, 0.0, "█" * 20),
    ],
)
def test_a_bar_is_always_whole(used: float, cached: float, drawn: str) -> None:
    assert bar(used, cached).plain == drawn


def test_spares_without_a_model_are_shown() -> None:
    like = Assignment.like(fleet_worker("d0", Role.DECODE).info, "why")
    waits = EmptySpare(WorkerId("e0"), 1, "east", "fake")
    loads = dataclasses.replace(waits, worker_id=WorkerId("e1"), assignment=like)
    frame = Frame((fleet_worker("p0"),), {}, None, fresh=True, empties=(waits, loads))
    lines = [line.split() for line in shown(frame).splitlines()]
    assert ["e0", "empty"] in lines
    assert ["e1", "loading"] in lines
    told = [(each["worker_id"], each["state"]) for each in as_json(frame)["workers"]]
    assert told[1:] == [("e0", "empty"), ("e1", "loading")]
