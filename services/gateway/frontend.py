"""What HTTP and gRPC share: a checked call to generations, and a generation to text.

Tests: tests/integration/test_gateway_http.py.
"""

from __future__ import annotations

import os
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, replace

from kvmesh.core.errors import KvMeshError
from kvmesh.core.types import FinishReason, Placement, Refusal, RefusalReason, RequestId, Usage
from kvmesh.core.values import quick
from kvmesh.policy.quota import Tenant
from kvmesh.telemetry.logs import event_logger
from kvmesh.telemetry.tracing import is_tracing, start_span
from services.gateway.access import KeyRing
from services.gateway.admission import Admission, Ticket
from services.gateway.detokenizer import Detokenizer, TextPiece
from services.gateway.entry import Admitted
from services.gateway.errors import Stage, StageRefusedError
from services.gateway.generation import TokenDelta
from services.gateway.mesh import GenerationRequest, Mesh
from services.gateway.model_checks import check_model, choice_sampling
from services.gateway.openai import ApiCall
from services.gateway.prompts import checked_sampling, prompt_ids, prompt_text
from services.gateway.request_flow import Generation
from services.gateway.request_limits import check_limits
from services.gateway.request_record import RequestRecord, TextDelta
from services.gateway.token_lane import TokenLane
from services.gateway.tokenizer import TextTokenizer

log = event_logger(__name__)

MAX_REQUEST_ID_CHARS = 128


@quick
@dataclass(frozen=True, slots=True)
class Caller:
    """What the transport says about a call, apart from its body.

    Attributes:
        request_id: the caller's; empty makes one.
        ttft_ms: longest wait until a worker takes the request; 0 takes the default.
        traceparent: the caller's trace context.
        ticket: from `Frontend.admit`; what the call uses is charged to its tenant.
    """

    request_id: str = ""
    scenario: str = ""
    placement: Placement = Placement.AUTO
    ttft_ms: int = 0
    traceparent: str = ""
    ticket: Ticket | None = None


@quick
@dataclass(frozen=True, slots=True)
class Choice:
    """One generation of a call.

    Attributes:
        index: its place in the answer.
        prompt_index: which of the call's prompts it continues.
        echo: the prompt's text, if it is to come before the generated one.
        ticket: its tokens are charged to it.
    """

    index: int
    prompt_index: int
    request: GenerationRequest
    call: ApiCall
    echo: str = ""
    ticket: Ticket | None = None


def clean_request_id(given: str) -> str:
    """The caller's request id if it can go into headers and logs, else a new one."""
    name = given.strip()[:MAX_REQUEST_ID_CHARS]
    return name if name and name.isascii() and name.isprintable() else os.urandom(12).hex()


