"""The ranks of one host whose leader is on another: starts them, and ends them with it.

Torch-free. Tests: tests/unit/engine/test_rank_host.py, tests/vllm/test_rank_hosts.py.
"""

from __future__ import annotations

import contextlib
import socket
import subprocess
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from kvmesh.core.errors import ConfigError, LostError
from kvmesh.engine.rank_join import Join, join_message
from kvmesh.engine.rank_lines import LineKind, cut, dial
from kvmesh.engine.vllm_check import file_identity, installed_version
from kvmesh.engine.vllm_ranks import FOLLOWER, end_follower, start_follower
from kvmesh.telemetry.logs import event_logger

log = event_logger(__name__)

_AGAIN_S = 1.0
_TELL_EVERY = 30


@dataclass(frozen=True, slots=True)
class Builds:
    """Software and checkpoint of a host; all hosts of an engine need the same.

    Attributes:
        checkpoint: identity of the model's files.
        vllm: version.
    """

    checkpoint: str
    vllm: str

    @classmethod
    def of(cls, folder: Path) -> Builds:
        """Returns those of this host.

        Args:
            folder: of the checkpoint.

        Raises:
            CheckpointError: it is not whole.
        """
        return cls(file_identity(folder, "ranks"), installed_version())

    def check(self, leaders: Mapping[str, Any]) -> None:
        """Compares with the leader's.

        Raises:
            ConfigError: they differ.
        """
        if leaders["vllm"] != self.vllm:
            raise ConfigError(
                f"the leader has vLLM {leaders['vllm']}, and this host {self.vllm}: install the "
                "same on all hosts of the worker"
            )
        if leaders["checkpoint"] != self.checkpoint:
            raise ConfigError(
                "ranks.model is another checkpoint than the leader's: give all hosts of the "
                "worker the same files"
            )


class RankHost:
    """Serves one leader after another."""

    def __init__(
        self,
        number: int,
        join: Join,
        builds: Builds,
        *,
        command: Sequence[str] = FOLLOWER,
        again_s: float = _AGAIN_S,
    ) -> None:
        """Starts nothing yet.

        Args:
            number: of this host, from 1 on.
            join: of any rank.
            command: as of `Ranks`.
            again_s: seconds between two attempts to reach the leader.
        """
        self._number = number
        self._join = join
        self._builds = builds
        self._command = command
        self._again_s = again_s
        self._leaving = threading.Event()
        self._line: socket.socket | None = None
        self._lock = threading.Lock()

    def run(self) -> None:
        """Waits for the leader, starts its ranks, and returns when it or one of them has ended.

        Raises:
            ConfigError: the leader does not take this host.
        """
        reached = self._reached()
        if reached is None:
            return
        line, told = reached
        processes: list[subprocess.Popen[bytes]] = []
        try:
            self._builds.check(told)
            for rank in told["ranks"]:
                process, end = start_follower(
                    self._command, join_message(replace(self._join, rank=int(rank)))
                )
                end.close()
                processes.append(process)
                threading.Thread(
                    target=self._watch, args=(process, line), name=f"rank-{rank}", daemon=True
                ).start()
            log.info("ranks_started", ranks=told["ranks"], leader=self._join.leader)
            with contextlib.suppress(OSError):
                line.recv(1)  # it says nothing: this returns when it ends
            log.info("ranks_end", leader=self._join.leader)
        finally:
            line.close()
            for process in processes:
                end_follower(process)

    @property
    def is_leaving(self) -> bool:
        """Whether no further leader is served."""
        return self._leaving.is_set()

    def leave(self) -> None:
        """Serves no leader after the present one; `run` returns at once if there is none."""
        self._leaving.set()

    def close(self) -> None:
        """Ends the ranks, and with them their leader; `run` returns. May be called again."""
        with self._lock:
            self._leaving.set()
            if self._line is not None:
                cut(self._line)

    def _reached(self) -> tuple[socket.socket, dict[str, Any]] | None:
        """The line to the leader and what it told; None after `leave`."""
        access, attempt = self._join.credentials.access(), 0
        while not self._leaving.is_set():
            try:
                found = dial(
                    self._join.leader, self._join.port, access, LineKind.HOST, self._number
                )
            except LostError as error:
                if attempt % _TELL_EVERY == 0:
                    log.info("waiting_for_leader", reason=str(error))
                attempt += 1
                self._leaving.wait(self._again_s)
                continue
            with self._lock:
                if not self._leaving.is_set():
                    self._line = found[0]
                    return found
            found[0].close()
        return None

    def _watch(self, process: subprocess.Popen[bytes], line: socket.socket) -> None:
        code = process.wait()
        if code:
            log.error("rank_lost", pid=process.pid, exit_code=code)
        cut(line)
