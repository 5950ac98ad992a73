"""The goals of the transfer benchmark, from its rows. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from benchmarks.result import Row, Target

CONTIGUOUS, PIECES = "contiguous", "16 KiB pieces"


def _select(rows: Sequence[Row], what: str, shape: str) -> list[Row]:
    return [
        row
        for row in rows
        if row["what"].startswith(what) and row["shape"] == shape and row["concurrent"] == 1
    ]


def best_rate(rows: Sequence[Row], what: str, shape: str, mib: float) -> float | None:
    """Best median among what begins with `what`, at one size."""
    rates = [row["gb_s"]["median"] for row in _select(rows, what, shape) if row["mib"] == mib]
    return max(rates, default=None)


def _worst_ratio(
    rows: Sequence[Row], ours: str, theirs: str, shape: str, sizes: Callable[[float], bool]
) -> float | None:
    """The smallest ratio over the sizes that both have."""
    ratios = []
    for mib in sorted({row["mib"] for row in rows if sizes(row["mib"])}):
        our_rate, their_rate = (best_rate(rows, what, shape, mib) for what in (ours, theirs))
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


def targets_of(rows: Sequence[Row]) -> list[Target]:
    """All goals; those whose rows are missing have no value."""

    def large(mib: float) -> bool:
        return mib >= 16

    def middle(mib: float) -> bool:
        return 16 <= mib <= 64

    def ratio(ours: str, theirs: str, shape: str, sizes: Callable[[float], bool]) -> float | None:
        return _worst_ratio(rows, ours, theirs, shape, sizes)

    aligned = _median(_select(rows, "tcp", "aligned"), "ms")
    layerwise = _median(_select(rows, "tcp", "layerwise"), "ms")
    shm_put = _least(_select(rows, "shm", "64 KiB put"), "ms")
    tcp_put = _least(_select(rows, "tcp x2", "64 KiB put"), "ms")
    calls = [row["calls"] for row in _select(rows, "tcp", "aligned")]
    return [
        Target("shm / memcpy, from 16 MiB", ratio("shm", "memcpy", CONTIGUOUS, large), 0.9),
        Target("shm / NIXL shm, contiguous", ratio("shm", "nixl shm", CONTIGUOUS, large), 1.1),
        Target("shm / NIXL shm, pieces", ratio("shm", "nixl shm", PIECES, large), 1.5),
        Target("tcp / iperf3, 16-64 MiB", ratio("tcp", "iperf3", CONTIGUOUS, middle), 0.9),
        Target("tcp / NIXL tcp, contiguous", ratio("tcp", "nixl tcp", CONTIGUOUS, large), 1.5),
        Target("tcp / Mooncake tcp, contiguous", ratio("tcp", "mooncake", CONTIGUOUS, large), 3.0),
        Target("tcp / NIXL tcp, pieces", ratio("tcp", "nixl tcp", PIECES, large), 4.0),
        Target("tcp / Mooncake tcp, pieces", ratio("tcp", "mooncake", PIECES, large), 8.0),
        Target("layerwise / aligned time, tcp, 8k tokens", _ratio(layerwise, aligned), 15.0),
        Target("calls of a fresh request", calls[0] if calls else None, 1.0, at_most=True),
        Target("64 KiB on shm, ms", shm_put, 0.1, at_most=True),
        Target("64 KiB on tcp, ms", tcp_put, 0.25, at_most=True),
        *_cpu_targets(rows),
    ]


def _cpu_targets(rows: Sequence[Row]) -> list[Target]:
    targets = []
    for ours, theirs in (("shm", "nixl shm"), ("tcp x2", "nixl tcp")):
        costs = []
        for what in (ours, theirs):
            found = [r["cpu_s_per_gib"] for r in _select(rows, what, CONTIGUOUS) if r["mib"] == 64]
            costs.append(float(found[0]) if found else None)
        name = f"cpu seconds per GiB, {ours} / {theirs}"
        targets.append(Target(name, _ratio(*costs), 1.0, at_most=True))
    return targets
