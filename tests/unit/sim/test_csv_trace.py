from __future__ import annotations

import csv
import gzip
import io
import math
from pathlib import Path

import pytest

from kvmesh.cli.simulate import main, objectives
from kvmesh.core.errors import ConfigError
from kvmesh.policy.pdserve import timeout_s
from kvmesh.sim.trace import matched_blocks, read_trace

AZURE_2023 = """\
TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:17:03.9799600,4808,10
2023-11-16 18:17:04.0319600,110,27
2023-11-16 18:18:04.0319600,4808,10
"""
AZURE_2024 = """\
TIMESTAMP,ContextTokens,GeneratedTokens
2024-05-10 00:00:00.009930+00:00,2162,5
2024-05-10 00:00:00.509930+00:00,2399,6
"""
BURST_GPT = """\
Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type
5,ChatGPT,472,18,490,Conversation log
45,ChatGPT,1087,230,1317,Conversation log
1106,ChatGPT,0,0,0,Conversation log
118,GPT-4,417,276,693,API log
"""


def lengths(path: Path) -> list[tuple[float, int, int]]:
    requests = read_trace(path)
    return [(round(r.arrival_s, 3), r.input_tokens, r.output_tokens) for r in requests]


def written(folder: Path, text: str, name: str = "trace.csv") -> Path:
    path = folder / name
    path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())
    return path


@pytest.mark.parametrize("name", ["t.csv", "t.csv.gz"])
@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (AZURE_2023, [(0.0, 4808, 10), (0.052, 110, 27), (60.052, 4808, 10)]),
        (AZURE_2024, [(0.0, 2162, 5), (0.5, 2399, 6)]),
        (BURST_GPT, [(0.0, 472, 18), (40.0, 1087, 230), (113.0, 417, 276)]),
        ("\ufeff" + BURST_GPT, [(0.0, 472, 18), (40.0, 1087, 230), (113.0, 417, 276)]),
    ],
    ids=["azure 2023", "azure 2024", "burstgpt", "byte order mark"],
)
def test_published_files_are_read_as_they_are(
    tmp_path: Path, name: str, text: str, expected: list[tuple[float, int, int]]
) -> None:
    assert lengths(written(tmp_path, text, name)) == expected


def test_no_two_prompts_share_a_block(tmp_path: Path) -> None:
    requests = read_trace(written(tmp_path, AZURE_2023))
    assert [len(each.hash_ids) for each in requests] == [10, 1, 10]
    assert [hits for _, hits in matched_blocks(requests)] == [0, 0, 0]


def test_a_limit_counts_requests(tmp_path: Path) -> None:
    assert len(read_trace(written(tmp_path, BURST_GPT), limit=2)) == 2


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a,b\n1,2\n", r":1: columns a, b are those of no known trace; known are .*ContextTokens"),
        (AZURE_2023 + "soon,1,2\n", r":5: TIMESTAMP 'soon' is not a time"),
        (BURST_GPT + "nan,x,1,2,3,y\n", r":6: Timestamp 'nan' is not a time"),
        (AZURE_2023 + "2023-11-16 18:17:03,-1,2\n", r":5: ContextTokens '-1' is not a number of"),
        (AZURE_2023 + "2023-11-16 18:17:03,1\n", r":5: GeneratedTokens '' is not a number of"),
        (BURST_GPT.splitlines()[0] + "\n", "no request"),
        ("{nonsense\n", ":1: Expecting property name"),
    ],
)
def test_what_cannot_be_read_is_named(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_trace(written(tmp_path, text))


def test_limits_of_goodput() -> None:
    assert objectives(0, 100).timeouts[0].timeout_s == 5.0
    strict = objectives(250, 30)
    assert strict.tpot_s == 0.03
    assert strict.itl_s == math.inf
    assert objectives(0, 100, 40).itl_s == 0.04
    assert {timeout_s(tokens, strict.timeouts) for tokens in (1, 100_000)} == {0.25}


def test_the_command_reads_it_with_limits_and_writes_a_table(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace, table = written(tmp_path, AZURE_2023), tmp_path / "out.csv"

    def goodput(*limits: str) -> list[float]:
        flags = ["--trace", str(trace), "--system", "kvmesh,cache_load", "--csv", str(table)]
        assert main([*flags, *limits]) == 0
        rows = list(csv.DictReader(io.StringIO(table.read_text())))
        assert [row["run"] for row in rows] == ["kvmesh", "cache_load"]
        assert {row["num_requests"] for row in rows} == {"3"}
        return [float(row["goodput"]) for row in rows]

    assert goodput() == pytest.approx([3 / 60] * 2, rel=0.05)
    assert goodput("--tpot-ms", "0.001") == [0.0, 0.0]
    assert goodput("--ttft-ms", "0.001") == [0.0, 0.0]
    assert "goodput/s" in capsys.readouterr().out
