from __future__ import annotations

import pytest

from kvmesh.core.errors import ProtocolError
from kvmesh.core.types import FinishReason, Refusal, RefusalReason, TokenLogprobs, WorkerId
from kvmesh.v1 import types_pb2
from kvmesh.v1.decode_service_pb2 import DecodeEvent, DecodeTokens
from kvmesh.v1.prefill_service_pb2 import (
    PrefillAccepted,
    PrefillEvent,
    PrefillFirstToken,
    PrefillHandedOff,
)
from services.gateway.wire.worker_events import (
    Accepted,
    Failed,
    FirstToken,
    HandedOff,
    Refused,
    Reserved,
    Started,
    Tokens,
    WorkerEvent,
    decode_event,
    prefill_event,
)

BUSY = types_pb2.Refusal(reason=types_pb2.REFUSAL_REASON_BUSY, message="busy")
REFUSAL = Refusal(RefusalReason.BUSY, "busy")
WORKER = WorkerId("d1")
RESERVATION = types_pb2.Reservation(worker_id=WORKER, lease_ms=5000)


@pytest.mark.parametrize(
    ("message", "event"),
    [
        (PrefillEvent(accepted=PrefillAccepted()), Accepted()),
        (PrefillEvent(rejected=BUSY), Refused(REFUSAL, by_prefill=True)),
        (PrefillEvent(failed=BUSY), Failed(REFUSAL, by_prefill=True)),
        (PrefillEvent(handed_off=PrefillHandedOff()), HandedOff()),
        (
            PrefillEvent(
                first_token=PrefillFirstToken(
                    token_id=7,
                    cached_tokens=3,
                    logprobs=types_pb2.TokenLogprobs(logprob=-0.5),
                    finish_reason=types_pb2.FINISH_REASON_STOP,
                )
            ),
            FirstToken(7, TokenLogprobs(-0.5), FinishReason.STOP, 3),
        ),
        (PrefillEvent(first_token=PrefillFirstToken(token_id=7)), FirstToken(7, None, None, 0)),
    ],
)
def test_prefill_events(message: PrefillEvent, event: WorkerEvent) -> None:
    assert prefill_event(message) == event


def test_decode_events() -> None:
    assert decode_event(DecodeEvent(refused=BUSY), WORKER) == Refused(REFUSAL)
    assert decode_event(DecodeEvent(failed=BUSY), WORKER) == Failed(REFUSAL)
    tokens = DecodeTokens(first_position=9, token_ids=[1, 2])
    assert decode_event(DecodeEvent(tokens=tokens), WORKER) == Tokens(9, (1, 2), (), None)
    reserved = decode_event(DecodeEvent(reserved=RESERVATION), WORKER)
    assert isinstance(reserved, Reserved)
    assert reserved.reservation.worker_id == WORKER


def test_events_of_an_attempt_that_was_started_as_one() -> None:
    accepted = PrefillEvent(accepted=PrefillAccepted())
    assert decode_event(DecodeEvent(reserved=RESERVATION, prefill=accepted), WORKER) == Started(
        5000
    )
    first = PrefillEvent(first_token=PrefillFirstToken(token_id=7))
    for event in (first, PrefillEvent(rejected=BUSY), PrefillEvent(failed=BUSY)):
        assert decode_event(DecodeEvent(prefill=event), WORKER) == prefill_event(event)


@pytest.mark.parametrize("prefill", [None, PrefillEvent(accepted=PrefillAccepted())])
def test_another_worker_at_the_address_refuses(prefill: PrefillEvent | None) -> None:
    event = DecodeEvent(reserved=RESERVATION, prefill=prefill)
    refusal = Refusal(RefusalReason.LOST, "d1 answered for d2")
    assert decode_event(event, WorkerId("d2")) == Refused(refusal)


def test_empty_events_break_the_contract() -> None:
    with pytest.raises(ProtocolError):
        prefill_event(PrefillEvent(request_id="r"))
    with pytest.raises(ProtocolError):
        decode_event(DecodeEvent(request_id="r"), WORKER)
    with pytest.raises(ProtocolError):
        decode_event(DecodeEvent(prefill=PrefillEvent()), WORKER)