class Frontend:
    """Turns calls into text.

    Args:
        served_name: the model's name for clients.

    Attributes:
        limits: of a request.
    """

    def __init__(
        self,
        mesh: Mesh,
        tokenizer: TextTokenizer,
        served_name: str,
        keys: KeyRing,
        admission: Admission,
    ) -> None:
        self._mesh = mesh
        self._keys = keys
        self._admission = admission
        self.tokenizer = tokenizer
        self.served_name = served_name
        self.limits = mesh.limits
        self.metrics = mesh.metrics

    @property
    def not_ready(self) -> str:
        """Why requests cannot be served now; empty if they can."""
        return "draining" if self.is_draining else self._mesh.router.not_ready

    @property
    def missing_native(self) -> dict[str, list[str]]:
        """Libraries of native code that workers run without, slower; by worker."""
        return self._mesh.router.missing_native

    @property
    def is_draining(self) -> bool:
        """Whether nothing new is admitted."""
        return self._admission.draining

    @property
    def max_model_len(self) -> int:
        """Longest sequence: the fleet's limit, before a worker is known the model's own."""
        facts = self._mesh.router.facts
        return self.tokenizer.max_model_len if facts is None else facts.max_model_len

    def check_key(self, authorization: str) -> None:
        """Checks who calls.

        Raises:
            AuthenticationError: the key is missing or not accepted.
        """
        self._keys.check(authorization)

    def admit(self, authorization: str) -> Admitted:
        """Checks who calls and holds a place for the request; its ticket goes into `Caller`.

        Entering the context that it returns raises:
            AuthenticationError: the key is missing or not accepted.
            StageRefusedError: draining, or a quota of the caller's tenant is used up.
        """
        return Admitted(self._keys, self._admission, self.metrics, authorization)

    def _check_crowd(self, caller: Caller) -> None:
        """Refuses at once what would be refused at its deadline."""
        tenant = Tenant() if caller.ticket is None else caller.ticket.tenant
        patience_s = (caller.ttft_ms or self.limits.ttft_deadline_ms) / 1000
        crowd = self._mesh.crowd
        if tenant.limits.priority > 0 or not crowd.is_hopeless(tenant.name, patience_s):
            return
        wait_s = max(crowd.wait_s(tenant.name), crowd.lag_s)
        refusal = Refusal(
            RefusalReason.BUSY,
            f"{crowd.num_waiting} requests wait for workers, about {wait_s:.1f} s; "
            f"this one has {patience_s:g} s",
            retry_after_ms=round(wait_s * 1000),
        )
        self.metrics.refused(refusal.reason.value, Stage.GATEWAY.value)
        raise StageRefusedError(refusal, Stage.GATEWAY)

    async def prepare(self, call: ApiCall, caller: Caller) -> list[Choice]:
        """Renders, tokenises and checks a call against the model.

        Raises:
            InvalidRequestError: names the field and what is allowed.
            ModelNotFoundError: another model is asked for.
            StageRefusedError: too many wait already for this one to be served in time.
        """
        check_model(call.model, self.served_name)
        check_limits(call, self.limits)
        if call.priority >= 0:  # who has priority does not wait behind the others
            self._check_crowd(caller)
        seed = self._mesh.rng.getrandbits(64) if call.seed is None else call.seed
        # Names may repeat (a caller that tries again); in the mesh every request is apart.
        base = f"{caller.request_id}-{self._mesh.rng.getrandbits(32):08x}"
        ttft_ms = caller.ttft_ms or self.limits.ttft_deadline_ms
        ticket = caller.ticket
        tenant = Tenant() if ticket is None else ticket.tenant
        sampling = await checked_sampling(self.tokenizer, call)
        if sampling is not call.sampling:
            call = replace(call, sampling=sampling)
        choices: list[Choice] = []
        for prompt_index, prompt in enumerate(call.prompts):
            token_ids = await prompt_ids(self.tokenizer, call, prompt)
            if ticket is not None:
                ticket.charge(len(token_ids))
            echo = await prompt_text(self.tokenizer, prompt, token_ids) if call.echo else ""
            for number in range(call.n):
                index = len(choices)
                request = GenerationRequest(
                    request_id=RequestId(f"{base}-{index}"),
                    model=self.served_name,
                    prompt_ids=token_ids,
                    sampling=choice_sampling(
                        call, len(token_ids), self.max_model_len, seed=seed, choice=number
                    ),
                    ttft_s=ttft_ms / 1000,
                    cache_salt=tenant.salted(call.cache_salt),
                    scenario=caller.scenario,
                    placement=caller.placement,
                    traceparent=caller.traceparent,
                    tenant=tenant,
                    rank=call.priority,
                )
                choices.append(Choice(index, prompt_index, request, call, echo, ticket))
        return choices

    def begin(self, choices: Sequence[Choice]) -> Generation | None:
        """Tells a worker of a call that has one choice, before all else; to be closed.

        Returns:
            For `run`, in the same turn of the loop; None if it is to begin there: several choices,
            or a span around them all.
        """
        if len(choices) > 1 or is_tracing():
            return None
        return Generation(self._mesh, choices[0].request)

    async def run(
        self,
        choice: Choice,
        lane: TokenLane | None = None,
        *,
        begun: Generation | None = None,
        whole: bool = False,
        meanwhile: Callable[[], None] | None = None,
    ) -> AsyncGenerator[TextDelta, None]:
        """Generates one choice as text; close the generator to cancel.

        Args:
            begun: from `begin`.
            lane: takes what it can of the text; it is not yielded then.
            whole: nobody looks at the text before its end.
            meanwhile: called once, before any text, while a worker has the request if one could be
                told at once.

        Raises:
            KvMeshError: as `Generation.next` does.
        """
        request = choice.request
        with start_span(
            "gateway.request",
            request.traceparent,
            request_id=request.request_id,
            prompt_tokens=len(request.prompt_ids),
        ) as span:
            if span.traceparent != request.traceparent:
                request = replace(request, traceparent=span.traceparent)
            with closing(begun or Generation(self._mesh, request)) as generation:
                record = RequestRecord(
                    self.metrics, request, self._mesh.log, choice.ticket, generation.arrived_at
                )
                try:
                    await generation.ask()
                    text = _Text(self.tokenizer, choice)
                    if lane is not None:
                        lane.record, lane.detokenizer = record, text.detokenizer
                    if meanwhile is not None:
                        meanwhile()
                    generation.follow(lane, record if whole and text.keeps_all else None)
                    is_over = False
                    while not is_over:
                        token_delta = await generation.next()
                        delta = text.push(token_delta)
                        record.add(delta, token_delta.num_told)
                        is_over = delta.finish_reason is not None
                        yield delta
                    record.annotate(span)
                except KvMeshError as error:
                    record.failed(error)
                    raise
                finally:
                    # Before the record is closed: it may have to note yet that workers took it.
                    await generation.aclose()
                    record.close(span.trace_id)


