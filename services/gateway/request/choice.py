"""What a call asks for and who calls, as values between the APIs and the request flow."""

from __future__ import annotations

from dataclasses import dataclass

from kvmesh.core.types import Placement
from kvmesh.core.values import quick
from services.gateway.api.openai import ApiCall
from services.gateway.request.mesh import GenerationRequest
from services.gateway.tenants.admission import Ticket


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
