"""Other programs under the same load: iperf3, NIXL, Mooncake's transfer engine."""

from __future__ import annotations

import contextlib
import json
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.result import Row, spread
from kvmesh.core.config import child_environment

_STREAMS = (1, 2, 4)
_MIN_IPERF_MIB = 16
_IPERF_S = 2
CONGESTION = "cubic"
_CONGESTION = Path("/proc/sys/net/ipv4/tcp_congestion_control")
_PEER_TIMEOUT_S = 600
_POOLED = {"MC_TCP_ENABLE_CONNECTION_POOL": "1"}
# UCX wants a transport with failure handling beside shared memory; the data does not take it.
_UCX_TLS = {"shm": "sm,tcp,self", "tcp": "tcp,self"}
_KINDS = {"nixl": ("shm", "tcp"), "mooncake": ("tcp",)}


@contextlib.contextmanager
def equal_congestion_control() -> Iterator[str]:
    """The whole system under cubic, as our sockets are, while it lasts; gives what it is under.

    Where this process may not set that, peers that do not choose keep the system's own.
    """
    try:
        before = _CONGESTION.read_text()
        _CONGESTION.write_text(CONGESTION)
    except OSError:
        yield _CONGESTION.read_text().strip() if _CONGESTION.is_file() else "unknown"
        return
    try:
        yield CONGESTION
    finally:
        _CONGESTION.write_text(before)


def iperf_rows(sizes: Sequence[int], runs: int) -> list[Row]:
    """iperf3 on loopback under cubic, 1 MiB writes, over connections that have been warm a second.

    The rate is one without end: it stands beside each size that is large enough to compare.
    """
    if shutil.which("iperf3") is None:
        return []
    rows: list[Row] = []
    for streams in _STREAMS:
        measured = _iperf(streams, runs)
        rows += [
            {
                "what": f"iperf3 x{streams}",
                "shape": "contiguous",
                "mib": mib,
                "concurrent": 1,
                **measured,
                "ms": spread([mib * 1.048576 / measured["gb_s"]["median"]]),
            }
            for mib in sizes
            if mib >= _MIN_IPERF_MIB
        ]
    return rows


def _iperf(streams: int, runs: int) -> Row:
    rates: list[float] = []
    cpu: list[float] = []
    for _ in range(runs):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = str(free.getsockname()[1])
        server = subprocess.Popen(
            ["iperf3", "-s", "-1", "--forceflush", "-p", port], stdout=subprocess.PIPE, text=True
        )
        assert server.stdout is not None
        while "listening" not in server.stdout.readline():
            pass
        load = ["-P", str(streams), "-t", str(_IPERF_S), "-O", "1", "-l", "1M", "-C", "cubic", "-J"]
        done = subprocess.run(
            ["iperf3", "-c", "127.0.0.1", "-p", port, *load],
            capture_output=True,
            text=True,
            check=True,
        )
        server.communicate(timeout=30)
        end: dict[str, Any] = json.loads(done.stdout)["end"]
        rates.append(end["sum_received"]["bits_per_second"] / 8e9)
        use = end["cpu_utilization_percent"]
        busy = (use["host_total"] + use["remote_total"]) / 100 * end["sum_sent"]["seconds"]
        cpu.append(busy / (end["sum_sent"]["bytes"] / (1 << 30)))
    return {
        "gb_s": spread(rates),
        "cpu_s_per_gib": round(sorted(cpu)[len(cpu) // 2], 3),
    }


def peer_rows(pythons: Mapping[str, Path], sizes: Sequence[int], runs: int, seed: int) -> list[Row]:
    """Rows of each engine; one that fails is left out, with a word.

    Args:
        pythons: engine (nixl, mooncake) to an interpreter that imports it.
    """
    rows: list[Row] = []
    here = Path(__file__).parent
    for engine, python in pythons.items():
        for kind in _KINDS[engine]:
            script = str(here / f"peer_{engine}.py")
            command = [str(python), script, kind, json.dumps([list(sizes), runs, seed])]
            try:
                done = subprocess.run(
                    command,
                    capture_output=True,
                    text=True,
                    timeout=_PEER_TIMEOUT_S,
                    check=False,  # engines may fall over after their work, when they are taken down
                    env=child_environment({"UCX_TLS": _UCX_TLS[kind]} | _POOLED),
                )
            except (subprocess.SubprocessError, OSError) as error:
                sys.stderr.write(f"{engine} {kind}: {error}\n")
                continue
            said = done.stdout.splitlines()
            if not said:
                sys.stderr.write(f"{engine} {kind}: {done.stderr[-2000:]}\n")
                continue
            rows += json.loads(said[-1])["rows"]
    return rows
