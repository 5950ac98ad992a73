"""NIXL (UCX) under the load of `benchmarks.transfer`; run by its interpreter, not by ours.

`python peer_nixl.py shm|tcp '[[sizes], runs, seed]'` starts the other end itself and prints rows.
"""

from __future__ import annotations

import base64
import json
import os
import random
import statistics
import subprocess
import sys
import time

MIB, PIECE = 1 << 20, 16 << 10
# UCX wants a transport with failure handling beside shared memory; the data does not take it.
TRANSPORTS = {"shm": "sm,tcp,self", "tcp": "tcp,self"}


def agent(name):
    from nixl._api import nixl_agent, nixl_agent_config

    return nixl_agent(name, nixl_agent_config(backends=["UCX"]))


def memory(num_bytes):
    import numpy as np

    array = np.ones(num_bytes, dtype=np.uint8)
    return array, array.ctypes.data


def say(stream, **message):
    stream.write(json.dumps(message) + "\n")
    stream.flush()


def cpu_seconds(pid):
    with open(f"/proc/{pid}/stat") as stat:
        fields = stat.read().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def spread(values):
    return {
        "min": round(min(values), 3),
        "median": round(statistics.median(values), 3),
        "max": round(max(values), 3),
    }


def receive(num_bytes):
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # the library prints
    me = agent("receiver")
    array, address = memory(num_bytes)
    me.register_memory([(address, num_bytes, 0, "")], "DRAM")
    meta = base64.b64encode(me.get_agent_metadata()).decode()
    say(out, meta=meta, address=address)
    sys.stdin.read()
    del array


def measure(me, local, remote, num_bytes, runs, pids):
    handle = me.initialize_xfer("WRITE", local, remote, "receiver")
    seconds = []
    for index in range(runs + 1):
        if index == 1:
            cpu = sum(cpu_seconds(pid) for pid in pids)
        started = time.perf_counter()
        state = me.transfer(handle)
        while state not in ("DONE", "ERR"):
            state = me.check_xfer_state(handle)
        assert state == "DONE", state
        seconds.append(time.perf_counter() - started)
    cpu = sum(cpu_seconds(pid) for pid in pids) - cpu
    me.release_xfer_handle(handle)
    return {
        "gb_s": spread([num_bytes / second / 1e9 for second in seconds[1:]]),
        "ms": spread([second * 1e3 for second in seconds[1:]]),
        "cpu_s_per_gib": round(cpu / (runs * num_bytes / (1 << 30)), 3),
    }


def ranges(shape, base, count, seed):
    if shape == "contiguous":
        return [(base, count * PIECE, 0)]
    order = list(range(count))
    random.Random(seed).shuffle(order)
    return [(base + block * PIECE, PIECE, 0) for block in order]


def main():
    kind = sys.argv[1]
    if kind == "receive":
        receive(int(sys.argv[2]))
        return
    sizes, runs, seed = json.loads(sys.argv[2])
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    os.environ["UCX_TLS"] = TRANSPORTS[kind]
    total = max(sizes) * MIB
    other = subprocess.Popen(
        [sys.executable, __file__, "receive", str(total)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    said = json.loads(other.stdout.readline())
    me = agent("sender")
    _array, address = memory(total)
    me.register_memory([(address, total, 0, "")], "DRAM")
    me.add_remote_agent(base64.b64decode(said["meta"]))
    rows = []
    for mib in [0.0625, *sizes]:
        for shape in ("contiguous", "16 KiB pieces"):
            count = int(mib * MIB) // PIECE
            local = me.get_xfer_descs(ranges(shape, address, count, seed), "DRAM")
            remote = me.get_xfer_descs(ranges(shape, said["address"], count, seed + 1), "DRAM")
            repeats = runs if mib >= 1 else 500
            row = measure(me, local, remote, int(mib * MIB), repeats, (os.getpid(), other.pid))
            rows.append({"what": f"nixl {kind}", "shape": shape, "mib": mib, "concurrent": 1, **row})
    other.stdin.close()
    other.wait(timeout=30)
    say(out, rows=rows)


if __name__ == "__main__":
    main()
