"""The flow that HTTP and gRPC share: from a checked call to generations, and to their text.

Tests: tests/integration/test_gateway_http.py.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

from kvmesh.core.errors import GoneError, InvalidRequestError
from kvmesh.core.types import Refusal, RefusalReason, RequestId, Usage
from kvmesh.core.values import changed
from kvmesh.kv.hashing import packed_tokens
from kvmesh.metadata.store import StoreUnavailableError
from kvmesh.rpc.convert import limit_from_ms
from services.gateway.api.model_checks import (
    ServedNames,
    check_call,
    check_prompt,
    choice_sampling,
)
from services.gateway.api.openai import ApiCall
from services.gateway.errors import Stage, StageRefusedError
from services.gateway.request.choice import Caller, Choice, Delivered, going_on
from services.gateway.request.delivery import Delivery, Sink, together
from services.gateway.request.event_ids import HEADER, GivenId
from services.gateway.request.gate import Gate
from services.gateway.request.journal import Journal, Kept, kept_by_client, owner_of
from services.gateway.request.life import Life
from services.gateway.request.mesh import GenerationRequest, Mesh
from services.gateway.tenants.access import KeyRing
from services.gateway.tenants.admission import Admission
from services.gateway.tenants.entry import Admitted
from services.gateway.text.prompts import prompt_ids, prompt_text, with_tokens
from services.gateway.text.tokenizer import TextTokenizer

MAX_REQUEST_ID_CHARS = 128


def clean_request_id(given: str) -> str:
    """The caller's request id if it can go into headers and logs, else a new one."""
    name = given.strip()[:MAX_REQUEST_ID_CHARS]
    return name if name and name.isascii() and name.isprintable() else os.urandom(12).hex()


