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
    assert decode_event(DecodeEvent(refused=BUSY)) == Refused(REFUSAL)
    assert decode_event(DecodeEvent(failed=BUSY)) == Failed(REFUSAL)
    tokens = DecodeTokens(first_position=9, token_ids=[1, 2])
    assert decode_event(DecodeEvent(tokens=tokens)) == Tokens(9, (1, 2), (), None)
    reserved = decode_event(DecodeEvent(reserved=types_pb2.Reservation(worker_id="d1")))
    assert isinstance(reserved, Reserved)
    assert reserved.reservation.worker_id == "d1"


def test_events_of_an_attempt_that_was_started_as_one() -> None:
    reservation = types_pb2.Reservation(worker_id="w1", lease_ms=5000)
    accepted = PrefillEvent(accepted=PrefillAccepted())
    started = decode_event(DecodeEvent(reserved=reservation, prefill=accepted))
    assert started == Started(WorkerId("w1"), 5000)
    first = PrefillEvent(first_token=PrefillFirstToken(token_id=7))
    for event in (first, PrefillEvent(rejected=BUSY), PrefillEvent(failed=BUSY)):
        assert decode_event(DecodeEvent(prefill=event)) == prefill_event(event)


def test_empty_events_break_the_contract() -> None:
    with pytest.raises(ProtocolError):
        prefill_event(PrefillEvent(request_id="r"))
    with pytest.raises(ProtocolError):
        decode_event(DecodeEvent(request_id="r"))
    with pytest.raises(ProtocolError):
        decode_event(DecodeEvent(prefill=PrefillEvent()))
