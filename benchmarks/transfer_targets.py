"""The goals of the transfer benchmark, from its rows. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from benchmarks.result import Row, Target

CONTIGUOUS, PIECES = "contiguous", "16 KiB pieces"
SHM_DEFAULT, TCP_DEFAULT = "shm, default", "tcp, default"
"""Rows of our channels as workers ship them."""


def _select(rows: Sequence[Row], what: str, shape: str) -> list[Row]:
    return [
        row
        for row in rows
        if row["what"] == what and row["shape"] == shape and row["concurrent"] == 1
    ]


def median_rate(rows: Sequence[Row], what: str, shape: str, mib: float) -> float | None:
    """Median of what is called so, at one size."""
    rates = [row["gb_s"]["median"] for row in _select(rows, what, shape) if row["mib"] == mib]
    return rates[0] if rates else None


def _worst_ratio(
    rows: Sequence[Row], ours: str, theirs: str, shape: str, sizes: Callable[[float], bool]
) -> float | None:
    """The smallest ratio over the sizes that both have."""
    ratios = []
    for mib in sorted({row["mib"] for row in rows if sizes(row["mib"])}):
        our_rate, their_rate = (median_rate(rows, what, shape, mib) for what in (ours, theirs))
        if our_rate and their_rate:
            ratios.append(our_rate / their_rate)
    return min(ratios, default=None)


def _median(rows: Iterable[Row], column: str) -> float | None:
    values = [row[column]["median"] for row in rows]
    return float(values[0]) if values else None


def _least(rows: Iterable[Row], column: str) -> float | None:
    """The smallest median."""
    return min((float(row[column]["median"]) for row in rows), default=None)


def _ratio(above: float | None, below: float | None) -> float | None:
    return above / below if above and below else None


def targets_of(rows: Sequence[Row], streams: int) -> list[Target]:
    """All goals, of the settings that ship; those whose rows are missing have no value.

    Args:
        streams: connections that a TCP channel begins with; iperf3 has as many beside it.
    """

    def large(mib: float) -> bool:
        return mib >= 16

    def middle(mib: float) -> bool:
        return 16 <= mib <= 64

    def ratio(
        ours: str, theirs: str, shape: str, goal: float, sizes: Callable[[float], bool] = large
    ) -> Target:
        name = f"{ours} / {theirs}, {shape}"
        return Target(name, _worst_ratio(rows, ours, theirs, shape, sizes), goal)

    aligned = _median(_select(rows, TCP_DEFAULT, "aligned"), "ms")
    layerwise = _median(_select(rows, TCP_DEFAULT, "layerwise"), "ms")
    shm_put = _least(_select(rows, SHM_DEFAULT, "64 KiB put"), "ms")
    tcp_put = _least(_select(rows, TCP_DEFAULT, "64 KiB put"), "ms")
    calls = [row["calls"] for row in _select(rows, TCP_DEFAULT, "aligned")]
    return [
        ratio(SHM_DEFAULT, "memcpy", CONTIGUOUS, 0.9),
        ratio(SHM_DEFAULT, "memcpy", PIECES, 0.8),
        ratio(SHM_DEFAULT, "nixl shm", CONTIGUOUS, 1.1),
        ratio(SHM_DEFAULT, "nixl shm", PIECES, 1.5),
        ratio(TCP_DEFAULT, f"iperf3 x{streams}", CONTIGUOUS, 0.9, middle),
        ratio(TCP_DEFAULT, "nixl tcp", CONTIGUOUS, 1.2),
        ratio(TCP_DEFAULT, "nixl tcp", PIECES, 3.0),
        ratio(TCP_DEFAULT, "mooncake tcp", CONTIGUOUS, 3.0),
        ratio(TCP_DEFAULT, "mooncake tcp", PIECES, 8.0),
        Target("layerwise / aligned time, tcp, 8k tokens", _ratio(layerwise, aligned), 15.0),
        Target("calls of a fresh request", calls[0] if calls else None, 1.0, at_most=True),
        Target("64 KiB on shm, ms", shm_put, 0.1, at_most=True),
        Target("64 KiB on tcp, ms", tcp_put, 0.25, at_most=True),
        *_cpu_targets(rows),
    ]


def _cpu_targets(rows: Sequence[Row]) -> list[Target]:
    targets = []
    for ours, theirs in ((SHM_DEFAULT, "nixl shm"), (TCP_DEFAULT, "nixl tcp")):
        costs = []
        for what in (ours, theirs):
            found = [r["cpu_s_per_gib"] for r in _select(rows, what, CONTIGUOUS) if r["mib"] == 64]
            costs.append(float(found[0]) if found else None)
        name = f"cpu seconds per GiB, {ours} / {theirs}"
        targets.append(Target(name, _ratio(*costs), 1.0, at_most=True))
    return targets
