from __future__ import annotations

import grpc
import pytest

from kvmesh.client.calls import CallSettings
from kvmesh.client.retry import NO_RETRY
from kvmesh.core.errors import DeadlineError, LostError, ProtocolError
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


def test_nothing_delivered_is_tried_again_and_something_is_not() -> None:
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
