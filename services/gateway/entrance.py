"""Authenticates and admits every call, then finds the frontend of the model that it names.

Tests: tests/integration/test_gateway_http.py, tests/integration/test_gateway_models.py.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvmesh.core.errors import GoneError, InvalidRequestError
from kvmesh.core.types import Refusal, RefusalReason
from kvmesh.metadata.store import StoreUnavailableError
from services.gateway.api.model_checks import model_not_found
from services.gateway.errors import Stage, StageRefusedError
from services.gateway.frontend import Frontend, busy
from services.gateway.request.choice import Caller
from services.gateway.request.event_ids import HEADER, GivenId
from services.gateway.request.journal import Journal
from services.gateway.request.kept_stream import Kept, kept_by_client, owner_of
from services.gateway.request.mesh import Mesh
from services.gateway.tenants.access import KeyRing
from services.gateway.tenants.admission import Admission
from services.gateway.tenants.entry import Admitted


class Entrance:
    """Admits calls, and finds the frontend of each call's model.

    Args:
        mesh: the mesh of any model; only the parts that all models share are used.
        frontends: one per model; a call without a model takes the first. No two share a name.

    Attributes:
        frontends: one per model.
        journal: the streams that another gateway may resume; None without a journal.
    """

    def __init__(
        self,
        mesh: Mesh,
        frontends: Sequence[Frontend],
        keys: KeyRing,
        admission: Admission,
        journal: Journal | None = None,
    ) -> None:
        self._mesh = mesh
        self._keys = keys
        self._admission = admission
        self._by_name = {name: each for each in frontends for name in each.served.model}
        self._by_name[""] = frontends[0]
        self.frontends = tuple(frontends)
        self.journal = journal
        self.limits = mesh.limits
        self.metrics = mesh.metrics

    def of(self, name: str) -> Frontend:
        """The frontend of a model, or of an adapter's model; an empty name takes the first.

        Raises:
            ModelNotFoundError: no model has this name; the message lists all names.
        """
        found = self._by_name.get(name)
        if found is None:  # a model's name hides an adapter's
            with_it = (each for each in self.frontends if name in each.served.adapters)
            found = next(with_it, None)
        if found is None:
            raise model_not_found(name, self.names)
        return found

    @property
    def names(self) -> list[str]:
        """All model names that clients may use now, each once."""
        return list(dict.fromkeys(name for each in self.frontends for name in each.served.every))

    @property
    def not_ready(self) -> dict[str, str]:
        """The reason why requests for a model cannot be served now, by model; empty if all can."""
        reasons = {each.served_name: each.not_ready for each in self.frontends}
        return {name: reason for name, reason in reasons.items() if reason}

    @property
    def missing_native(self) -> dict[str, list[str]]:
        """Native libraries that workers lack, by worker. Such workers run slower."""
        return {
            name: lacks for each in self.frontends for name, lacks in each.missing_native.items()
        }

    @property
    def is_draining(self) -> bool:
        """Whether the gateway admits no new calls."""
        return self._admission.draining

    def check_key(self, authorization: str) -> None:
        """Authenticates a caller.

        Raises:
            AuthenticationError: the key is missing or not accepted.
        """
        self._keys.check(authorization)

    def admit(self, authorization: str) -> Admitted:
        """Authenticates a caller and admits its request; the ticket goes into `Caller`.

        Entering the returned context raises:
          AuthenticationError: the key is missing or not accepted.
          StageRefusedError: draining, or a quota of the caller's tenant is used up.
        """
        return Admitted(self._keys, self._admission, self.metrics, authorization)

    async def turn(self, arrived_at: float, ttft_ms: int) -> None:
        """Waits until a call may start. Call it before any work is done for the call.

        Args:
            arrived_at: when the call came to this machine, in seconds on the loop's clock.
            ttft_ms: its longest wait for workers; 0 takes the default.

        Raises:
            StageRefusedError: the call can no longer be served in time.
        """
        doorstep, patience_s = self._mesh.doorstep, self.limits.patience_s(ttft_ms)
        if not doorstep.is_hopeless(patience_s):
            waited_s = await doorstep.enter(arrived_at)
            if waited_s <= patience_s:
                return
        raise busy(
            self.metrics,
            f"requests wait {doorstep.age_s:.1f} s before this gateway starts them; this one may "
            f"wait {patience_s:g} s",
            doorstep.age_s,
        )

    async def kept(self, given: GivenId, kind: str, caller: Caller, body: bytes) -> Kept:
        """Finds a stream that a client wants to resume.

        Args:
            kind: the API of this call.
            body: the body that the client sent this time; may be empty.

        Raises:
            GoneError: it is not kept, or it belongs to another caller; the message is the same.
            InvalidRequestError: that stream has another body.
            StageRefusedError: the journal does not answer now.
        """
        owner = owner_of(caller.ticket)
        kept = kept_by_client(given, owner, caller, body) if body and given.is_whole else None
        if kept is None:
            kept = await self._in_journal(given)
        if kept is None or kept.head.owner != owner:
            raise GoneError("Last-Event-ID: no record of this stream is kept")
        if kept.head.kind != kind:
            raise GoneError(f"Last-Event-ID: the stream is a {kept.head.kind}")
        if body and body != kept.head.body:
            raise InvalidRequestError("Last-Event-ID: the stream began with another body", HEADER)
        return kept

    async def _in_journal(self, given: GivenId) -> Kept | None:
        try:
            return None if self.journal is None else await self.journal.read(given.key)
        except StoreUnavailableError as error:
            message = "the journal of streams does not answer"
            refusal = Refusal(RefusalReason.BUSY, message, retry_after_ms=1000)
            raise StageRefusedError(refusal, Stage.GATEWAY) from error


def model_of(content: object) -> str:
    """The model name in a parsed body; empty if it has none, or one that is not a string."""
    name = content.get("model") if isinstance(content, dict) else None
    return name if isinstance(name, str) else ""
