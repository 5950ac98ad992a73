"""The metrics of a serving benchmark, computed from the client's record of each request. Pure.

Keys and definitions are those of `vllm bench serve`, so results can be compared.
Tests: tests/unit/cli/test_bench_metrics.py.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from kvmesh.core.summary_statistics import percentile

PERCENTILES = (50, 90, 95, 99)
METRICS = ("ttft", "tpot", "itl", "e2el")

Outcome = Literal["completed", "refused", "error"]


@dataclass(frozen=True, slots=True)
class RequestRecord:
    """The client's record of one request. Times are seconds on one monotonic clock.

    Attributes:
        outcome: `refused` if the server refused it before the first token.
        sent_s: time at which it was sent.
        token_times_s: arrival time of each chunk with tokens.
        end_s: arrival time of the last chunk.
        output_tokens: number of output tokens by the server's count.
        error: error message; empty without an error.
    """

    outcome: Outcome
    sent_s: float
    token_times_s: tuple[float, ...] = ()
    end_s: float = 0.0
    input_tokens: int = 0
    output_tokens: int = 0
    error: str = ""

    @property
    def ttft_ms(self) -> float:
        """Milliseconds from sending to the first token."""
        return 1000 * (self.token_times_s[0] - self.sent_s)

    @property
    def e2el_ms(self) -> float:
        """Milliseconds from sending to the last chunk."""
        return 1000 * (self.end_s - self.sent_s)

    @property
    def tpot_ms(self) -> float | None:
        """Mean milliseconds per token after the first; None if there is only one."""
        if self.output_tokens < 2:
            return None
        return (self.e2el_ms - self.ttft_ms) / (self.output_tokens - 1)

    @property
    def itl_ms(self) -> list[float]:
        """Milliseconds between consecutive chunks with tokens."""
        times = self.token_times_s
        return [1000 * (b - a) for a, b in itertools.pairwise(times)]


def parse_goodput(words: Sequence[str]) -> dict[str, float]:
    """Parses limits in milliseconds from words like `ttft:2000`.

    Raises:
        ValueError: a word has another form.
    """
    limits = {}
    for word in words:
        name, _, limit = word.partition(":")
        if name not in ("ttft", "tpot", "e2el"):
            raise ValueError(f"{word!r} is not ttft:MS, tpot:MS or e2el:MS")
        limits[name] = float(limit)
        if not limits[name] > 0:
            raise ValueError(f"{word!r}: the limit must be above 0")
    return limits


def is_good(record: RequestRecord, limits: Mapping[str, float]) -> bool:
    """Whether a request completed within all limits."""
    if record.outcome != "completed":
        return False
    seen = {"ttft": record.ttft_ms, "tpot": record.tpot_ms or 0.0, "e2el": record.e2el_ms}
    return all(seen[name] <= limit for name, limit in limits.items())


def summarize(
    records: Sequence[RequestRecord], duration_s: float, limits: Mapping[str, float]
) -> dict[str, float]:
    """Returns the metrics of a run.

    Args:
        records: one per request.
        duration_s: seconds from sending the first request to the end of the last one.
        limits: goodput's limit of each metric in milliseconds; if empty, goodput is left out.

    Returns:
        Counts, rates per second, and `{mean,median,std,pNN}_{ttft,tpot,itl,e2el}_ms` over the
        completed requests.
    """
    done = [record for record in records if record.outcome == "completed"]
    refused = sum(record.outcome == "refused" for record in records)
    inputs = sum(record.input_tokens for record in done)
    outputs = sum(record.output_tokens for record in done)
    span = max(duration_s, 1e-9)
    result: dict[str, float] = {
        "completed": len(done),
        "failed": len(records) - len(done),
        "refused": refused,
        "errors": len(records) - len(done) - refused,
        "duration": duration_s,
        "total_input_tokens": inputs,
        "total_output_tokens": outputs,
        "request_throughput": len(done) / span,
        "output_throughput": outputs / span,
        "total_token_throughput": (inputs + outputs) / span,
    }
    if limits:
        result["request_goodput"] = sum(is_good(r, limits) for r in records) / span
    series: dict[str, list[float]] = {
        "ttft": [record.ttft_ms for record in done],
        "tpot": [tpot for record in done if (tpot := record.tpot_ms) is not None],
        "itl": [gap for record in done for gap in record.itl_ms],
        "e2el": [record.e2el_ms for record in done],
    }
    for name in METRICS:
        result |= _spread(name, series[name])
    return result


def _spread(name: str, values: Sequence[float]) -> dict[str, float]:
    # Zeros if no request completed, as in vLLM: JSON has no NaN.
    values = values or [0.0]
    return {
        f"mean_{name}_ms": statistics.fmean(values),
        f"median_{name}_ms": percentile(values, 50),
        f"std_{name}_ms": statistics.pstdev(values),
        **{f"p{p}_{name}_ms": percentile(values, p) for p in PERCENTILES},
    }


def targets(
    result: Mapping[str, float], num_requests: int, limits: Mapping[str, float]
) -> list[dict[str, object]]:
    """Returns the goals of a run: no errors, all requests answered, goodput limits kept at p99."""
    found: list[dict[str, object]] = [
        _target("errors", result["errors"], "== 0", result["errors"] == 0),
        _target(
            "completed or refused",
            result["completed"] + result["refused"],
            f"== {num_requests}",
            result["completed"] + result["refused"] == num_requests,
        ),
    ]
    for name, limit in limits.items():
        value = result[f"p99_{name}_ms"]
        met = result["completed"] > 0 and value <= limit
        found.append(_target(f"p99_{name}_ms", value, f"<= {limit:g}", met))
    return found


def _target(name: str, value: float, goal: str, met: bool) -> dict[str, object]:
    return {"name": name, "value": value, "goal": goal, "met": met}
