from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.fetch_workers import FirstToken
from benchmarks.tier_copies import Blocks, copy_rows
from benchmarks.tier_split import Split, splits
from benchmarks.tiers import WAYS, first_row, hits, targets

BLOCKS = Blocks(num_blocks=70, block_bytes=8192, repeats=2, seed=0)
FIO = """#!/bin/sh
case "$*" in
  --version) echo fio-3.99 ;;
  *--rw=read*--direct=1*) echo '{"jobs": [{"read": {"bw_bytes": 2000000000}}]}' ;;
  *) exit 1 ;;
esac
"""


def test_both_tiers_are_measured_against_the_best_that_the_machine_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fio = tmp_path / "bin" / "fio"
    fio.parent.mkdir()
    fio.write_text(FIO)
    fio.chmod(0o700)
    monkeypatch.setenv("PATH", str(fio.parent))
    host, disk = copy_rows(BLOCKS, tmp_path)
    assert (host["tier"], disk["tier"]) == ("host", "disk")
    assert host["of_best"] > 0
    assert disk["against"] == "fio-3.99, sequential read"
    assert disk["of_best"] == round(disk["loaded_gb_s"]["median"] / 2, 3) > 0


def test_without_fio_nothing_is_said_of_the_disk_s_best(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    host, disk = copy_rows(BLOCKS, tmp_path)
    assert disk["against"] == "no fio on PATH"
    assert disk["loaded_gb_s"]["median"] > 0
    told = [each.as_row() for each in targets([{"what": "speed", **row} for row in (host, disk)])]
    assert [each["met"] is None for each in told] == [True, True, False, True, True]


def test_targets_take_the_least(tmp_path: Path) -> None:
    trace = tmp_path / "sessions.jsonl"
    # Twelve sessions in turn, each of 100 blocks: 1,200 blocks of 2,560 are found again.
    rows = [
        f'{{"t_ms": {turn * 100 + session}, "input_len": 51200, "output_len": 1,'
        f' "session": "{session}", "hash_ids": {list(range(session * 100, session * 100 + 100))}}}'
        for turn in range(3)
        for session in range(12)
    ]
    trace.write_text("\n".join(rows))
    found = hits(trace)
    alone = {row["tier_of_pool"]: row["of_infinite"] for row in found if row["workers"] == 1}
    assert alone[0] == alone[1] == 0.0
    assert alone[10] == 1.0
    found[-1]["of_infinite"] = 0.5
    told = [target.as_row() for target in targets(found)]
    assert [each["met"] for each in told] == [None] * 4 + [False]


Event = tuple[str, float, dict[str, Any]]
"""Name, time in milliseconds, attributes."""


def span(request_id: str, name: str, *events: Event) -> str:
    """A line of a worker's file."""
    told = [
        {"name": event, "time_ns": 10**18 + int(1e6 * at_ms), "attributes": attributes}
        for event, at_ms, attributes in events
    ]
    return json.dumps({"name": name, "attributes": {"request_id": request_id}, "events": told})


def test_the_time_of_a_loaded_prefix_is_split_by_the_worker_s_spans() -> None:
    accepted: Event = ("accepted", 1.0, {})
    loaded: Event = ("prefix_load", 9.0, {"seconds": 0.0075})
    lines = [
        span("r1", "prefill.request", accepted, ("first_token", 90.0, {})),
        span("r2", "prefill.request", accepted, loaded, ("first_token", 60.0, {})),
        span("r2", "decode.request", ("reserved", 0.5, {})),
    ]
    found = splits("\n".join(lines))
    assert found == {"r2": Split(loading_ms=7.5, computing_ms=51.0)}
    tokens = {name: [FirstToken("r1", 7, 95.0, 0)] for name in WAYS}
    tokens["loaded"] = [FirstToken("r2", 7, 62.5, 4096)]
    row = first_row("host", 4096, tokens, found)
    parts = [row[f"{name}_ms"]["median"] for name in ("loaded", "loading", "computing", "rest")]
    assert parts == [62.5, 7.5, 51.0, 4.0]
