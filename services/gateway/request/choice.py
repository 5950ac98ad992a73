"""A call's caller and choices, as values between the APIs and the request flow."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple
from zlib import crc32

from kvmesh.core.adapters import adapter_name
from kvmesh.core.errors import GoneError
from kvmesh.core.types import Placement
from kvmesh.core.values import changed, quick
from kvmesh.policy.quota import Tenant
from services.gateway.api.model_checks import check_known
from services.gateway.api.openai import ApiCall
from services.gateway.request.mesh import GenerationRequest
from services.gateway.tenants.admission import Ticket


@quick
@dataclass(frozen=True, slots=True)
class Caller:
    """The data of a call's headers or metadata.

    Attributes:
        arrived_at: when the call came to this machine, in seconds on the loop's clock.
        request_id: the caller's id for the call; if empty, the gateway makes one.
        ttft_ms: longest wait until a worker takes the request; 0 if the request names none.
        tpot_ms: longest mean time per token; 0 if the request names none.
        itl_ms: longest time between two tokens; 0 if the request names none.
        traceparent: the caller's trace context.
        ticket: from `Entrance.admit`; the call's usage is charged to its tenant.
        group_ms: limits of the scenario's requests that name none, in the order of `times_ms`.
    """

    arrived_at: float
    request_id: str = ""
    scenario: str = ""
    placement: Placement = Placement.AUTO
    ttft_ms: int = 0
    traceparent: str = ""
    ticket: Ticket | None = None
    tpot_ms: int = 0
    itl_ms: int = 0
    group_ms: tuple[int, int, int] = (0, 0, 0)

    @property
    def tenant(self) -> Tenant:
        """The tenant that the call is charged to; without a ticket, the nameless tenant."""
        return Tenant() if self.ticket is None else self.ticket.tenant

    @property
    def times_ms(self) -> tuple[int, int, int]:
        """Limits on the wait for workers, the mean time per token and the time between two tokens.

        Each is the request's own, else its tenant's, else its scenario's; 0 takes the gateway's.
        """
        own, (ttft_ms, tpot_ms, itl_ms) = self.tenant.limits, self.group_ms
        return (
            self.ttft_ms or own.ttft_ms or ttft_ms,
            self.tpot_ms or own.tpot_ms or tpot_ms,
            self.itl_ms or own.itl_ms or itl_ms,
        )


class Behind(NamedTuple):
    """The part of one choice that another gateway delivered to the client.

    Attributes:
        token_ids: all tokens so far.
        cached_tokens: prompt tokens whose KV was cached, as the usage reports them.
        is_complete: the client has the choice's last event.
    """

    token_ids: tuple[int, ...]
    cached_tokens: int
    is_complete: bool


class Delivered(NamedTuple):
    """The part of a call that its client has; this gateway generates the rest.

    Attributes:
        seed: the call's sampling seed.
        prompt_sum: checksum of the call's prompts when it began; see the function `prompt_sum`.
        is_paid: the tenant was already charged for the prompt.
        checkpoints: for each choice, the checkpoint and adapter that generated it; see `made_by`.
        choices: the delivered part of each choice; None for a choice of which nothing was
            delivered.
    """

    seed: int
    prompt_sum: int
    is_paid: bool
    checkpoints: tuple[str, ...]
    choices: tuple[Behind | None, ...]


@quick
@dataclass(frozen=True, slots=True)
class Choice:
    """One generation of a call.

    Attributes:
        index: its place in the answer.
        prompt_index: index of the call's prompt that it continues.
        echo: the prompt's text, if the answer begins with it.
        ticket: the tenant's ticket, which is charged for the tokens.
        behind: the part that the client already has; None for a new choice.
    """

    index: int
    prompt_index: int
    request: GenerationRequest
    call: ApiCall
    echo: str = ""
    ticket: Ticket | None = None
    behind: Behind | None = None

    @property
    def model_name(self) -> str:
        """The model name in answers: the adapter's name if the request names an adapter."""
        return adapter_name(self.request.adapter) or self.request.model

    @property
    def is_open(self) -> bool:
        """Whether there are tokens left to generate."""
        return self.behind is None or not self.behind.is_complete


def prompt_sum(choices: Sequence[Choice]) -> int:
    """CRC-32 of the prompts' token ids. It tells whether a resumed call has the same prompts."""
    found, last = 0, -1
    for choice in choices:
        if choice.prompt_index != last:
            last = choice.prompt_index
            found = crc32(choice.request.packed_prompt, found)
    return found


def going_on(choices: Sequence[Choice], delivered: Delivered, vocab_size: int) -> list[Choice]:
    """The same choices, each set to continue after the tokens that its client has.

    Raises:
        GoneError: the delivered part belongs to another call or model, or no tokens are left.
        InvalidRequestError: a delivered token is outside the vocabulary.
    """
    if delivered.prompt_sum != prompt_sum(choices):
        raise GoneError(
            "this gateway tokenises the prompt differently: request the whole answer again"
        )
    for choice, behind in zip(choices, delivered.choices, strict=True):
        if behind is not None:
            check_known(behind.token_ids, vocab_size, "tokens so far")
            left = choice.request.sampling.max_tokens - len(behind.token_ids)
            if left < 1 and not behind.is_complete:
                raise GoneError("all tokens were delivered: there is nothing to resume")
    pairs = zip(choices, delivered.choices, strict=True)
    return [changed(choice, behind=behind) for choice, behind in pairs]
