from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path

import pytest

from kvmesh.cli.__main__ import main
from kvmesh.core.errors import ConfigError
from kvmesh.policy.prfaas import Hardware, Limit, operating_point, optimum, search
from kvmesh.sim.plan import Plan, make_plan, plan_record, plan_text
from kvmesh.sim.profile import gbps
from kvmesh.sim.profile_file import load_profile

PROFILE = load_profile("prfaas")
CASE = Hardware(num_remote=4, num_local=8, egress_bytes_per_s=gbps(100))


def case_plan(**changes: float) -> Plan:
    hardware = dataclasses.replace(CASE, **changes)  # type: ignore[arg-type]
    return make_plan(PROFILE.serving, PROFILE.plan.lengths, hardware)


class TestTable6:
    """PrfaaS 4: 4 H200 instances beside 8 H20 instances against 12 H20 instances.

    The profile interpolates Table 5, so 3 % on rates and 5 % on the threshold are allowed.
    """

    def test_prfaas_column(self) -> None:
        best = case_plan().best
        assert (best.num_prefill, best.num_decode) == (3, 5)
        assert 19_200 <= best.threshold_tokens <= 19_900
        assert 3.14 <= best.rate <= 3.30
        assert 0.485 <= best.share_remote <= 0.50
        assert 11.9 <= best.egress_bytes_per_s * 8 / 1e9 <= 12.5
        assert best.remote_rate == pytest.approx(1.61, rel=0.03)
        assert best.local_rate == pytest.approx(1.64, rel=0.03)
        assert best.decode_rate == pytest.approx(3.91, rel=0.001)
        assert best.long_tokens == pytest.approx(44 * 1024, rel=0.02)

    def test_homogeneous_column(self) -> None:
        best = case_plan(num_remote=0, num_local=12).best
        assert (best.num_prefill, best.num_decode) == (9, 3)
        assert best.local_rate == pytest.approx(2.11, rel=0.01)
        assert best.decode_rate == pytest.approx(2.35, rel=0.01)
        assert best.rate == pytest.approx(2.11, rel=0.01)
        assert math.isinf(best.threshold_tokens) or best.share_remote == 0

    def test_equation_1_of_pdserve_agrees_where_all_prompts_stay_at_home(self) -> None:
        plan = case_plan(num_remote=0, num_local=12)
        assert plan.ratio is not None
        assert (plan.ratio.num_prefill, plan.ratio.num_decode) == (9, 3)
        assert plan.ratio.rate == pytest.approx(plan.best.rate, rel=0.001)
        assert plan_record(plan)["ratio"] == dataclasses.asdict(plan.ratio)
        assert "P/D-Serve eq. 1 9 prefill, 3 decode, 2.1" in plan_text(plan)
        assert case_plan(num_local=1).ratio is None

    def test_naive_heterogeneous_column(self) -> None:
        naive = operating_point(PROFILE.serving, PROFILE.plan.lengths, CASE, 0.0, num_prefill=0)
        assert naive.remote_rate == pytest.approx(2.45, rel=0.03)
        assert naive.decode_rate == pytest.approx(6.25, rel=0.001)
        assert naive.rate == pytest.approx(2.45, rel=0.03)

    def test_gains(self) -> None:
        rate = case_plan().best.rate
        assert rate / case_plan(num_remote=0, num_local=12).best.rate == pytest.approx(
            1.54, rel=0.03
        )
        naive = operating_point(PROFILE.serving, PROFILE.plan.lengths, CASE, 0.0, num_prefill=0)
        # Both columns carry the interpolation's error, in opposite directions.
        assert rate / naive.rate == pytest.approx(1.32, rel=0.05)

    def test_the_paper_s_own_threshold_is_as_good(self) -> None:
        point = operating_point(PROFILE.serving, PROFILE.plan.lengths, CASE, 19_400, 3)
        assert point.rate == pytest.approx(3.24, rel=0.03)

    def test_rate_is_sharp_in_the_threshold(self) -> None:
        rates = [
            operating_point(PROFILE.serving, PROFILE.plan.lengths, CASE, t, 3).rate
            for t in (18_000, 19_640, 25_000)
        ]
        assert rates[1] > rates[0] > rates[2]
        assert rates[2] == pytest.approx(2.35, rel=0.05)

    def test_a_thin_link_raises_the_threshold_and_moves_instances_to_prefill(self) -> None:
        plenty = case_plan().best
        thin = case_plan(egress_bytes_per_s=gbps(6)).best
        assert thin.threshold_tokens > plenty.threshold_tokens
        assert thin.num_prefill > plenty.num_prefill
        assert thin.rate < plenty.rate
        assert thin.egress_bytes_per_s <= gbps(6) * (1 + 1e-9)


def test_without_decode_instances_nothing_is_served() -> None:
    with pytest.raises(ConfigError, match="too few"):
        case_plan(num_remote=0, num_local=1)


def test_the_record_is_json() -> None:
    record = plan_record(case_plan(num_remote=0))
    assert json.loads(json.dumps(record, allow_nan=False))["threshold_tokens"] is None


def test_ties_leave_the_most_room() -> None:
    # Decode limits over a range of thresholds.
    points = search(PROFILE.serving, PROFILE.plan.lengths, CASE, splits=[5])
    best = optimum(points)
    assert best.limit is Limit.DECODE
    equal = [p for p in points if p.rate == best.rate]
    assert len(equal) > 1
    assert best.prefill_ceiling == max(p.prefill_ceiling for p in equal)


class TestCommand:
    def test_table_json_and_plot(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        record, plot = tmp_path / "plan.json", tmp_path / "plan.png"
        assert main(["plan", "--json", str(record), "--plot", str(plot)]) == 0
        shown = capsys.readouterr().out
        assert "3 instances" in shown
        assert "local prefill" in shown
        assert json.loads(record.read_text())["num_decode"] == 5
        assert plot.read_bytes().startswith(b"\x89PNG")

    def test_counts_and_bandwidth_from_flags(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["plan", "--remote", "0", "--local", "12", "--egress-gbps", "1"]) == 0
        shown = capsys.readouterr().out
        assert "9 instances" in shown
        assert "never remote" in shown

    def test_lengths_from_a_trace(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        trace = tmp_path / "trace.jsonl"
        row = {"t_ms": 0, "input_len": 2000, "output_len": 5, "hash_ids": [0, 1, 2, 3]}
        trace.write_text(json.dumps(row) + "\n")
        assert main(["plan", "--lengths", str(trace)]) == 0
        assert "mean of all     2,000 tokens" in capsys.readouterr().out

    def test_an_unknown_profile(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["plan", "--profile", "none"]) == 1
        assert "prfaas" in capsys.readouterr().err
