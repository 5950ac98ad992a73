"""The cells of a device, computed on the CPU: the same steps, uncaptured."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from benchmarks import engine_device
from benchmarks.engine_report import markdown
from benchmarks.random_llama import Shape, write_checkpoint


def test_cells_with_graphs_and_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(engine_device, "_COPY_BYTES", 1 << 12)
    monkeypatch.setattr(engine_device, "_MATMUL", 16)
    shape = Shape("tiny", hidden=32, layers=1, heads=2, kv_heads=1, intermediate=32, vocab=50)
    folder = write_checkpoint(shape, tmp_path, 0)
    options = argparse.Namespace(batch=[1, 3], context=20, repeats=1, threads=1)
    rows = engine_device.device_rows(shape, folder, "float32", options, "cpu")
    assert [row["cell"] for row in rows] == ["cpu decode 1", "cpu decode 3"]
    assert all(set(r["tokens_per_s"]) == {"kvmesh", "kvmesh without graphs", "floor"} for r in rows)
    assert "cpu decode 3: " in capsys.readouterr().out
    machine = {"processor": "CPU", "threads": 1, "cores": 2}
    page = markdown(
        {"date": "", "commit": "", "machine": machine, "context": 20, "rows": rows, "targets": []}
    )
    assert "| floor | kvmesh without graphs |" in page
