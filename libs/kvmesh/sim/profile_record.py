"""Writes a measured profile as the JSON that `load_profile` reads, and plots it.

Tests: tests/integration/test_profile_command.py.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from kvmesh.sim.cost_fit import COVERAGE, DecodeSample, Fit, PrefillSample, fit_decode, fit_prefill

_BITS = 8 / 1e9
_TRACE_BLOCK_TOKENS = 512
_SECONDS_OF_MESSAGE = 0.0005


@dataclass(frozen=True, slots=True)
class Measured:
    """Measurements on one machine.

    Attributes:
        kv_bytes: pairs of tokens and bytes that a handoff moves, per layer group and in `total`.
        kv_tokens: number of positions that the blocks hold.
        link_bytes_per_s: bandwidth of the data channel's network path on this host.
        memory_bytes_per_s: memory bandwidth of reads.
    """

    model: str
    device: str
    prefill: tuple[PrefillSample, ...]
    decode: tuple[DecodeSample, ...]
    kv_bytes: dict[str, list[tuple[int, int]]]
    kv_tokens: int
    link_bytes_per_s: float
    memory_bytes_per_s: float


def profile_record(measured: Measured) -> dict[str, Any]:
    """Returns the profile with one device in all roles, as JSON values.

    Raises:
        ValueError: there are too few samples.
    """
    prefill, decode = fit_prefill(measured.prefill), fit_decode(measured.decode)
    lengths = sorted({each.tokens for each in measured.prefill})
    slots = max(each.batch for each in measured.decode)
    step = max(each.seconds for each in measured.decode if each.batch == slots)
    gbps = measured.link_bytes_per_s * _BITS
    constant, per_sequence, per_token = decode.coefficients
    return {
        "name": measured.model,
        "description": f"{measured.model} on {measured.device}, measured by kvmesh profile.",
        "kv_bytes": {"points": [list(point) for point in measured.kv_bytes["total"]]},
        "devices": {
            measured.device: {
                "prefill_s": {"quadratic": list(prefill.coefficients)},
                "decode_s": {
                    "constant": constant,
                    "per_sequence": per_sequence,
                    "per_token": per_token,
                },
                "num_blocks": max(measured.kv_tokens // _TRACE_BLOCK_TOKENS, 1),
                "prefill_slots": 1,
                "decode_slots": slots,
            }
        },
        "links": {"inside_gbps": gbps, "between_gbps": gbps, "latency_s": _SECONDS_OF_MESSAGE},
        "plan": {
            "remote": measured.device,
            "local": measured.device,
            "num_remote": 1,
            "num_local": 2,
            "decode_batch": slots,
            "decode_step_s": step,
            "output_tokens": 128,
            "lengths": {
                "mu": math.log(lengths[0] * lengths[-1]) / 2,
                "sigma": 1.0,
                "min": lengths[0],
                "max": lengths[-1],
            },
        },
        "measured": {
            "prefill": [asdict(each) for each in measured.prefill],
            "decode": [asdict(each) for each in measured.decode],
            "prefill_fit": asdict(prefill),
            "decode_fit": asdict(decode),
            "errors": {
                "errors": "standard errors of the coefficients",
                "relative_error": "root mean square at the points that were fitted",
                "prediction_error": f"{COVERAGE:.0%} of fresh runs are nearer, by held-out ones",
            },
            "kv_bytes": measured.kv_bytes,
            "memory_gb_per_s": measured.memory_bytes_per_s / 1e9,
            "link_gb_per_s": measured.link_bytes_per_s / 1e9,
        },
    }


def plot_profile(measured: Measured, path: Path) -> None:
    """Draws measurements and fits; the suffix of the path names the format."""
    figure = Figure(figsize=(13, 4), layout="constrained")
    prefill_axes, decode_axes, kv_axes = figure.subplots(1, 3)
    prefill, decode = fit_prefill(measured.prefill), fit_decode(measured.decode)
    for cached in sorted({each.cached for each in measured.prefill}):
        samples = [each for each in measured.prefill if each.cached == cached]
        tokens = [each.tokens for each in samples]
        times = [each.seconds for each in samples]
        terms = [[1.0, each, each * (2 * cached + each)] for each in tokens]
        _points(prefill_axes, tokens, times, terms, prefill, f"{cached} cached")
    prefill_axes.set(title="prefill, s", xlabel="tokens computed", xscale="log", yscale="log")
    for context in sorted({each.context for each in measured.decode}):
        steps = [each for each in measured.decode if each.context == context]
        batches = [each.batch for each in steps]
        times = [each.seconds for each in steps]
        terms = [[1.0, each, each * context] for each in batches]
        _points(decode_axes, batches, times, terms, decode, f"context {context}")
    decode_axes.set(title="decode step, s", xlabel="sequences")
    for name, points in measured.kv_bytes.items():
        kv_axes.plot([x for x, _ in points], [y / 2**20 for _, y in points], label=name)
    kv_axes.set(title="KV of a handoff, MiB", xlabel="tokens")
    figure.suptitle(f"bands: {COVERAGE:.0%} of fresh runs", fontsize="small")
    for axes in (prefill_axes, decode_axes, kv_axes):
        axes.legend(fontsize="small")
    figure.savefig(path, dpi=110)


def _points(
    axes: Any,
    xs: Sequence[float],
    ys: Sequence[float],
    terms: Sequence[Sequence[float]],
    fit: Fit,
    label: str,
) -> None:
    fitted = [sum(c * term for c, term in zip(fit.coefficients, row, strict=True)) for row in terms]
    (line,) = axes.plot(xs, fitted, label=label)
    axes.plot(xs, ys, "o", markersize=3, color=line.get_color())
    if (share := fit.prediction_error) is not None:
        low = [max(value * (1.0 - share), 0.0) for value in fitted]
        high = [value * (1.0 + share) for value in fitted]
        axes.fill_between(xs, low, high, alpha=0.15, color=line.get_color(), linewidth=0)
