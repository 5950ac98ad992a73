"""One model's request flow, shared by HTTP and gRPC: from a checked call to its generated text.

Tests: tests/integration/test_gateway_http.py.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

from kvmesh.core.adapters import adapter_name, maker_of
from kvmesh.core.errors import GoneError
from kvmesh.core.types import Refusal, RefusalReason, RequestId, Usage
from kvmesh.core.values import changed
from kvmesh.kv.hashing import packed_tokens
from kvmesh.policy.pdserve import timeout_s
from services.gateway.api.model_checks import (
    ServedNames,
    check_call,
    check_embeds,
    check_prompt,
    choice_sampling,
)
from services.gateway.api.openai import ApiCall
from services.gateway.errors import QuotaError, Stage, StageRefusedError
from services.gateway.metrics import GatewayMetrics
from services.gateway.request.choice import Caller, Choice, Delivered, going_on
from services.gateway.request.delivery import Delivery, Sink, together
from services.gateway.request.gate import Gate
from services.gateway.request.life import Life
from services.gateway.request.mesh import GenerationRequest, Mesh
from services.gateway.text.prompts import prompt_ids, prompt_text, with_tokens
from services.gateway.text.tokenizer import TextTokenizer

MAX_REQUEST_ID_CHARS = 128


def clean_request_id(given: str) -> str:
    """Returns the caller's request id if it can go into headers and logs, else a new one."""
    name = given.strip()[:MAX_REQUEST_ID_CHARS]
    return name if name and name.isascii() and name.isprintable() else os.urandom(12).hex()


def busy(metrics: GatewayMetrics, message: str, wait_s: float) -> StageRefusedError:
    """Returns this gateway's own refusal, for too many waiting requests, and counts it."""
    refusal = Refusal(RefusalReason.BUSY, message, retry_after_ms=round(wait_s * 1000))
    metrics.refused(refusal.reason.value, Stage.GATEWAY.value)
    return StageRefusedError(refusal, Stage.GATEWAY)


