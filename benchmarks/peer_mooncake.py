"""Mooncake's transfer engine (TCP) under the load of `benchmarks.transfer`; run by its interpreter.

`python peer_mooncake.py tcp '[[sizes], runs, seed]'` starts the other end itself and prints rows.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any

from mooncake.engine import TransferEngine
from peer_load import MIB, OtherEnd, Range, memory, quiet_stdout, rows, say

_MAX_BATCH = 256


def engine() -> Any:
    """An engine without a metadata server."""
    made = TransferEngine()
    assert made.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", "") == 0, "no engine"
    return made


def receive(num_bytes: int) -> None:
    """The other end: registers its memory and waits."""
    out = quiet_stdout()
    me = engine()
    array, address = memory(num_bytes)
    assert me.register_memory(address, num_bytes) == 0, "not registered"
    say(out, {"port": me.get_rpc_port(), "address": address})
    sys.stdin.read()
    del array


def main() -> None:
    """Sends and prints rows."""
    kind = sys.argv[1]
    if kind == "receive":
        receive(int(sys.argv[2]))
        return
    sizes, runs, seed = json.loads(sys.argv[2])
    out = quiet_stdout()
    total = max(sizes) * MIB
    other = OtherEnd(__file__, total)
    me = engine()
    array, address = memory(total)
    assert me.register_memory(address, total) == 0, "not registered"
    peer = f"127.0.0.1:{other.said['port']}"

    def send(local: list[Range], remote: list[Range]) -> Callable[[], None]:
        here, there = ([at for at, _ in ranges] for ranges in (local, remote))
        lengths = [length for _, length in local]

        def work() -> None:
            # A longer batch overruns its queue and fails.
            for start in range(0, len(lengths), _MAX_BATCH):
                part = slice(start, start + _MAX_BATCH)
                failed = me.batch_transfer_sync_write(peer, here[part], there[part], lengths[part])
                assert not failed, "transfer failed"

        return work

    ends = (address, int(other.said["address"]))
    say(out, {"rows": rows(f"mooncake {kind}", sizes, runs, seed, ends, other.pid, send)})
    other.close()
    del array


if __name__ == "__main__":
    main()
