from __future__ import annotations

from typing import Any

import grpc
import pytest

from kvmesh.client.calls import CallSettings
from kvmesh.client.connection import Gateways
from kvmesh.client.retry import NO_RETRY, RetryPolicy
from kvmesh.core.errors import DeadlineError, InvalidRequestError, LostError, ProtocolError
from kvmesh.v1 import inference_service_pb2 as pb
from kvmesh.v1 import types_pb2


class FakeClock:
    def __init__(self) -> None:
        self.time = 100.0

    def now(self) -> float:
        return self.time


def broken() -> grpc.aio.AioRpcError:
    code = grpc.StatusCode.UNAVAILABLE
    return grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(), details="gone")


LAST = pb.GenerateResponse(finish_reason=types_pb2.FINISH_REASON_STOP)


def test_an_attempt_has_the_time_that_is_left() -> None:
    clock = FakeClock()
    call = CallSettings("x:1", clock=clock).generation("hi", {"timeout_s": 10.0})
    assert call.begin() == 10.0
    clock.time += 4.0
    assert call.begin() == 6.0
    clock.time += 7.0
    with pytest.raises(DeadlineError):
        call.begin()


def piece(*token_ids: int, **fields: Any) -> pb.GenerateResponse:
    return pb.GenerateResponse(token_ids=token_ids, **fields)


def test_a_cut_stream_goes_on_behind_what_came() -> None:
    call = CallSettings("x:1").generation("hi", {"max_tokens": 9})
    asked = pb.GenerateRequest.FromString(call.message.SerializeToString())
    call.begin()
    call.take(piece(5, resume=pb.ResumePoint(seed=7, prompt_sum=8, cached_tokens=1)))
    call.take(piece(6))
    call.wait_after(broken())
    point = pb.ResumePoint(seed=7, prompt_sum=8, cached_tokens=1, token_ids=[5, 6])
    assert call.message.resume == point
    call.begin()
    call.take(piece(9))
    call.wait_after(broken())
    assert call.message.resume.token_ids == [5, 6, 9], "each of them once"
    call.message.ClearField("resume")
    assert call.message == asked
    assert not call.is_complete
    call.take(piece(1, finish_reason=types_pb2.FINISH_REASON_STOP))
    assert call.is_complete, "nothing comes after it that could be lost"


def test_a_stream_goes_on_as_often_as_something_comes() -> None:
    retry = RetryPolicy(attempts=1, resumes=2)
    call = CallSettings("x:1", retry=retry).generation("hi", {})
    for _ in range(5):
        call.begin()
        call.take(piece(5, resume=pb.ResumePoint(seed=7)))
        call.wait_after(broken())
        call.begin()
        call.wait_after(broken())
    call.begin()
    with pytest.raises(LostError):
        call.wait_after(broken())
    never = CallSettings("x:1", retry=NO_RETRY).generation("hi", {})
    never.begin()
    never.take(piece(5, resume=pb.ResumePoint(seed=7)))
    with pytest.raises(LostError):
        never.wait_after(broken())


def test_several_addresses_take_turns() -> None:
    assert CallSettings("a:1, b:2").targets == ("a:1", "b:2")
    with pytest.raises(InvalidRequestError, match="host:port"):
        CallSettings(" ,")
    gateways = Gateways(["a", "b", "c"], 4)
    assert gateways.stub == "b"
    gateways.leave("b")
    gateways.leave("b")  # of another call that failed there, too
    assert gateways.stub == "c"
    gateways.leave("c")
    assert gateways.stub == "a"


def test_nothing_delivered_is_tried_again_and_what_cannot_go_on_is_not() -> None:
    call = CallSettings("x:1").generation("hi", {})
    call.begin()
    assert 0.0 <= call.wait_after(broken()) <= 0.2
    call.begin()
    call.take(pb.GenerateResponse(text="a"))
    with pytest.raises(LostError, match="gone"):
        call.wait_after(broken())
    once = CallSettings("x:1", retry=NO_RETRY).generation("hi", {})
    once.begin()
    with pytest.raises(LostError, match="gone"):
        once.wait_after(broken())


def test_a_stream_must_end_with_a_finish_reason() -> None:
    call = CallSettings("x:1").generation("hi", {})
    call.take(pb.GenerateResponse(text="a"))
    with pytest.raises(ProtocolError, match="no_finish_reason"):
        call.end()
    call.take(LAST)
    call.end()
