"""What every call passes before its model is known, and the way to the model's frontend.

Tests: tests/integration/test_gateway_http.py, tests/integration/test_gateway_models.py.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvmesh.core.errors import GoneError, InvalidRequestError, ModelNotFoundError
from kvmesh.core.types import Refusal, RefusalReason
from kvmesh.metadata.store import StoreUnavailableError
from services.gateway.errors import Stage, StageRefusedError
from services.gateway.frontend import Frontend, busy
from services.gateway.request.choice import Caller
from services.gateway.request.event_ids import HEADER, GivenId
from services.gateway.request.journal import Journal, Kept, kept_by_client, owner_of
from services.gateway.request.mesh import Mesh
from services.gateway.tenants.access import KeyRing
from services.gateway.tenants.admission import Admission
from services.gateway.tenants.entry import Admitted


class Entrance:
    """Admits calls, and finds the frontend of the model that each asks for.

    Args:
        mesh: of any model; only what all models share is used.
        frontends: of the models; a call that names none takes the first. No two share a name.

    Attributes:
        frontends: of the models.
        journal: of streams that another gateway may resume; None without one.
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
            ModelNotFoundError: no model has this name; the message has all that there are.
        """
        found = self._by_name.get(name)
        if found is None:  # a model's name hides an adapter's
            with_it = (each for each in self.frontends if name in each.served.adapters)
            found = next(with_it, None)
        if found is None:
            raise ModelNotFoundError(
                f"the model {name!r} does not exist here; served: {', '.join(self.names)}",
                "model",
                "model_not_found",
            )
        return found

    @property
    def names(self) -> list[str]:
        """All that clients may name as a model now, each once."""
        return list(dict.fromkeys(name for each in self.frontends for name in each.served.every))

    @property
    def not_ready(self) -> dict[str, str]:
        """Why requests for a model cannot be served now, by model; empty if all can."""
        reasons = {each.served_name: each.not_ready for each in self.frontends}
        return {name: reason for name, reason in reasons.items() if reason}

    @property
    def missing_native(self) -> dict[str, list[str]]:
        """Native libraries that workers lack, by worker; they run slower without."""
        return {
            name: lacks for each in self.frontends for name, lacks in each.missing_native.items()
        }

    @property
    def is_draining(self) -> bool:
        """Whether nothing new is admitted."""
        return self._admission.draining

    def check_key(self, authorization: str) -> None:
        """Authenticates a caller.

        Raises:
            AuthenticationError: the key is missing or not accepted.
        """
        self._keys.check(authorization)

    def admit(self, authorization: str) -> Admitted:
        """Authenticates a caller and admits its request; the ticket goes into `Caller`.

        Entering the context that it returns raises:
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
            f"requests wait for {doorstep.age_s:.1f} s until this gateway begins with them; "
            f"this one has {patience_s:g} s",
            doorstep.age_s,
        )

    async def kept(self, given: GivenId, kind: str, caller: Caller, body: bytes) -> Kept:
        """A stream that a client wants to go on with.

        Args:
            kind: which API it comes in by.
            body: as the client sent it this time; empty if it did not.

        Raises:
            GoneError: it is not kept, or not for this caller, who is told the same.
            InvalidRequestError: that stream has another body.
            StageRefusedError: the journal does not answer now.
        """
        owner = owner_of(caller.ticket)
        kept = kept_by_client(given, owner, caller, body) if body and given.is_whole else None
        if kept is None:
            kept = await self._in_journal(given)
        if kept is None or kept.head.owner != owner:
            raise GoneError("Last-Event-ID: nothing is kept of this stream")
        if kept.head.kind != kind:
            raise GoneError(f"Last-Event-ID: that stream is a {kept.head.kind}")
        if body and body != kept.head.body:
            raise InvalidRequestError("Last-Event-ID: that stream has another body", HEADER)
        return kept

    async def _in_journal(self, given: GivenId) -> Kept | None:
        try:
            return None if self.journal is None else await self.journal.read(given.key)
        except StoreUnavailableError as error:
            message = "the journal of streams does not answer"
            refusal = Refusal(RefusalReason.BUSY, message, retry_after_ms=1000)
            raise StageRefusedError(refusal, Stage.GATEWAY) from error


def model_of(content: object) -> str:
    """What a parsed body names as its model; empty if it names none that a model could have."""
    name = content.get("model") if isinstance(content, dict) else None
    return name if isinstance(name, str) else ""
