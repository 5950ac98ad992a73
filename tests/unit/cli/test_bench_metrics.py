from __future__ import annotations

import pytest

from kvmesh.cli.bench_metrics import (
    RequestRecord,
    is_good,
    parse_goodput,
    summarize,
    targets,
)


def _done(sent_s: float, *times_s: float, output_tokens: int = 0) -> RequestRecord:
    return RequestRecord(
        outcome="completed",
        sent_s=sent_s,
        token_times_s=times_s,
        end_s=times_s[-1],
        input_tokens=10,
        output_tokens=output_tokens or len(times_s),
    )


REFUSED = RequestRecord("refused", 0.0, error="503")
ERROR = RequestRecord("error", 0.0, error="broken")


def test_one_request() -> None:
    record = _done(1.0, 1.5, 1.6, 1.8)
    assert record.ttft_ms == pytest.approx(500)
    assert record.e2el_ms == pytest.approx(800)
    assert record.tpot_ms == pytest.approx(150)
    assert record.itl_ms == pytest.approx([100, 200])


def test_tpot_counts_tokens_and_not_pieces() -> None:
    assert _done(0.0, 1.0, 3.0, output_tokens=5).tpot_ms == pytest.approx(500)
    assert _done(0.0, 1.0).tpot_ms is None


def test_a_run() -> None:
    records = [_done(0.0, 0.1, 0.2), _done(1.0, 1.3, 1.5, 1.7), REFUSED, ERROR]
    result = summarize(records, 2.0, {"ttft": 200.0})
    counts = ("completed", "failed", "refused", "errors", "total_input_tokens")
    assert [result[name] for name in counts] == [2, 2, 1, 1, 20]
    assert result["total_output_tokens"] == 5
    assert result["request_throughput"] == pytest.approx(1.0)
    assert result["output_throughput"] == pytest.approx(2.5)
    assert result["total_token_throughput"] == pytest.approx(12.5)
    assert result["request_goodput"] == pytest.approx(0.5)
    assert result["mean_ttft_ms"] == pytest.approx(200)
    assert result["std_ttft_ms"] == pytest.approx(100)
    assert result["median_itl_ms"] == pytest.approx(200)
    assert result["p99_e2el_ms"] == pytest.approx(200 + 0.99 * 500)


def test_every_metric_has_every_number() -> None:
    result = summarize([], 0.0, {})
    for metric in ("ttft", "tpot", "itl", "e2el"):
        for number in ("mean", "median", "std", "p50", "p90", "p95", "p99"):
            assert result[f"{number}_{metric}_ms"] == 0.0
    assert "request_goodput" not in result


def test_goodput_needs_every_limit() -> None:
    record = _done(0.0, 0.1, 0.2)
    assert is_good(record, {"ttft": 150.0, "tpot": 150.0, "e2el": 250.0})
    assert not is_good(record, {"ttft": 150.0, "tpot": 50.0})
    assert not is_good(REFUSED, {})


def test_goodput_words() -> None:
    assert parse_goodput(["ttft:2000", "tpot:0.5"]) == {"ttft": 2000.0, "tpot": 0.5}
    for word in ("ttft", "itl:5", "ttft:", "ttft:-1", "ttft:nan"):
        with pytest.raises(ValueError):  # noqa: PT011 - float() words its own message
            parse_goodput([word])


def test_targets() -> None:
    limits = {"ttft": 200.0}
    good = summarize([_done(0.0, 0.1), REFUSED], 1.0, limits)
    assert [target["met"] for target in targets(good, 2, limits)] == [True, True, True]
    bad = summarize([_done(0.0, 0.3), ERROR], 1.0, limits)
    assert [target["met"] for target in targets(bad, 2, limits)] == [False, False, False]
    nothing = summarize([], 1.0, limits)
    assert [target["met"] for target in targets(nothing, 1, limits)] == [True, False, False]
