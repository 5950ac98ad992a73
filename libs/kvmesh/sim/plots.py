"""Plots of finished simulations: one PNG, and one HTML file that needs nothing besides itself.

Tests: tests/unit/sim/test_report.py.
"""

from __future__ import annotations

import base64
import html
import io
from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from kvmesh.sim.report import coefficient_of_variation, summarize, table
from kvmesh.sim.simulation import Result


def draw(runs: Sequence[tuple[str, Result]]) -> Figure:
    """Latency distributions of all runs, and their timelines."""
    figure = Figure(figsize=(14, 8), layout="constrained")
    axes = figure.subplots(2, 3)
    for label, result in runs:
        ttfts = sorted(each.ttft_s for each in result.requests if each.ttft_s is not None)
        tpots = sorted(each.tpot_s for each in result.requests if each.tpot_s is not None)
        _distribution(axes[0][0], ttfts, label)
        _distribution(axes[0][1], tpots, label)
        times = [sample.at_s for sample in result.samples]
        spread = [coefficient_of_variation([*s.computed_tokens.values()]) for s in result.samples]
        axes[0][2].plot(times, spread, label=label)
        axes[1][0].plot(times, [sample.link_use for sample in result.samples], label=label)
        axes[1][1].plot(times, [sample.searching for sample in result.samples], label=label)
        prefill = [sample.roles.get("prefill", 0) for sample in result.samples]
        axes[1][2].plot(times, prefill, drawstyle="steps-post", label=label)
    axes[0][0].set(title="TTFT, s", ylabel="share of requests", xscale="log")
    axes[0][1].set(title="TPOT, s", ylabel="share of requests", xscale="log")
    axes[0][2].set(title="CV of prefill work", xlabel="s")
    axes[1][0].set(title="use of the link between clusters", xlabel="s")
    axes[1][1].set(title="requests that look for workers", xlabel="s")
    axes[1][2].set(title="prefill workers", xlabel="s")
    axes[0][0].legend()
    return figure


def _distribution(axes: Axes, values: list[float], label: str) -> None:
    # At most a thousand steps; more cannot be seen.
    stride = max(len(values) // 1000, 1)
    shares = [(index + 1) / len(values) for index in range(0, len(values), stride)]
    axes.plot(values[::stride], shares, label=label)


def png(runs: Sequence[tuple[str, Result]]) -> bytes:
    """The plots as a PNG file."""
    buffer = io.BytesIO()
    draw(runs).savefig(buffer, format="png", dpi=110)
    return buffer.getvalue()


def write_html(runs: Sequence[tuple[str, Result]], title: str, path: Path) -> None:
    """Writes table and plots as one page without references to other files."""
    rows = table([(label, summarize(result)) for label, result in runs])
    image = base64.b64encode(png(runs)).decode()
    path.write_text(
        "<!doctype html>\n"
        f'<html lang="en"><head><meta charset="utf-8"><title>{html.escape(title)}</title>\n'
        "<style>body{font-family:sans-serif;margin:2em}pre{overflow-x:auto}img{max-width:100%}"
        f"</style></head><body><h1>{html.escape(title)}</h1>\n"
        f"<pre>{html.escape(rows)}</pre>\n"
        f'<img alt="plots of the runs" src="data:image/png;base64,{image}"></body></html>\n'
    )