class _Text:
    """Turns one choice's tokens into text."""

    def __init__(self, tokenizer: TextTokenizer, choice: Choice) -> None:
        call, request = choice.call, choice.request
        self._index = choice.index
        self._only_echo = call.max_tokens == 0
        # Then nothing before the last token ends it.
        self.keeps_all = not (call.stop or self._only_echo)
        self.detokenizer = Detokenizer(
            tokenizer.fast,
            request.prompt_ids,
            whole=tokenizer.whole,
            stops=call.stop,
            include_stop=call.include_stop,
            skip_special_tokens=call.skip_special_tokens,
            min_tokens=request.sampling.min_tokens,
        )

    def push(self, delta: TokenDelta) -> TextDelta:
        """The text of the next tokens; nothing comes after one with a finish reason."""
        finish = delta.finish_reason
        piece = self.detokenizer.push(
            delta.token_ids, ends_with_stop_token=finish is FinishReason.STOP
        )
        if piece.stop is not None:
            finish = FinishReason.STOP
        elif finish is not None and (rest := self.detokenizer.finish()):
            piece = replace(piece, text=piece.text + rest)
        if self._only_echo:  # only what was there before is wanted
            finish, piece = FinishReason.LENGTH, TextPiece("", 0)
        return _text_delta(self._index, delta, piece, finish)


def _text_delta(
    index: int, delta: TokenDelta, piece: TextPiece, finish: FinishReason | None
) -> TextDelta:
    return TextDelta(
        index,
        piece.text,
        delta.token_ids[: piece.num_used],
        delta.logprobs[: piece.num_used],
        finish,
        delta.cached_tokens,
        delta.placed,
        delta.prompt_logprobs,
    )


def usage_of(
    num_prompt_tokens: int,
    num_completion_tokens: int,
    cached_tokens: int,
    reasoning_tokens: int = 0,
) -> Usage:
    """Token counts of a generation; a prompt cannot be cached beyond its length."""
    cached_tokens = min(cached_tokens, num_prompt_tokens)
    return Usage(num_prompt_tokens, num_completion_tokens, cached_tokens, reasoning_tokens)
