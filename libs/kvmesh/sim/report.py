"""Numbers of a finished simulation, as JSON values and as a table.

Tests: tests/unit/sim/test_report.py.
"""

from __future__ import annotations

import csv
import io
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from kvmesh.core.summary_statistics import coefficient_of_variation, mean, percentile
from kvmesh.sim.requests import Outcome, SimRequest
from kvmesh.sim.simulation import Result, Sample


@dataclass(frozen=True, slots=True)
class Summary:
    """Results of one run in numbers.

    Attributes:
        success: fraction of requests whose first token came in time and that finished.
        goodput: requests per second that kept both limits.
        itl_p99_s: 99th percentile of the times between tokens of all answers.
        hit_rate: fraction of prompt tokens found in a prefix cache.
        cv: mean over time of the coefficient of variation of computed tokens per prefill worker.
        link_use: mean utilisation of the link out of the remote cluster.
        remote_share: fraction of requests prefilled in the offload cluster.
        refusals: number of refusals by reason.
    """

    system: str
    num_requests: int
    success: float
    goodput: float
    ttft_p50_s: float
    ttft_p90_s: float
    ttft_p99_s: float
    tpot_p50_s: float
    tpot_p99_s: float
    itl_p99_s: float
    hit_rate: float
    cv: float
    link_use: float
    remote_share: float
    duration_s: float
    refusals: dict[str, int] = field(default_factory=dict)


def summarize(result: Result) -> Summary:
    """Returns the numbers of one run."""
    requests = result.requests
    ttfts = [each.ttft_s for each in requests if each.ttft_s is not None]
    tpots = [each.tpot_s for each in requests if each.tpot_s is not None]
    limit = result.scenario.objectives.tpot_s
    done = [each for each in requests if each.outcome is Outcome.DONE]
    good = [each for each in done if each.tpot_s is None or each.tpot_s <= limit]
    # Goodput is counted over the time of arrivals; a long last answer would lower it otherwise.
    arrivals = max(each.arrival_s for each in requests) - min(each.arrival_s for each in requests)
    prompt_tokens = sum(each.trace.input_tokens for each in requests)
    count = len(requests)
    return Summary(
        system=result.scenario.system.name,
        num_requests=count,
        success=len(done) / count,
        goodput=len(good) / arrivals if arrivals else math.nan,
        ttft_p50_s=percentile(ttfts, 50),
        ttft_p90_s=percentile(ttfts, 90),
        ttft_p99_s=percentile(ttfts, 99),
        tpot_p50_s=percentile(tpots, 50),
        tpot_p99_s=percentile(tpots, 99),
        itl_p99_s=result.gaps.percentile(99),
        hit_rate=sum(each.cached_tokens for each in requests) / prompt_tokens,
        cv=mean_cv(result.samples),
        link_use=mean([sample.link_use for sample in result.samples]),
        remote_share=sum(each.remote for each in requests) / count,
        duration_s=result.finished_s,
        refusals=dict(Counter(_refusal(each) for each in requests if each.refusal)),
    )


def _refusal(request: SimRequest) -> str:
    return request.refusal.value if request.refusal else ""


def mean_cv(samples: Sequence[Sample]) -> float:
    """Returns the coefficient of variation of prefill work, averaged over samples with any."""
    found = [
        coefficient_of_variation(list(sample.computed_tokens.values()))
        for sample in samples
        if any(sample.computed_tokens.values())
    ]
    return mean(found)


def summary_record(result: Result) -> dict[str, Any]:
    """Returns one run as JSON values: summary, reasons, timelines."""
    return {
        "summary": {key: _finite(value) for key, value in asdict(summarize(result)).items()},
        "seed": result.scenario.seed,
        "profile": result.scenario.profile.name,
        "events": result.num_events,
        "reasons": dict(sorted(result.reasons.items())),
        "timeline": [
            {key: _finite(value) for key, value in asdict(sample).items()}
            for sample in result.samples
        ],
    }


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


_COLUMNS: tuple[tuple[str, str, str], ...] = (
    ("goodput/s", "goodput", "{:.3f}"),
    ("success", "success", "{:.1%}"),
    ("TTFT p50", "ttft_p50_s", "{:.2f}"),
    ("p90", "ttft_p90_s", "{:.2f}"),
    ("p99", "ttft_p99_s", "{:.2f}"),
    ("TPOT p50", "tpot_p50_s", "{:.4f}"),
    ("p99", "tpot_p99_s", "{:.4f}"),
    ("ITL p99", "itl_p99_s", "{:.4f}"),
    ("hits", "hit_rate", "{:.1%}"),
    ("CV", "cv", "{:.2f}"),
    ("link", "link_use", "{:.1%}"),
    ("remote", "remote_share", "{:.1%}"),
)


def table(rows: Sequence[tuple[str, Summary]]) -> str:
    """Returns a Markdown table with one line per run, times in seconds."""
    head = ["run", *(title for title, _, _ in _COLUMNS), "refused"]
    lines = [head]
    for label, summary in rows:
        cells = [form.format(getattr(summary, name)) for _, name, form in _COLUMNS]
        refused = " ".join(f"{reason}:{n}" for reason, n in sorted(summary.refusals.items()))
        lines.append([label, *cells, refused or "0"])
    widths = [max(len(line[column]) for line in lines) for column in range(len(head))]
    rule = ["-" * width for width in widths]
    return "".join(
        "| "
        + " | ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True))
        + " |\n"
        for line in (lines[0], rule, *lines[1:])
    )


def csv_table(rows: Sequence[tuple[str, Summary]]) -> str:
    """Returns CSV with one line per run and every number of its summary; names have the units."""
    out = io.StringIO()
    names = [each.name for each in fields(Summary) if each.name not in ("system", "refusals")]
    lines = csv.writer(out, lineterminator="\n")
    lines.writerow(["run", *names, "refused"])
    for label, summary in rows:
        values = [_finite(getattr(summary, name)) for name in names]
        lines.writerow([label, *values, sum(summary.refusals.values())])
    return out.getvalue()
