from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.tier_copies import Blocks, copy_rows
from benchmarks.tiers import hits, targets

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
