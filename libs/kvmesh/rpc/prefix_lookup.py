"""The scheduler's client of `KvManagerService.MatchPrefix`: finds holders of the longest prefix.

It is used until the index that follows the store (`prefix_feed.py`) is filled. It never raises an
error: without an answer in time, the caller continues without cache knowledge.
Tests: tests/integration/test_kvmanager.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvmesh.core.errors import LostError
from kvmesh.core.slots import PrefixMatch
from kvmesh.core.types import BlockHash
from kvmesh.rpc.channels import NO_ACCESS, MeshAccess, open_channel
from kvmesh.rpc.convert import prefix_match_from_proto
from kvmesh.rpc.correlator import Correlator
from kvmesh.rpc.direct import DirectClient
from kvmesh.rpc.stream import PeerStream
from kvmesh.v1 import kv_manager_service_pb2 as pb
from kvmesh.v1 import kv_manager_service_pb2_grpc as pb_grpc


@dataclass(frozen=True, slots=True)
class PrefixMatches:
    """The answer to a lookup.

    Attributes:
        matches: workers with at least one leading block, longest first.
        known: False if no kvmanager answered; `matches` is then empty.
        why: the reason if `known` is False: `late`, `degraded` or `away`.
    """

    matches: tuple[PrefixMatch, ...]
    known: bool
    why: str = ""


_AWAY = PrefixMatches((), known=False, why="away")
_LATE = PrefixMatches((), known=False, why="late")
_DEGRADED = PrefixMatches((), known=False, why="degraded")


class PrefixLookup:
    """Asks a kvmanager over one stream; needs `run` in a background task.

    Args:
        target: the kvmanager's `host:port`.
    """

    def __init__(self, target: str, access: MeshAccess = NO_ACCESS) -> None:
        self._target = target
        self._access = access
        self._answers: Correlator[pb.MatchPrefixRequest, pb.MatchPrefixResponse] = Correlator(
            lambda answer: answer.correlation_id
        )
        self._stream: PeerStream[pb.MatchPrefixRequest, pb.MatchPrefixResponse] | None = None

    @property
    def connected(self) -> bool:
        """Whether the kvmanager is connected."""
        return self._stream is not None and self._stream.connected

    @property
    def num_waiting(self) -> int:
        """Number of questions without an answer."""
        return self._answers.num_waiting

    async def run(self) -> None:
        """Connects and reconnects until cancelled."""
        async with open_channel(self._target, self._access) as channel:
            stub = pb_grpc.KvManagerServiceStub(channel)
            self._stream = PeerStream(
                f"kvmanager@{self._target}",
                stub.MatchPrefix,
                self._answers.receive_joined,
                on_down=self._answers.fail_all,
                joins=True,
                direct=DirectClient.of(self._target, pb.MatchPrefixResponse, self._access.tls),
            )
            await self._stream.run()

    async def match(
        self, namespace: str, hashes: Sequence[BlockHash], timeout_s: float
    ) -> PrefixMatches:
        """The longest cached prefix of every worker.

        Args:
            namespace: the layout's model fingerprint.
            hashes: chained hashes of the request's full blocks, first to last.
            timeout_s: longest wait; after it the answer is "not known".
        """
        if not hashes:
            return PrefixMatches((), known=True)
        if self._stream is None:
            return _AWAY
        correlation_id = self._answers.next_id()
        question = pb.MatchPrefixRequest(
            correlation_id=correlation_id, namespace=namespace, block_hashes=b"".join(hashes)
        )
        try:
            answer = await self._answers.ask(self._stream, correlation_id, question, timeout_s)
        except LostError:
            return _LATE if self.connected else _AWAY
        if answer.degraded:
            return _DEGRADED
        return PrefixMatches(tuple(map(prefix_match_from_proto, answer.matches)), known=True)
