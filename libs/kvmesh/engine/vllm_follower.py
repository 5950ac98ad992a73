"""The process of a rank other than 0; `Ranks` starts it, or `RankHost` on another host.

    python -m kvmesh.engine.vllm_follower FD

Loads its part of the model, then computes the steps that the leader sends over the socket FD, or
over a line that it opens to a leader on another host. It ends when its starter ends, also in the
middle of a step. Tests: tests/vllm/test_ranks.py, tests/vllm/test_rank_hosts.py.
"""

from __future__ import annotations

import os
import socket
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from kvmesh.engine.rank_join import Join, read_join
from kvmesh.engine.rank_lines import LineKind
from kvmesh.engine.vllm_messages import (
    EngineRequest,
    Place,
    encoded,
    read_change,
    read_request,
    read_step,
    receive,
)

if TYPE_CHECKING:
    from kvmesh.engine.vllm_internals import VllmExecutor
    from kvmesh.engine.vllm_memory import MakeDriver


def main(make_driver: MakeDriver | None = None) -> None:
    """Computes steps until the leader ends.

    Args:
        make_driver: of devices; None: `CudaDriver`.
    """
    threading.Thread(target=_end_with_starter, name="starter", daemon=True).start()
    with socket.socket(fileno=int(sys.argv[-1])) as starter:
        try:
            message = receive(starter)
            join = read_join(message)
            if join is None:
                _compute(starter, *read_request(message), make_driver)
            else:
                _compute_for(join, make_driver)
        except EOFError:
            os._exit(0)


def _end_with_starter() -> None:
    os.read(0, 1)
    os._exit(0)


def _compute_for(join: Join, make_driver: MakeDriver | None) -> None:
    leader = join.dial(LineKind.STEPS)
    request, place = read_request(receive(leader))
    request = replace(request, folder=join.folder, device=join.device)
    dial = partial(join.dial, LineKind.COPIES)
    _compute(leader, request, place.meets_at(join.leader), make_driver, dial)


def _compute(
    leader: socket.socket,
    request: EngineRequest,
    place: Place,
    make_driver: MakeDriver | None,
    dial: Callable[[], socket.socket] | None = None,
) -> None:
    # vLLM reads its environment variables on import; they are inherited from the starter.
    from kvmesh.engine.vllm_internals import VllmExecutor  # noqa: PLC0415
    from kvmesh.engine.vllm_memory import FollowerCache, cuda_driver, driver_of  # noqa: PLC0415

    driver = None
    if request.is_divided:
        driver = driver_of(request, place.local, make_driver or cuda_driver)
    memory = FollowerCache(leader, driver, dial)
    executor = VllmExecutor(request, memory, place)
    memory.tell_leader(executor.part, executor.value_bytes)
    _follow(executor, leader)


def _follow(executor: VllmExecutor, leader: socket.socket) -> None:
    while True:
        message = receive(leader)
        change = read_change(message)
        if change is not None:
            leader.sendall(encoded({"problem": executor.adapter_problem(change)}))
            continue
        step = read_step(message)

        def hear() -> dict[str, Any]:
            return receive(leader)

        executor.follow(step, hear)


if __name__ == "__main__":
    main()
