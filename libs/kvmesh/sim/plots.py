"""Plots of finished simulations: one PNG, and one HTML file that needs nothing besides itself.

Tests: tests/unit/sim/test_report.py.
"""

from __future__ import annotations

import base64
import html
import io
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from kvmesh.core.summary_statistics import coefficient_of_variation
from kvmesh.sim.simulation import Result


@dataclass(frozen=True, slots=True)
class Series:
    """The plotted data of one run.

    Attributes:
        ttfts, tpots: seconds, sorted.
        times: time of each sample; the lists below have one value per sample.
        spread: coefficient of variation of prefill work.
    """

    label: str
    ttfts: list[float]
    tpots: list[float]
    times: list[float]
    spread: list[float]
    link_use: list[float]
    searching: list[int]
    num_prefill: list[int]

    @classmethod
    def of(cls, label: str, result: Result) -> Series:
        """Returns the series of a finished run."""
        samples = result.samples
        return cls(
            label,
            sorted(each.ttft_s for each in result.requests if each.ttft_s is not None),
            sorted(each.tpot_s for each in result.requests if each.tpot_s is not None),
            [sample.at_s for sample in samples],
            [coefficient_of_variation([*each.computed_tokens.values()]) for each in samples],
            [sample.link_use for sample in samples],
            [sample.searching for sample in samples],
            [sample.roles.get("prefill", 0) for sample in samples],
        )


def draw(runs: Sequence[Series]) -> Figure:
    """Draws the latency distributions and the timelines of all runs."""
    figure = Figure(figsize=(14, 8), layout="constrained")
    axes = figure.subplots(2, 3)
    for run in runs:
        _distribution(axes[0][0], run.ttfts, run.label)
        _distribution(axes[0][1], run.tpots, run.label)
        axes[0][2].plot(run.times, run.spread, label=run.label)
        axes[1][0].plot(run.times, run.link_use, label=run.label)
        axes[1][1].plot(run.times, run.searching, label=run.label)
        axes[1][2].plot(run.times, run.num_prefill, drawstyle="steps-post", label=run.label)
    axes[0][0].set(title="TTFT, s", ylabel="share of requests", xscale="log")
    axes[0][1].set(title="TPOT, s", ylabel="share of requests", xscale="log")
    axes[0][2].set(title="CV of prefill work", xlabel="s")
    axes[1][0].set(title="use of the link between clusters", xlabel="s")
    axes[1][1].set(title="requests that look for workers", xlabel="s")
    axes[1][2].set(title="prefill workers", xlabel="s")
    axes[0][0].legend(fontsize="x-small")
    return figure


def _distribution(axes: Axes, values: list[float], label: str) -> None:
    # At most a thousand steps; more cannot be seen.
    stride = max(len(values) // 1000, 1)
    shares = [(index + 1) / len(values) for index in range(0, len(values), stride)]
    axes.plot(values[::stride], shares, label=label)


def png(runs: Sequence[Series]) -> bytes:
    """Returns the plots as a PNG file."""
    buffer = io.BytesIO()
    draw(runs).savefig(buffer, format="png", dpi=110)
    return buffer.getvalue()


def write_html(runs: Sequence[Series], rows: str, title: str, path: Path) -> None:
    """Writes table and plots as one page without references to other files.

    Args:
        rows: the table, as text.
    """
    image = base64.b64encode(png(runs)).decode()
    path.write_text(
        "<!doctype html>\n"
        f'<html lang="en"><head><meta charset="utf-8"><title>{html.escape(title)}</title>\n'
        "<style>body{font-family:sans-serif;margin:2em}pre{overflow-x:auto}img{max-width:100%}"
        f"</style></head><body><h1>{html.escape(title)}</h1>\n"
        f"<pre>{html.escape(rows)}</pre>\n"
        f'<img alt="plots of the runs" src="data:image/png;base64,{image}"></body></html>\n'
    )
