"""NIXL (UCX) under the load of `benchmarks.transfer`; run by its interpreter, not by ours.

`UCX_TLS=... python peer_nixl.py shm|tcp '[[sizes], runs, seed]'` starts the other end itself.
"""

from __future__ import annotations

import base64
import json
import sys
from collections.abc import Callable
from typing import Any

from peer_load import MIB, OtherEnd, Range, memory, quiet_stdout, rows, say

try:
    from nixl._api import nixl_agent, nixl_agent_config
except ImportError:  # the extra brings the build for one CUDA, without the front
    from nixl_cu12._api import nixl_agent, nixl_agent_config


def agent(name: str) -> Any:
    """An agent with the UCX backend."""
    return nixl_agent(name, nixl_agent_config(backends=["UCX"]))


def receive(num_bytes: int) -> None:
    """The other end: registers its memory and waits."""
    out = quiet_stdout()
    me = agent("receiver")
    array, address = memory(num_bytes)
    me.register_memory([(address, num_bytes, 0, "")], "DRAM")
    meta = base64.b64encode(me.get_agent_metadata()).decode()
    say(out, {"meta": meta, "address": address})
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
    me = agent("sender")
    array, address = memory(total)
    me.register_memory([(address, total, 0, "")], "DRAM")
    me.add_remote_agent(base64.b64decode(other.said["meta"]))

    def send(local: list[Range], remote: list[Range]) -> Callable[[], None]:
        here, there = (
            me.get_xfer_descs([(*each, 0) for each in ranges], "DRAM") for ranges in (local, remote)
        )
        handle = me.initialize_xfer("WRITE", here, there, "receiver")

        def work() -> None:
            state = me.transfer(handle)
            while state not in ("DONE", "ERR"):
                state = me.check_xfer_state(handle)
            assert state == "DONE", state

        return work

    ends = (address, int(other.said["address"]))
    say(out, {"rows": rows(f"nixl {kind}", sizes, runs, seed, ends, other.pid, send)})
    other.close()
    del array


if __name__ == "__main__":
    main()
