from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvmesh.sim.bench import main, ratio


def test_eq_1_chooses_the_best_split() -> None:
    """P/D-Serve 10 (a): the choice of eq. 1 against every other split of eight instances."""
    done = ratio(0.5)
    assert [claim.held for claim in done.claims] == [True, True]
    assert len(done.runs) == 7


@pytest.mark.slow
def test_all_experiments_write_their_results(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = tmp_path / "trace.jsonl"
    rows = [
        {"t_ms": 900 * n, "input_len": 1300, "output_len": 20, "hash_ids": [0, n % 5 + 1, 99 + n]}
        for n in range(60)
    ]
    trace.write_text("".join(json.dumps(row) + "\n" for row in rows))
    out = tmp_path / "results"
    assert main(["--out", str(out), "--size", "0.05", "--trace", str(trace)]) == 0
    record = json.loads((out / "policies.json").read_text())
    assert len(record) == 8
    assert "Composition: trace" in record
    assert all(each["claims"] for each in record.values())
    assert (out / "policies.md").read_text().count("\n## ") == 8
    assert len(list(out.glob("*.html"))) == 6
    assert "## FlowKV" in capsys.readouterr().out