class Frontend:
    """Prepares and runs the calls of one model; `Entrance` admits them.

    Args:
        names: names of the model for clients; the first is its own.

    Attributes:
        limits: limits of one request.
    """

    def __init__(
        self,
        mesh: Mesh,
        tokenizer: TextTokenizer,
        names: tuple[str, ...],
    ) -> None:
        self._mesh = mesh
        self.tokenizer = tokenizer
        self._names = names
        self.limits = mesh.limits
        self._tiers = mesh.limits.tiers()

    @property
    def served_name(self) -> str:
        """The model's own name."""
        return self._names[0]

    @property
    def served(self) -> ServedNames:
        """The model names that clients may use now."""
        return ServedNames(self._names, self._mesh.router.adapters)

    @property
    def scenarios(self) -> frozenset[str]:
        """Scenarios that have workers of their own now."""
        return self._mesh.router.scenarios

    @property
    def not_ready(self) -> str:
        """The reason why requests cannot be served now; empty if they can."""
        return self._mesh.router.not_ready

    @property
    def missing_native(self) -> dict[str, list[str]]:
        """Native libraries that workers lack, by worker. Such workers run slower."""
        return self._mesh.router.missing_native

    @property
    def max_model_len(self) -> int:
        """Longest sequence: the fleet's limit, or the model's own while no worker is known."""
        facts = self._mesh.router.facts
        return self.tokenizer.max_model_len if facts is None else facts.max_model_len

    def _check_crowd(self, caller: Caller, num_choices: int) -> None:
        """Refuses a call now if it could only be refused later.

        Raises:
            StageRefusedError: so many requests wait for workers that its deadline would pass.
        """
        tenant, lanes = caller.tenant, self._mesh.lanes
        patience_s = self.limits.patience_s(caller.times_ms[0])
        served = self._mesh.router.served(caller.scenario, 0.0)
        if served is None:
            return
        crowd, lag = lanes.of(served.group).crowd, lanes.lag
        is_hopeless = crowd.is_hopeless(tenant.name, patience_s, num_choices)
        if tenant.limits.priority > 0 or not (is_hopeless or lag.is_hopeless(patience_s)):
            return
        wait_s = max(crowd.wait_s(tenant.name, num_choices), lag.now_s)
        refused = busy(
            self._mesh.metrics,
            f"{crowd.num_waiting} requests wait for workers, about {wait_s:.1f} s; "
            f"this one has {patience_s:g} s",
            wait_s,
        )
        self._mesh.metrics.of_group(served.group).refused(refused.refusal.reason.value)
        raise refused

    async def _join_group(self, caller: Caller) -> None:
        """Counts a call in its group.

        Raises:
            QuotaError: the tenant's other calls hold its share of the group.
        """
        ticket = caller.ticket
        if ticket is None or not ticket.joins_group:  # nearly always: spares them the search below
            return
        served = self._mesh.router.served(caller.scenario, 0.0)
        if served is None:
            return
        group, metrics = served.group, self._mesh.metrics
        try:
            name = f"{group.model}/{group.checkpoint}/{group.scenario}"
            await ticket.join(name, served.num_slots)
        except QuotaError as error:
            metrics.refused(error.refusal.reason.value, error.stage.value)
            metrics.of_group(group).refused(error.refusal.reason.value)
            metrics.over_quota(caller.tenant, error.quota)
            raise

    def _makers(
        self, call: ApiCall, caller: Caller, delivered: Delivered | None, adapter: str
    ) -> tuple[tuple[str, str], ...]:
        """Checkpoint and adapter of each choice, at first the same for all.

        The checkpoint is empty while none is known.

        Raises:
            GoneError: the resumed stream has another number of choices or another adapter.
        """
        num_choices = len(call.prompts) * call.n
        if delivered is not None:
            if len(delivered.checkpoints) != num_choices:
                raise GoneError("the stream has another number of choices")
            makers = tuple(maker_of(each) for each in delivered.checkpoints)
            if any(each and adapter_name(it) != adapter_name(adapter) for each, it in makers):
                raise GoneError("the stream is of another model")
            return tuple((each, it if each else adapter) for each, it in makers)
        draw, embeds = self._mesh.rng.random(), call.embedding >= 0
        served = self._mesh.router.served(caller.scenario, draw, adapter, embeds=embeds)
        return (("" if served is None else served.group.fingerprint, adapter),) * num_choices

    def _in_group(self, call: ApiCall, caller: Caller) -> Caller:
        """The caller with the scenario of the group that is to serve it, and its limits."""
        rules, tenant = self._mesh.scenarios, caller.tenant
        chosen = rules.choose(caller.scenario, call.model, tenant, self.scenarios)
        times_ms = rules.times_ms.get(chosen, caller.group_ms)
        return changed(caller, scenario=chosen, group_ms=times_ms)

    def check_embeds(self) -> None:
        """Checks that some workers compute embeddings, or none is known.

        Raises:
            InvalidRequestError: there are only others.
        """
        check_embeds(self.served_name, self._mesh.router.engines_without_embeddings)

    async def prepare(
        self, call: ApiCall, caller: Caller, delivered: Delivered | None = None
    ) -> list[Choice]:
        """Renders, tokenises and checks a call against the model.

        Args:
            delivered: the part that another gateway delivered; None for a new call.

        Raises:
            InvalidRequestError: names the field and what is allowed.
            StageRefusedError: so many requests wait, or the tenant has its share of the group.
            GoneError: the delivered part does not belong to this call.
        """
        caller, adapter = self._in_group(call, caller), self.served.adapter(call.model)
        ticket, tenant = caller.ticket, caller.tenant
        check_call(call, self.limits, self.tokenizer.vocab_size)
        if call.priority >= 0 and delivered is None:  # priority < 0 passes the crowd
            self._check_crowd(caller, call.n * len(call.prompts))
        await self._join_group(caller)
        seed = call.seed if delivered is None else delivered.seed
        if seed is None:
            seed = self._mesh.rng.getrandbits(64)
        call = changed(call, seed=seed)
        # A caller may repeat its id in a retry, but ids inside the mesh are unique.
        base = f"{caller.request_id}-{self._mesh.rng.getrandbits(32):08x}"
        tpot_s, itl_s = self.limits.rates_s(*caller.times_ms[1:])
        call = await with_tokens(self.tokenizer, call)
        makers = self._makers(call, caller, delivered, adapter)
        choices: list[Choice] = []
        for prompt_index, prompt in enumerate(call.prompts):
            token_ids = await prompt_ids(self.tokenizer, call, prompt)
            if ticket is not None and (delivered is None or not delivered.is_paid):
                ticket.charge(len(token_ids))
            sampling = check_prompt(call, len(token_ids), self.max_model_len)
            echo = await prompt_text(self.tokenizer, prompt, token_ids) if call.echo else ""
            packed = packed_tokens(token_ids)
            for index, number in enumerate(range(call.n), len(choices)):
                request = GenerationRequest(
                    request_id=RequestId(f"{base}-{index}"),
                    model=self.served_name,
                    prompt_ids=token_ids,
                    packed_prompt=packed,
                    sampling=choice_sampling(sampling, seed, number),
                    arrived_at=caller.arrived_at,
                    ttft_s=caller.times_ms[0] / 1000 or timeout_s(len(token_ids), self._tiers),
                    cache_salt=tenant.salted(call.cache_salt),
                    scenario=caller.scenario,
                    placement=caller.placement,
                    traceparent=caller.traceparent,
                    tenant=tenant,
                    rank=call.priority,
                    checkpoint=makers[index][0],
                    tpot_s=tpot_s,
                    itl_s=itl_s,
                    adapter=makers[index][1],
                    embedding=call.embedding,
                )
                choices.append(Choice(index, prompt_index, request, call, echo, ticket))
        vocab_size = self.tokenizer.vocab_size
        return choices if delivered is None else going_on(choices, delivered, vocab_size)

    async def run(self, choices: Sequence[Choice], sinks: Sequence[Sink]) -> None:
        """Generates a call's choices, each into its sink. Cancelling this coroutine ends them.

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
    """Token counts of a generation. The cached tokens are limited to the prompt's length."""
    cached_tokens = min(cached_tokens, num_prompt_tokens)
    return Usage(num_prompt_tokens, num_completion_tokens, cached_tokens, reasoning_tokens)
