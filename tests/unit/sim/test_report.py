from __future__ import annotations

import json
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest

from kvmesh.cli.__main__ import main
from kvmesh.core.config import child_environment
from kvmesh.policy.pdserve import TimeoutTier
from kvmesh.sim.plots import Series, png, write_html
from kvmesh.sim.report import summarize, summary_record, table
from kvmesh.sim.scenario import Objectives
from kvmesh.sim.simulation import simulate
from tests.unit.sim.examples import scenario, trace


class TestSummary:
    def test_by_hand(self) -> None:
        """Two prompts of 1025 tokens ten seconds apart; the second finds the first one's KV."""
        made = scenario(trace(0.0, 2, 3), trace(10.0, 2, 3), sample_s=1.0)
        summary = summarize(simulate(made))
        assert (summary.success, summary.num_requests, summary.refusals) == (1.0, 2, {})
        assert summary.goodput == pytest.approx(0.2)
        assert summary.hit_rate == pytest.approx(1024 / 2050)
        assert summary.ttft_p99_s == pytest.approx(0.01 + 0.99 * 1.015)
        assert summary.ttft_p50_s == pytest.approx(0.01 + 0.5 * 1.015)

    def test_goodput_needs_both_objectives(self) -> None:
        late = Objectives((TimeoutTier(1 << 62, 30.0),), tpot_s=0.001)
        summary = summarize(simulate(scenario(trace(0.0), trace(10.0), objectives=late)))
        assert (summary.success, summary.goodput) == (1.0, 0.0)

    def test_refusals_are_counted_by_reason(self) -> None:
        summary = summarize(simulate(scenario(trace(0.0), trace(1.0, blocks=64))))
        assert summary.refusals == {"too_long": 1}
        assert summary.success == 0.5

    def test_one_prefill_worker_of_two_busy_is_a_cv_of_one(self) -> None:
        made = scenario(trace(0.0, 20), fleet="home:d:prefill:2,home:d:decode:1", sample_s=1.0)
        assert summarize(simulate(made)).cv == pytest.approx(1.0)

    def test_table_and_record(self) -> None:
        result = simulate(scenario(trace(0.0), trace(1.0, blocks=64)))
        lines = table([("mine", summarize(result))]).splitlines()
        assert len({len(line) for line in lines}) == 1
        assert "too_long:1" in lines[2]
        record = json.loads(json.dumps(summary_record(result), allow_nan=False))
        assert record["summary"]["system"] == "cache_load"


class Links(HTMLParser):
    """Collects what a page refers to."""

    def __init__(self) -> None:
        super().__init__()
        self.sources: list[str] = []
        self.closed: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.sources += [value or "" for name, value in attrs if name in {"src", "href"}]

    def handle_endtag(self, tag: str) -> None:
        self.closed.append(tag)


def test_plots_and_a_page_that_stands_alone(tmp_path: Path) -> None:
    runs = [Series.of("a", simulate(scenario(trace(), sample_s=0.5)))]
    assert png(runs).startswith(b"\x89PNG")
    path = tmp_path / "run.html"
    write_html(runs, "a < b", "<title>", path)
    page = Links()
    page.feed(path.read_text())
    assert len(page.sources) == 1
    assert page.sources[0].startswith("data:image/png;base64,")
    assert page.closed[-2:] == ["body", "html"]
    assert "&lt;title&gt;" in path.read_text()
    assert "a &lt; b" in path.read_text()


class TestCommand:
    FAST = ("--requests", "40", "--rate", "5", "--fleet", "home:a100:prefill:2,home:a100:decode:2")

    def test_several_systems_and_all_files(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        files = [str(tmp_path / name) for name in ("r.json", "r.png", "r.html")]
        flags = ["--json", files[0], "--png", files[1], "--html", files[2]]
        assert main(["simulate", *self.FAST, "--system", "kvmesh,round_robin", *flags]) == 0
        shown = capsys.readouterr().out
        assert "| kvmesh " in shown
        assert "| round_robin " in shown
        assert "per second" in shown
        assert set(json.loads(Path(files[0]).read_text())) == {"kvmesh", "round_robin"}

    def test_equal_flags_give_equal_results(self, tmp_path: Path) -> None:
        paths = [tmp_path / "a.json", tmp_path / "b.json"]
        for path in paths:
            made = ["--turns", "3", "--shared", "2", "--burst", "4", "--closed-loop"]
            assert main(["simulate", *self.FAST, *made, "--seed", "5", "--json", str(path)]) == 0
        assert paths[0].read_text() == paths[1].read_text()

    def test_results_do_not_depend_on_the_process(self, tmp_path: Path) -> None:
        """Sets of names are ordered by a hash that differs from process to process."""
        fleet = "home:a100:prefill:24,home:a100:decode:16"
        flags = ["--requests", "150", "--rate", "60", "--shared", "3", "--fleet", fleet]
        written = []
        for hash_seed in ("1", "2"):
            path = tmp_path / f"{hash_seed}.json"
            subprocess.run(
                [sys.executable, "-m", "kvmesh.cli", "simulate", *flags, "--json", str(path)],
                env=child_environment({"PYTHONHASHSEED": hash_seed}),
                check=True,
                capture_output=True,
            )
            written.append(path.read_text())
        assert written[0] == written[1]

    def test_a_trace(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        row = {"t_ms": 0, "input_len": 600, "output_len": 5, "hash_ids": [0, 1]}
        path = tmp_path / "t.jsonl"
        path.write_text((json.dumps(row) + "\n") * 3)
        assert main(["simulate", "--trace", str(path), "--load", "2"]) == 0
        assert "100.0%" in capsys.readouterr().out

    @pytest.mark.parametrize(
        ("flags", "message"),
        [
            (("--system", "none"), "no system 'none'"),
            (("--system", "kvmesh,none"), "no system 'none'"),
            (("--failures", "1:kill:99"), "worker 99"),
            (("--burst", "0.5"), "--burst"),
            (("--fleet", "x"), "CLUSTER"),
            (("--failures", "x"), "SECONDS"),
            (("--trace", "/nowhere"), "/nowhere"),
        ],
    )
    def test_wrong_flags_are_named(
        self, flags: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert main(["simulate", *self.FAST, *flags]) == 1
        assert message in capsys.readouterr().err

    @pytest.mark.parametrize(
        "flags",
        [("--rate", "0"), ("--burst", "nan"), ("--jitter", "-1"), ("--json", "/nowhere/run.json")],
    )
    def test_flags_that_are_wrong_by_themselves_are_told_before_the_run(
        self, flags: tuple[str, ...], capsys: pytest.CaptureFixture[str]
    ) -> None:
        with pytest.raises(SystemExit) as caught:
            main(["simulate", *self.FAST, *flags])
        assert caught.value.code == 2
        assert flags[0] in capsys.readouterr().err
