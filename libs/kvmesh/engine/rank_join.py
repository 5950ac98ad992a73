"""How the process of a rank reaches a leader on another host.

Torch-free. Tests: tests/unit/engine/test_rank_host.py.
"""

from __future__ import annotations

import socket
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from kvmesh.core.mesh_secret import load_secret
from kvmesh.engine.rank_lines import LineKind, RankAccess, dial
from kvmesh.rpc.channels import PeerTls
from kvmesh.rpc.tls import client_context
from kvmesh.transfer.tls import DataTls


@dataclass(frozen=True, slots=True)
class Credentials:
    """Credentials of a host, as its options name them.

    Attributes:
        tls: `ranks.tls`.
        peers: `ranks.peers`, by name.
        secret_file, secret: `server.secret_file` and `server.secret`.
    """

    tls: PeerTls
    peers: tuple[str, ...] = ()
    secret_file: str = ""
    secret: str = field(default="", repr=False)

    def access(self) -> RankAccess:
        """Reads the files.

        Raises:
            ConfigError: one cannot be used.
        """
        context = client_context(self.tls, "ranks.tls")
        tls = None
        if context is not None:
            tls = DataTls(context, frozenset(self.peers), self.tls.peer_name)
        return RankAccess(tls, load_secret(self.secret_file, self.secret))


@dataclass(frozen=True, slots=True)
class Join:
    """Arguments of a rank's process whose leader is on another host.

    Attributes:
        leader, port: where the leader listens.
        rank: number of the rank.
        folder: checkpoint on this host.
        device: number of the CUDA device of this host's first rank; None: ranks compute on CPUs.
    """

    leader: str
    port: int
    rank: int
    folder: Path
    device: int | None
    credentials: Credentials

    def dial(self, kind: LineKind) -> socket.socket:
        """Opens a line of this rank.

        Raises:
            LostError, RefusedLineError: as `rank_lines.dial`.
        """
        line, _ = dial(self.leader, self.port, self.credentials.access(), kind, self.rank)
        return line


def join_message(join: Join) -> dict[str, Any]:
    """The message that tells a rank to dial its leader."""
    return {"join": asdict(join)}


def read_join(message: Mapping[str, Any]) -> Join | None:
    """Reads a message of `join_message`; None for another one."""
    if "join" not in message:
        return None
    fields = dict(message["join"])
    shown = dict(fields["credentials"])
    shown["tls"], shown["peers"] = PeerTls(**shown["tls"]), tuple(shown["peers"])
    fields["folder"], fields["credentials"] = Path(fields["folder"]), Credentials(**shown)
    return Join(**fields)