class Frontend:
    """Admits, prepares and runs calls.

    Args:
        names: of the model for clients, its own first.

    Attributes:
        limits: of one request.
        journal: of streams that another gateway may resume; None without one.
    """

    def __init__(
        self,
        mesh: Mesh,
        tokenizer: TextTokenizer,
        names: tuple[str, ...],
        keys: KeyRing,
        admission: Admission,
        journal: Journal | None = None,
    ) -> None:
        self._mesh = mesh
        self._keys = keys
        self._admission = admission
        self.tokenizer = tokenizer
        self._names = names
        self.journal = journal
        self.limits = mesh.limits
        self.metrics = mesh.metrics

    @property
    def served_name(self) -> str:
        """The model's own name."""
        return self._names[0]

    @property
    def served(self) -> ServedNames:
        """What clients may name as a model now."""
        return ServedNames(self._names, self._mesh.router.adapters)

    @property
    def not_ready(self) -> str:
        """Why requests cannot be served now; empty if they can."""
        return "draining" if self.is_draining else self._mesh.router.not_ready

    @property
    def missing_native(self) -> dict[str, list[str]]:
        """Native libraries that workers lack, by worker; they run slower without."""
        return self._mesh.router.missing_native

    @property
    def is_draining(self) -> bool:
        """Whether nothing new is admitted."""
        return self._admission.draining

    @property
    def max_model_len(self) -> int:
        """Longest sequence: the fleet's limit, or the model's own while no worker is known."""
        facts = self._mesh.router.facts
        return self.tokenizer.max_model_len if facts is None else facts.max_model_len

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
        doorstep, patience_s = self._mesh.doorstep, self._patience_s(ttft_ms)
        if not doorstep.is_hopeless(patience_s):
            waited_s = await doorstep.enter(arrived_at)
            if waited_s <= patience_s:
                return
        raise self._busy(
            f"requests wait for {doorstep.age_s:.1f} s until this gateway begins with them; "
            f"this one has {patience_s:g} s",
            doorstep.age_s,
        )

    def _patience_s(self, ttft_ms: int) -> float:
        """Longest wait for workers in seconds; 0 takes the default."""
        return (ttft_ms or self.limits.ttft_deadline_ms) / 1000

    def _busy(self, message: str, wait_s: float) -> StageRefusedError:
        refusal = Refusal(RefusalReason.BUSY, message, retry_after_ms=round(wait_s * 1000))
        self.metrics.refused(refusal.reason.value, Stage.GATEWAY.value)
        return StageRefusedError(refusal, Stage.GATEWAY)

    def _check_crowd(self, caller: Caller, num_choices: int) -> None:
        """Refuses a call that could only be refused later.

        Raises:
            StageRefusedError: so many wait for workers that its deadline would pass.
        """
        tenant, lanes = caller.tenant, self._mesh.lanes
        patience_s = self._patience_s(caller.ttft_ms)
        served = self._mesh.router.served(caller.scenario, 0.0)
        if served is None:
            return
        crowd, lag = lanes.of(served.group).crowd, lanes.lag
        is_hopeless = crowd.is_hopeless(tenant.name, patience_s, num_choices)
        if tenant.limits.priority > 0 or not (is_hopeless or lag.is_hopeless(patience_s)):
            return
        wait_s = max(crowd.wait_s(tenant.name, num_choices), lag.now_s)
        raise self._busy(
            f"{crowd.num_waiting} requests wait for workers, about {wait_s:.1f} s; "
            f"this one has {patience_s:g} s",
            wait_s,
        )

    def _checkpoints(
        self, call: ApiCall, caller: Caller, delivered: Delivered | None, adapter: str
    ) -> tuple[str, ...]:
        """Which checkpoint serves each choice, at first the same; empty while none is known.

        Raises:
            GoneError: the client has another number of choices.
        """
        num_choices = len(call.prompts) * call.n
        if delivered is not None:
            if len(delivered.checkpoints) != num_choices:
                raise GoneError("that stream has another number of choices")
            return delivered.checkpoints
        served = self._mesh.router.served(caller.scenario, self._mesh.rng.random(), adapter)
        return ("" if served is None else served.group.fingerprint,) * num_choices

    async def prepare(
        self, call: ApiCall, caller: Caller, delivered: Delivered | None = None
    ) -> list[Choice]:
        """Renders, tokenises and checks a call against the model.

        Args:
            delivered: the part that another gateway delivered; None for a new call.

        Raises:
            InvalidRequestError: names the field and what is allowed.
            ModelNotFoundError: another model is asked for.
            StageRefusedError: too many requests wait for this one to be served in time.
            GoneError: the delivered part does not belong to this call.
        """
        adapter = check_call(call, self.served, self.limits, self.tokenizer.vocab_size)
        if call.priority >= 0 and delivered is None:  # others do not wait behind the crowd
            self._check_crowd(caller, call.n * len(call.prompts))
        seed = call.seed if delivered is None else delivered.seed
        if seed is None:
            seed = self._mesh.rng.getrandbits(64)
        call = changed(call, seed=seed)
        # A caller may repeat its id when it retries; ids inside the mesh are unique.
        base = f"{caller.request_id}-{self._mesh.rng.getrandbits(32):08x}"
        ttft_s = self._patience_s(caller.ttft_ms)
        tpot_s = limit_from_ms(caller.tpot_ms or self.limits.tpot_limit_ms)
        ticket, tenant = caller.ticket, caller.tenant
        call = await with_tokens(self.tokenizer, call)
        checkpoints = self._checkpoints(call, caller, delivered, adapter)
        choices: list[Choice] = []
        for prompt_index, prompt in enumerate(call.prompts):
            token_ids = await prompt_ids(self.tokenizer, call, prompt)
            if ticket is not None and (delivered is None or not delivered.is_paid):
                ticket.charge(len(token_ids))
            sampling = check_prompt(call, len(token_ids), self.max_model_len)
            echo = await prompt_text(self.tokenizer, prompt, token_ids) if call.echo else ""
            packed = packed_tokens(token_ids)
            for number in range(call.n):
                index = len(choices)
                request = GenerationRequest(
                    request_id=RequestId(f"{base}-{index}"),
                    model=self.served_name,
                    prompt_ids=token_ids,
                    packed_prompt=packed,
                    sampling=choice_sampling(sampling, seed, number),
                    arrived_at=caller.arrived_at,
                    ttft_s=ttft_s,
                    cache_salt=tenant.salted(call.cache_salt),
                    scenario=caller.scenario,
                    placement=caller.placement,
                    traceparent=caller.traceparent,
                    tenant=tenant,
                    rank=call.priority,
                    checkpoint=checkpoints[index],
                    tpot_s=tpot_s,
                    adapter=adapter,
                )
                choices.append(Choice(index, prompt_index, request, call, echo, ticket))
        if delivered is not None:
            return going_on(choices, delivered, self.tokenizer.vocab_size)
        return choices

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

    async def run(self, choices: Sequence[Choice], sinks: Sequence[Sink]) -> None:
        """Generates a call's choices, each into its sink; cancelling it ends them.

        Raises:
            KvMeshError: see `Life.run`. Unless workers took all choices, the sinks are untouched.
        """
        lives = [
            Life(self._mesh, each.request, each.ticket, each.behind and each.behind.token_ids)
            for each in choices
        ]
        held = sinks
        if len(lives) > 1:

            def begins() -> None:
                for life in lives:
                    life.is_read = True

            held = Gate(sinks, begins).held
        try:
            for life, choice, sink in zip(lives, choices, held, strict=True):
                life.receiver = Delivery(self.tokenizer, choice, life.ledger, sink)
            await together([life.run() for life in lives])
        finally:
            for life in lives:
                life.close()


def usage_of(
    num_prompt_tokens: int,
    num_completion_tokens: int,
    cached_tokens: int,
    reasoning_tokens: int = 0,
) -> Usage:
    """Token counts of a generation; a prompt cannot be cached beyond its length."""
    cached_tokens = min(cached_tokens, num_prompt_tokens)
    return Usage(num_prompt_tokens, num_completion_tokens, cached_tokens, reasoning_tokens)
