"""The few numbers that the README shows, taken from the results.

`make bench-summary` writes them between `<!-- measured -->` and `<!-- end of measured -->`.
Tests: tests/unit/benchmarks/test_headline.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from benchmarks import one_box
from benchmarks.gateway_systems import LOADER_ALONE
from benchmarks.result import Row, table

BEGIN, END = "<!-- measured -->\n", "<!-- end of measured -->"

Result = Mapping[str, Any]


class NotMeasuredError(LookupError):
    """A result lacks what a line of the table shows."""


def with_headlines(text: str, results: Mapping[str, Result]) -> str:
    """The README with fresh numbers.

    Args:
        text: holds the markers once.
        results: by the name of the benchmark.
    """
    assert text.count(BEGIN) == text.count(END) == 1, "the README has the markers once"
    before, rest = text.split(BEGIN)
    return before + BEGIN + headlines(results) + END + rest.split(END)[1]


def headlines(results: Mapping[str, Result]) -> str:
    """The table; a line whose benchmark did not measure it is left out."""
    rows: list[Row] = []
    for name, what, line in _LINES:
        try:
            here, beside = line(results[name])
        except LookupError:
            continue
        rows.append({"what": what, "KVMesh": here, "beside it": beside, "run": _link(name)})
    return "\n".join(table(rows)) + "\n"


def _link(name: str) -> str:
    return f"[{name}](bench/results/{name}.md)"


def _row(result: Result, **wanted: object) -> Mapping[str, Any]:
    for row in result["rows"]:
        if all(row.get(key) == value for key, value in wanted.items()):
            found: Mapping[str, Any] = row
            return found
    raise NotMeasuredError(str(wanted))


def _target(result: Result, name: str) -> float:
    for each in result["targets"]:
        if each["name"] == name and each["value"] is not None:
            return float(each["value"])
    raise NotMeasuredError(name)


def _gateways(
    what: str, show: Callable[[Mapping[str, Any]], str]
) -> Callable[[Result], tuple[str, str]]:
    """A line of the gateway's benchmark: ours, and the same of every other system in the run."""

    def line(result: Result) -> tuple[str, str]:
        rows = [row for row in result["rows"] if row["what"] == what]
        none = ("kvmesh", LOADER_ALONE)
        others = [row for row in rows if not row["system"].startswith(none)]
        beside = "; ".join(f"{row['system']} {show(row)}" for row in others)
        return show(_row(result, system="kvmesh", what=what)), beside or "–"

    return line


def _in_time(row: Mapping[str, Any]) -> str:
    # Medians and worst rounds lie side by side in a row, so none is subtracted from another.
    return f"{row['per s']:,} / {row['late']:,} / {row['failed']:,}"


def _engine(result: Result) -> tuple[str, str]:
    return f"{_target(result, 'every cell: times transformers'):.2f}x and more", "transformers 1x"


def _engine_avx2(result: Result) -> tuple[str, str]:
    least = min(_target(result, f"{cell}: times openvino") for cell in ("prefill", "decode"))
    return f"{least:.2f}x and more", "OpenVINO 1x"


def _fetched(result: Result) -> tuple[str, str]:
    row = _row(result, channel="tcp", prefix=4096)
    fetched, computed = row["fetched_ms"]["median"], row["computed_ms"]["median"]
    return f"{fetched:,.0f} ms", f"computed {computed:,.0f} ms"


def _brought_up(result: Result) -> tuple[str, str]:
    rows = [_row(result, what="first token", tier=tier) for tier in ("host", "disk")]
    host, disk = (f"{row['loaded_ms']['median']:,.0f}" for row in rows)
    return f"{host} / {disk} ms", f"computed {rows[0]['computed_ms']['median']:,.0f} ms"


def _with_host_memory(result: Result) -> tuple[str, str]:
    name = "{}: goodput with host memory over pools alone"
    return " / ".join(
        f"{_target(result, name.format(load)):.1f}x" for load in ("sessions", "tenants")
    ), "pools alone 1x"


def _link_speed(result: Result) -> tuple[str, str]:
    # As many streams as the channel begins with, which depends on the machine.
    names = [each["name"] for each in result["targets"] if "iperf3" in each["name"]]
    if not names:
        raise NotMeasuredError("iperf3")
    return f"{_target(result, names[0]):.2f}x", "iperf3 1x"


def _routes(result: Result) -> tuple[str, str]:
    rows = [_row(result, asked="1,900 known", workers=count) for count in (1_000, 10_000)]
    return ", ".join(f"{row['p50_ms']:.1f} / {row['p99_ms']:.0f} ms" for row in rows), "–"


def _phases(result: Result) -> tuple[str, str]:
    return f"{_target(result, 'phases: kvmesh from 4:4 over the best fixed split'):.2f}x", (
        "best fixed split 1x"
    )


def _one_box(result: Result) -> tuple[str, str]:
    most = max(row["requests/s"] for row in result["rows"])

    def show(system: str) -> str:
        row = _row(result, system=system, **{"requests/s": most})
        times = f"{row['TTFT p50 ms']:,.0f} / {row['TPOT p50 ms']:.1f} ms"
        return f"{times}, {row['good']:.0%}"

    return show(one_box.AUTO), f"{one_box.MIXED} {show(one_box.MIXED)}"


def _at_rest(result: Result) -> tuple[str, str]:
    slowest = max(each["value"] for each in result["targets"] if each["name"].startswith("start"))
    return f"{_target(result, 'memory together, pss mib'):.0f} MiB, {slowest:.1f} s", "–"


_LINES: tuple[tuple[str, str, Callable[[Result], tuple[str, str]]], ...] = (
    (
        "gateway",
        "streams broken when 1 of 3 workers is killed under 24 of them",
        _gateways("1 of 3 workers killed, 24 streams", lambda row: f"{row['failed']}"),
    ),
    (
        "gateway",
        "7x overload: first tokens in time per second / late first tokens / requests that failed",
        _gateways("overload 7x", _in_time),
    ),
    (
        "gateway",
        "streamed tokens per second of one gateway process, 64 streams",
        _gateways("tokens, 64 streams", lambda row: f"{row['per s']:,}"),
    ),
    (
        "gateway",
        "requests per second (chats of 800 to 8,000 characters, answers of 16), 32 in flight",
        _gateways("requests, 32 in flight", lambda row: f"{row['per s']:,}"),
    ),
    ("engine", "CPU engine, tokens per second, prefill and decode", _engine),
    (
        "engine_avx2",
        "the same on a CPU with AVX2 alone, prefill and batches of 1, 8 and 32",
        _engine_avx2,
    ),
    (
        "prefix_fetch",
        "TTFT of a prompt with 4,096 tokens that another worker holds, fetched over TCP",
        _fetched,
    ),
    (
        "tiers",
        "TTFT of a prompt with 4,096 tokens evicted to host memory / to disk",
        _brought_up,
    ),
    (
        "tier_load",
        "goodput with host memory of ten pools: agents' sessions / prompts of many tenants",
        _with_host_memory,
    ),
    ("transfer", "KV throughput over TCP to one peer", _link_speed),
    (
        "footprint",
        "gateway, scheduler and kvmanager at rest: memory together, slowest start",
        _at_rest,
    ),
    (
        "route_path",
        "route of a prompt of 30,000 tokens, p50 / p99: among 1,000 workers, among 10,000",
        _routes,
    ),
    (
        "one_box",
        "a prefill and a decode worker on one machine: TTFT / time per token, good requests",
        _one_box,
    ),
    ("policies", "goodput when load shifts between prefill and decode, simulated", _phases),
)
