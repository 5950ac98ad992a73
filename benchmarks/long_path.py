"""KV over a long path that loses packets, against iperf3: `python -m benchmarks.long_path`.

A relay in user space delays packets between two network namespaces by 15 ms each way and drops some
of them; the kernel's token bucket bounds the rate. TCP of the kernel is at both ends. Needs root,
/dev/net/tun and iperf3.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import uvloop

from benchmarks.result import RESULTS, Row, Target, document, markdown, save
from benchmarks.transfer_ends import (
    IN_ORDER,
    RECEIVER,
    SENDER,
    OpenTarget,
    Pool,
    layout,
    reservation,
    shuffled,
)
from kvmesh.transfer.alignment import Run
from kvmesh.transfer.channel_pool import ChannelPool, SendOptions
from kvmesh.transfer.data_server import DataServer, ReceiveOptions
from kvmesh.transfer.protocol import ChannelIdentity
from tests.packet_link import FAR, PacketLink, Weather, missing, packet_link

DELAY_S = 0.015
LOSSES = (0.0, 0.001, 0.01)
RATE = "200mbit"

STREAMS = (1, 2, 4, 8, 16)
CONTROLS = ("cubic", "bbr")
"""What iperf3 may choose; the best rate of all counts."""

BLOCK = 256 << 10
BLOCKS = 64
"""A transfer has 16 MiB."""

STALL_S = 30.0
GOAL = 0.9

NOTES = f"""\
round trip {2000 * DELAY_S:g} ms, {RATE} each way, packets of 1,500 bytes; loss each way
- ours: transfers of 16 MiB one after the other, with the settings of a worker, crc32c included; the
 first third of the time chooses its connections and is not counted
- iperf3: the best number of streams and congestion control, its first seconds not counted\
""".replace("\n ", " ").split("\n- ")


async def ours(link: PacketLink, seconds: float) -> Row:
    """Goodput of one pair of workers."""
    source, pool = Pool(BLOCKS, BLOCK, 1), Pool(BLOCKS, BLOCK, 2)
    target = OpenTarget(pool, shuffled(BLOCKS, 1))
    options = ReceiveOptions(kinds=("tcp",), host=FAR, stall_timeout_s=STALL_S)
    server = DataServer(ChannelIdentity(RECEIVER, 1, layout(BLOCK)), target, options)
    with link.far():
        address = await server.start()
    send = SendOptions(kinds=("tcp",), stall_timeout_s=STALL_S)
    with link.near():  # connections are made whenever one is needed
        channels = ChannelPool(ChannelIdentity(SENDER, 1, layout(BLOCK)), source, send)
        claim = reservation(address, IN_ORDER, BLOCKS)
        began = time.perf_counter()
        counted_from, moved = began, 0
        while time.perf_counter() < began + seconds:
            await channels.put(claim, [Run(0, 0, BLOCKS)])
            moved += BLOCKS * BLOCK
            if counted_from == began and time.perf_counter() >= began + seconds / 3:
                counted_from, moved = time.perf_counter(), 0
        elapsed_s = time.perf_counter() - counted_from
        facts = channels.statistics()
        await channels.close()
    await server.close()
    os.close(source.fd)
    os.close(pool.fd)
    again = sum(meter.retransmits for meter in facts.links.values())
    return {"what": "kvmesh", "mbit_s": round(8e-6 * moved / elapsed_s, 1), "retransmits": again}


def iperf(link: PacketLink, streams: int, control: str, seconds: int) -> Row:
    """Goodput of iperf3 as the receiver counts it."""
    serve = ["iperf3", "-s", "-1", "-B", FAR, "--forceflush"]
    with link.far():
        server = subprocess.Popen(serve, stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    while "listening" not in server.stdout.readline():
        pass
    load = ["-P", str(streams), "-t", str(seconds), "-O", "2", "-C", control, "-J"]
    with link.near():
        client = subprocess.run(
            ["iperf3", "-c", FAR, *load], capture_output=True, text=True, check=True
        )
    server.communicate(timeout=60)
    end: dict[str, Any] = json.loads(client.stdout)["end"]
    return {
        "what": f"iperf3 x{streams}, {control}",
        "mbit_s": round(end["sum_received"]["bits_per_second"] / 1e6, 1),
        "retransmits": end["sum_sent"]["retransmits"],
    }


def run(seconds: float, streams: Sequence[int]) -> list[Row]:
    """Every loss, ours and iperf3 in turn."""
    rows: list[Row] = []
    for loss in LOSSES:
        with packet_link(Weather(loss=loss, delay_s=DELAY_S, rate=RATE)) as link:
            own = uvloop.run(ours(link, 3 * seconds))
            others = [
                iperf(link, count, control, int(seconds))
                for control in CONTROLS
                for count in streams
            ]
        for row in (own, *others):
            rows.append({"loss_percent": 100 * loss, **row})
            sys.stderr.write(f"{rows[-1]}\n")
    return rows


def targets(rows: Sequence[Row]) -> list[Target]:
    """Ours over the best of iperf3, for every loss."""
    found = []
    for loss in dict.fromkeys(row["loss_percent"] for row in rows):
        rates = {row["what"]: row["mbit_s"] for row in rows if row["loss_percent"] == loss}
        own = rates.pop("kvmesh")
        name = f"{loss:g} % loss: over iperf3 at its best"
        found.append(Target(name, own / max(rates.values()), GOAL))
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Runs, prints and saves."""
    parser = argparse.ArgumentParser("python -m benchmarks.long_path")
    parser.add_argument("--seconds", type=float, default=8.0, help="of each run of iperf3")
    parser.add_argument("--streams", type=int, nargs="+", default=list(STREAMS))
    parser.add_argument("--out", type=Path, default=RESULTS / "long_path.json")
    arguments = parser.parse_args(argv)
    why = missing() or ("" if shutil.which("iperf3") else "needs iperf3")
    if why:
        sys.exit(f"benchmarks.long_path: {why}")
    rows = run(arguments.seconds, arguments.streams)
    result = document(rows, targets(rows), 1, NOTES)
    save(result, arguments.out)
    sys.stdout.write(markdown(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
