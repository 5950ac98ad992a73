"""Other programs under the same load: iperf3, NIXL, Mooncake's transfer engine."""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.result import Row, spread
from kvmesh.core.config import child_environment

_STREAMS = (1, 2, 4)
_MIN_IPERF_MIB = 16
_PEER_TIMEOUT_S = 600
# UCX wants a transport with failure handling beside shared memory; the data does not take it.
_UCX_TLS = {"shm": "sm,tcp,self", "tcp": "tcp,self"}
_KINDS = {"nixl": ("shm", "tcp"), "mooncake": ("tcp",)}


def iperf_rows(sizes: Sequence[int], runs: int) -> list[Row]:
    """iperf3 on loopback under cubic, 1 MiB writes; sizes too short to time are left out."""
    if shutil.which("iperf3") is None:
        return []
    return [
        {
            "what": f"iperf3 x{streams}",
            "shape": "contiguous",
            "mib": mib,
            "concurrent": 1,
            **_iperf(streams, mib, runs),
        }
        for mib in sizes
        if mib >= _MIN_IPERF_MIB
        for streams in _STREAMS
    ]


def _iperf(streams: int, mib: int, runs: int) -> Row:
    rates: list[float] = []
    cpu: list[float] = []
    while len(rates) < runs:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = str(free.getsockname()[1])
        server = subprocess.Popen(
            ["iperf3", "-s", "-1", "--forceflush", "-p", port], stdout=subprocess.PIPE, text=True
        )
        assert server.stdout is not None
        while "listening" not in server.stdout.readline():
            pass
        share = f"{mib * 1024 // streams}K"
        load = ["-P", str(streams), "-n", share, "-l", "1M", "-C", "cubic", "-J"]
        done = subprocess.run(
            ["iperf3", "-c", "127.0.0.1", "-p", port, *load],
            capture_output=True,
            text=True,
            check=True,
        )
        server.communicate(timeout=30)
        end: dict[str, Any] = json.loads(done.stdout)["end"]
        received = end["sum_received"]
        if not received["bits_per_second"]:  # too short for its clock
            continue
        rates.append(received["bits_per_second"] / 8e9)
        use = end["cpu_utilization_percent"]
        busy = (use["host_total"] + use["remote_total"]) / 100 * end["sum_sent"]["seconds"]
        cpu.append(busy / (end["sum_sent"]["bytes"] / (1 << 30)))
    return {
        "gb_s": spread(rates),
        "ms": spread([mib * 1.048576 / rate for rate in rates]),
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
                    env=child_environment({"UCX_TLS": _UCX_TLS[kind]}),
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
