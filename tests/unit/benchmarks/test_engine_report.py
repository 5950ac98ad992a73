from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.engine import share_of_reading
from benchmarks.engine_floor import WAYS, Limits, floor_tokens_per_s, weight_bytes
from benchmarks.engine_report import SHARE_OF_READING, WEIGHTS_READ, markdown, targets
from benchmarks.random_llama import SHAPES
from kvmesh.cli.bench_report import write_result

LIMITS = {
    "0.5B bfloat16": {"step_overhead_share": 0.5},
    "110M bfloat16": {"step_overhead_share": 0.02},
}


def row(model: str, cell: str, **tokens_per_s: float) -> dict[str, Any]:
    return {"model": model, "dtype": "bfloat16", "cell": cell, "tokens_per_s": tokens_per_s}


ROWS = [
    row("0.5B", "prefill 512", kvmesh=100.0, transformers=80.0),
    row("0.5B", "decode 1", kvmesh=15.0, transformers=10.0, **{WEIGHTS_READ: 20.0})
    | {SHARE_OF_READING: 0.75},
    row("110M", "decode 8", kvmesh=90.0, transformers=70.0, openvino=160.0),
]


def test_the_lowest_ratio_counts() -> None:
    found = {target["name"]: target for target in targets(ROWS, LIMITS)}
    assert found["every cell: times transformers"]["value"] == 1.25
    assert found["every cell: times transformers"]["met"]
    assert found["110M decode: times openvino"]["value"] == pytest.approx(0.562, abs=1e-3)
    assert not found["110M decode: times openvino"]["met"]
    assert found["0.5B bfloat16 decode 1: share of weight streaming"]["value"] == 0.75
    shares = [name for name in found if "batching and sampling" in name]
    assert shares == ["110M bfloat16 batch 8: step loop, batching and sampling, share of a step"]
    assert found[shares[0]]["met"]
    assert "prefill: times openvino" not in found, "not measured"


def test_floor_is_the_slower_of_products_and_memory() -> None:
    shape = SHAPES["110M"]
    weights = shape.layer_weights + shape.head_weights
    slow_memory = Limits(flops=1e30, read_bytes_per_s=1e9, value_bytes=2)
    assert floor_tokens_per_s(shape, slow_memory, 1, 1, 0) == pytest.approx(1e9 / (2 * weights))
    assert weight_bytes(shape, slow_memory) == 2 * weights
    with_context = floor_tokens_per_s(shape, slow_memory, 1, 1, 100)
    assert with_context == pytest.approx(1e9 / (2 * (weights + 100 * shape.kv_values)))
    slow_products = Limits(flops=1e9, read_bytes_per_s=1e30, value_bytes=2)
    assert floor_tokens_per_s(shape, slow_products, 512, 1, 0) < 1e9 / (2 * shape.layer_weights)


def test_result_is_saved_twice(tmp_path: Path) -> None:
    result = {
        "date": "2026-01-01",
        "commit": "",
        "machine": {"processor": "CPU", "threads": 1, "cores": 2},
        "context": 512,
        "rows": ROWS,
        "targets": targets(ROWS, LIMITS),
    }
    write_result(result, markdown(result), tmp_path / "sub" / "engine.json")
    assert json.loads((tmp_path / "sub" / "engine.json").read_text())["rows"] == ROWS
    page = (tmp_path / "sub" / "engine.md").read_text()
    assert "| 110M | bfloat16 | decode 8 | 90 | 70 | 160 |  |" in page


def test_the_share_of_reading_is_that_of_each_turn() -> None:
    # Memory was twice as fast in the last two turns; medians over all would give 1.0 / 2.4.
    turns = {"kvmesh": [2.4, 2.4, 2.4, 1.2, 1.2]}
    turns |= {way: [2.0, 2.0, 1.0, 1.0, 1.0] for way in WAYS}
    turns[WAYS[1]] = [1.8, 1.8, 1.8, 0.9, 0.9]
    assert share_of_reading(turns) == pytest.approx(0.75)


def test_with_avx2_alone_openvino_is_to_be_reached_in_every_cell() -> None:
    row = {"model": "0.5B", "dtype": "float32"}
    rows = [
        {**row, "cell": "prefill 512", "tokens_per_s": {"kvmesh": 95.0, "openvino": 100.0}},
        {**row, "cell": "decode 8", "tokens_per_s": {"kvmesh": 110.0, "openvino": 100.0}},
    ]
    found = {each["name"]: each["met"] for each in targets(rows, {}, only_avx2=True)}
    assert found == {"prefill: times openvino": False, "decode: times openvino": True}
