from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from kvmesh.core.errors import ConfigError
from kvmesh.sim.trace import matched_blocks, read_trace, uncached_lengths

ROWS: list[dict[str, Any]] = [
    {"t_ms": 2000, "input_len": 1500, "output_len": 5, "hash_ids": [0, 1, 3]},
    {"t_ms": 0, "input_len": 1100, "output_len": 7, "hash_ids": [0, 1, 2]},
    {
        "t_ms": 3000,
        "input_len": 512,
        "output_len": 1,
        "hash_ids": [9],
        "session": "s",
        "turn": 2,
        "think_ms": 1500,
    },
]


def write(path: Path, rows: list[Any]) -> Path:
    text = "".join(json.dumps(row) + "\n" for row in rows)
    path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())
    return path


@pytest.mark.parametrize("name", ["t.jsonl", "t.jsonl.gz"])
def test_rows_by_arrival(tmp_path: Path, name: str) -> None:
    requests = read_trace(write(tmp_path / name, ROWS))
    assert [request.arrival_s for request in requests] == [0, 2, 3]
    assert requests[0].full_ids == (0, 1)
    assert (requests[2].session, requests[2].turn, requests[2].think_s) == ("s", 2, 1.5)
    assert requests[2].full_ids == (9,)


def test_mooncakes_names(tmp_path: Path) -> None:
    row = {"timestamp": 27482, "input_length": 700, "output_length": 52, "hash_ids": [46, 47]}
    [request] = read_trace(write(tmp_path / "t", [row]))
    assert (request.arrival_s, request.input_tokens, request.output_tokens) == (27.482, 700, 52)
    assert request.full_ids == (46,)


def test_a_limit(tmp_path: Path) -> None:
    assert len(read_trace(write(tmp_path / "t", ROWS), limit=2)) == 2


def test_prefixes_match_up_to_the_first_new_block(tmp_path: Path) -> None:
    requests = read_trace(write(tmp_path / "t", ROWS))
    assert [hits for _, hits in matched_blocks(requests)] == [0, 2, 0]
    lengths = uncached_lengths(requests)
    assert lengths.mean == pytest.approx((1100 + 476 + 512) / 3)


@pytest.mark.parametrize(
    "row",
    [
        [],
        {**ROWS[0], "hash_ids": [0]},
        {**ROWS[0], "hash_ids": ["a", "b", "c"]},
        {**ROWS[0], "input_len": 0},
        {key: value for key, value in ROWS[0].items() if key != "t_ms"},
    ],
)
def test_a_wrong_line_is_named(tmp_path: Path, row: Any) -> None:
    with pytest.raises(ConfigError, match=":2"):
        read_trace(write(tmp_path / "t", [ROWS[1], row]))


def test_files_that_are_none(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        read_trace(tmp_path / "absent")
    with pytest.raises(ConfigError, match="no request"):
        read_trace(write(tmp_path / "empty", []))
    broken = tmp_path / "t.gz"
    broken.write_bytes(b"not gzip")
    with pytest.raises(ConfigError, match="gzip"):
        read_trace(broken)
    line = json.dumps(ROWS[1]) + "\n"
    broken.write_bytes(gzip.compress(line.encode() * 1000)[:-20])
    with pytest.raises(ConfigError, match="cannot be read"):
        read_trace(broken)
    picture = tmp_path / "picture"
    picture.write_bytes(b"\x89PNG\xff")
    with pytest.raises(ConfigError, match="cannot be read"):
        read_trace(picture)
