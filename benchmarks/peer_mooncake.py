"""Mooncake's transfer engine (TCP) under the load of `benchmarks.transfer`; run by its interpreter.

`python peer_mooncake.py tcp '[[sizes], runs, seed]'` starts the other end itself and prints rows.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time

from peer_nixl import MIB, PIECE, cpu_seconds, memory, ranges, say, spread


def engine():
    from mooncake.engine import TransferEngine

    made = TransferEngine()
    assert made.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", "") == 0, "no engine"
    return made


def receive(num_bytes):
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # the library prints
    me = engine()
    array, address = memory(num_bytes)
    assert me.register_memory(address, num_bytes) == 0
    say(out, port=me.get_rpc_port(), address=address)
    sys.stdin.read()
    del array


def measure(me, peer, local, remote, num_bytes, runs, pids):
    addresses = ([a for a, _, _ in local], [a for a, _, _ in remote], [n for _, n, _ in local])
    seconds = []
    for index in range(runs + 1):
        if index == 1:
            cpu = sum(cpu_seconds(pid) for pid in pids)
        started = time.perf_counter()
        assert me.batch_transfer_sync_write(peer, *addresses) == 0, "transfer failed"
        seconds.append(time.perf_counter() - started)
    cpu = sum(cpu_seconds(pid) for pid in pids) - cpu
    return {
        "gb_s": spread([num_bytes / second / 1e9 for second in seconds[1:]]),
        "ms": spread([second * 1e3 for second in seconds[1:]]),
        "cpu_s_per_gib": round(cpu / (runs * num_bytes / (1 << 30)), 3),
    }


def main():
    kind = sys.argv[1]
    if kind == "receive":
        receive(int(sys.argv[2]))
        return
    sizes, runs, seed = json.loads(sys.argv[2])
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    total = max(sizes) * MIB
    other = subprocess.Popen(
        [sys.executable, __file__, "receive", str(total)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    said = json.loads(other.stdout.readline())
    me = engine()
    _array, address = memory(total)
    assert me.register_memory(address, total) == 0
    peer = f"127.0.0.1:{said['port']}"
    rows = []
    for mib in [0.0625, *sizes]:
        for shape in ("contiguous", "16 KiB pieces"):
            count = int(mib * MIB) // PIECE
            local = ranges(shape, address, count, seed)
            remote = ranges(shape, said["address"], count, seed + 1)
            repeats = runs if mib >= 1 else 500
            pids = (os.getpid(), other.pid)
            row = measure(me, peer, local, remote, int(mib * MIB), repeats, pids)
            head = {"what": f"mooncake {kind}", "shape": shape, "mib": mib, "concurrent": 1}
            rows.append({**head, **row})
    other.stdin.close()
    other.wait(timeout=30)
    say(out, rows=rows)


if __name__ == "__main__":
    main()
