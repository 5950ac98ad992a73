"""The process of a rank other than 0; `Ranks` starts it.

    python -m kvmesh.engine.vllm_follower FD

Loads its part of the model, then computes the steps that the leader sends over the socket FD. It
ends when the leader ends, also in the middle of a step. Tests: tests/vllm/test_ranks.py.
"""

from __future__ import annotations

import os
import socket
import sys
import threading
from typing import TYPE_CHECKING, Any

from kvmesh.engine.vllm_messages import read_change, read_request, read_step, receive

if TYPE_CHECKING:
    from kvmesh.engine.vllm_internals import VllmExecutor
    from kvmesh.engine.vllm_memory import MakeDriver


def main(make_driver: MakeDriver | None = None) -> None:
    """Computes steps until the leader ends.

    Args:
        make_driver: as of `DeviceCache`; None: `CudaDriver`.
    """
    threading.Thread(target=_end_with_leader, name="leader", daemon=True).start()
    with socket.socket(fileno=int(sys.argv[-1])) as leader:
        request, place = read_request(receive(leader))
        # vLLM reads its environment variables on import; they are inherited from the leader.
        from kvmesh.engine.vllm_internals import VllmExecutor  # noqa: PLC0415
        from kvmesh.engine.vllm_memory import FollowerCache, cuda_driver  # noqa: PLC0415

        try:
            driver = None
            if request.device is not None:
                driver = (make_driver or cuda_driver)(request.device + place.rank)
            memory = FollowerCache(leader, driver)
            executor = VllmExecutor(request, memory, place)
            memory.tell_leader(executor.part, executor.value_bytes)
            _follow(executor, leader)
        except EOFError:
            os._exit(0)


def _end_with_leader() -> None:
    os.read(0, 1)
    os._exit(0)


def _follow(executor: VllmExecutor, leader: socket.socket) -> None:
    while True:
        message = receive(leader)
        change = read_change(message)
        if change is not None:
            executor.change_adapters(change)
            continue
        step = read_step(message)

        def hear() -> dict[str, Any]:
            return receive(leader)

        executor.follow(step, hear)


if __name__ == "__main__":
    main()
