"""NIXL (UCX) under the load of `benchmarks.transfer`; run by its interpreter, not by ours.

`UCX_TLS=... python peer_nixl.py shm|tcp '[[sizes], runs, seed]'` starts the other end itself.
"""

from __future__ import annotations

import base64
from collections.abc import Callable
from typing import Any

from peer_load import Range, Send, run

try:
    from nixl._api import nixl_agent, nixl_agent_config
except ImportError:  # the extra brings the build for one CUDA, without the front
    from nixl_cu12._api import nixl_agent, nixl_agent_config


class Nixl:
    """An agent with the UCX backend."""

    def __init__(self, name: str) -> None:
        # The end that sends looks for its completions itself: a thread that does so as well would
        # take the core that the other end needs.
        is_target = name == "receiver"
        self._agent = nixl_agent(name, nixl_agent_config(is_target, backends=["UCX"]))

    def register(self, address: int, num_bytes: int) -> dict[str, Any]:
        """The other end needs the agent's metadata."""
        self._agent.register_memory([(address, num_bytes, 0, "")], "DRAM")
        return {"meta": base64.b64encode(self._agent.get_agent_metadata()).decode()}

    def sender(self, told: dict[str, Any]) -> Send:
        """Writes, prepared once and repeated."""
        agent = self._agent
        agent.add_remote_agent(base64.b64decode(told["meta"]))

        def send(local: list[Range], remote: list[Range]) -> Callable[[], None]:
            here, there = (
                agent.get_xfer_descs([(*each, 0) for each in ranges], "DRAM")
                for ranges in (local, remote)
            )
            handle = agent.initialize_xfer("WRITE", here, there, "receiver")

            def work() -> None:
                state = agent.transfer(handle)
                while state not in ("DONE", "ERR"):
                    state = agent.check_xfer_state(handle)
                assert state == "DONE", state

            return work

        return send


if __name__ == "__main__":
    run("nixl", __file__, Nixl)
