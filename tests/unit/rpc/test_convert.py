from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from kvmesh.core.details import FleetWorker
from kvmesh.core.errors import ProtocolError
from kvmesh.core.health import DeviceErrors
from kvmesh.core.kv_groups import KvGroups
from kvmesh.core.pace import PaceRoom, StepPace
from kvmesh.core.slots import PrefixMatch
from kvmesh.core.types import (
    BlockHash,
    Candidate,
    Endpoint,
    FinishReason,
    KvLayout,
    Placement,
    PrefixSource,
    Refusal,
    RefusalReason,
    RequestId,
    Reservation,
    Role,
    RoutePlan,
    RouteQuery,
    SamplingParams,
    SequenceSpec,
    Structure,
    StructureKind,
    TokenLogprobs,
    Usage,
    WorkerId,
    WorkerInfo,
    WorkerLoad,
)
from kvmesh.rpc import convert, convert_route, convert_sampling, convert_worker
from kvmesh.v1 import scheduler_service_pb2, types_pb2

LAYOUT = KvLayout("abc", "bfloat16", 16, 4, 2, 64, "vllm", "BLHNC", 1, 2)
SAMPLING = SamplingParams(
    *(0.5, 0.25, 5, 0.125, 0.5, 0.25, 1.5, 2**63, 7, 2, True, (3, 4), 5),
    logit_bias=((3, -0.5), (9, 100.0)),
    allowed_token_ids=(3, 9),
    bad_words=((1, 2), (5,)),
    num_prompt_logprobs=0,
    structure=Structure(StructureKind.REGEX, "[a-z]+"),
)
SPEC = SequenceSpec((1, 2, 3), 2, SAMPLING, BlockHash(b"r" * 16), adapter="sql", embedding=0)
INFO = WorkerInfo(
    WorkerId("w"),
    9,
    Role.DECODE,
    "c",
    Endpoint("h", 1),
    Endpoint("h", 2),
    "m",
    LAYOUT,
    99,
    1,
    8,
    64,
    missing_native=("kernels", "transfer"),
    pair_share=2e-4,
    adapters=("py", "sql"),
    embeds=True,
    groups=KvGroups((0, 64), 3),
)
ROOM = PaceRoom(StepPace(0.01, 1e-7), 5000, 0.03, 1.5)
DEVICE = DeviceErrors(3, 48, failing=True, lost=True)
LOAD = WorkerLoad(
    *(1, 2, 3, 4, 5, True, 6, 7, 8, 9, 0.5, 0.25, 0.125, 10, 11, 12.5), room=ROOM, device=DEVICE
)
FIRST_PART = PrefixSource(WorkerId("f"), 5, Endpoint("f", 3), 3, computes=True)
SOURCE = PrefixSource(WorkerId("s"), 4, Endpoint("s", 2), 7, computes=True, upstream=FIRST_PART)
CANDIDATE = Candidate(WorkerId("w"), 9, Endpoint("h", 1), 32, SOURCE)


def _filled(made: Callable[[], Any], fill: Callable[[Any, Any], None]) -> Callable[[Any], Any]:
    """As a converter that makes its message."""

    def convert_value(value: Any) -> Any:
        message = made()
        fill(message, value)
        return message

    return convert_value


VALUES: list[tuple[Any, Callable[..., Any], Callable[..., Any]]] = [
    (
        Refusal(RefusalReason.STALE, "text", True, 5),
        convert.refusal_to_proto,
        convert.refusal_from_proto,
    ),
    (
        SAMPLING,
        convert_sampling.sampling_params_to_proto,
        convert_sampling.sampling_params_from_proto,
    ),
    (
        TokenLogprobs(-0.5, (1, 2), (-0.5, -1.5), 7),
        convert_sampling.token_logprobs_to_proto,
        convert_sampling.token_logprobs_from_proto,
    ),
    (SPEC, convert.sequence_spec_to_proto, convert.sequence_spec_from_proto),
    (LAYOUT, convert.kv_layout_to_proto, convert.kv_layout_from_proto),
    (
        Reservation(1, WorkerId("w"), 2, 3, b"c" * 16, Endpoint("h", 4), 5, 6, 7),
        convert.reservation_to_proto,
        convert.reservation_from_proto,
    ),
    (INFO, convert_worker.worker_info_to_proto, convert_worker.worker_info_from_proto),
    (LOAD, convert_worker.worker_load_to_proto, convert_worker.worker_load_from_proto),
    (
        FleetWorker(INFO, LOAD),
        convert_worker.fleet_worker_to_proto,
        convert_worker.fleet_worker_from_proto,
    ),
    (
        CANDIDATE,
        _filled(scheduler_service_pb2.Candidate, convert_route.fill_candidate),
        convert_route.candidate_from_proto,
    ),
    (
        RoutePlan(
            Placement.DISAGGREGATED, (CANDIDATE,), (CANDIDATE,), True, "why", "p", remote=True
        ),
        _filled(scheduler_service_pb2.RoutePlan, convert_route.fill_route_plan),
        convert_route.route_plan_from_proto,
    ),
    (
        PrefixMatch(WorkerId("w"), 9, "c", 4),
        convert.prefix_match_to_proto,
        convert.prefix_match_from_proto,
    ),
    (Usage(1, 2, 3), convert.usage_to_proto, convert.usage_from_proto),
]


@pytest.mark.parametrize(("value", "to_proto", "from_proto"), VALUES)
def test_round_trip_over_the_wire(
    value: Any, to_proto: Callable[..., Any], from_proto: Callable[..., Any]
) -> None:
    message = to_proto(value)
    assert from_proto(type(message).FromString(message.SerializeToString())) == value


def test_route_query_round_trip() -> None:
    query = RouteQuery(
        RequestId("r"),
        "m",
        40,
        8,
        (BlockHash(b"a" * 16), BlockHash(b"b" * 16)),
        "s",
        frozenset({WorkerId("x")}),
        100,
        Placement.AGGREGATED,
        waiting=3,
        waiting_reserved=2,
        waiting_remote=1,
        lost=frozenset({WorkerId("x")}),
        unanswered=frozenset({WorkerId("y")}),
        tpot_s=0.03,
    )
    message = convert_route.route_query_to_proto(query, 7, "00-trace")
    assert message.correlation_id == 7
    assert message.traceparent == "00-trace"
    assert convert_route.route_query_from_proto(message) == query


@pytest.mark.parametrize("reason", [None, *FinishReason])
def test_finish_reason_round_trip(reason: FinishReason | None) -> None:
    assert convert.finish_reason_from_proto(convert.finish_reason_to_proto(reason)) is reason


def test_every_refusal_reason_has_a_number() -> None:
    for reason in RefusalReason:
        message = convert.refusal_to_proto(Refusal(reason, ""))
        assert message.reason != types_pb2.REFUSAL_REASON_UNSPECIFIED
        assert convert.refusal_from_proto(message).reason is reason


@pytest.mark.parametrize(("num_prompt", "root"), [(0, 16), (4, 16), (2, 15)])
def test_a_sequence_that_cannot_be_is_refused(num_prompt: int, root: int) -> None:
    message = convert.sequence_spec_to_proto(SPEC)
    message.num_prompt_tokens = num_prompt
    message.root_hash = b"r" * root
    with pytest.raises(ProtocolError):
        convert.sequence_spec_from_proto(message)


def test_a_bad_word_without_tokens_is_refused() -> None:
    message = convert.sequence_spec_to_proto(SPEC)
    message.sampling.bad_words.add()
    with pytest.raises(ProtocolError, match="a bad word has no tokens"):
        convert.sequence_spec_from_proto(message)


def test_hashes_of_a_broken_length_are_refused() -> None:
    with pytest.raises(ProtocolError):
        convert_route.route_query_from_proto(
            scheduler_service_pb2.RouteRequest(block_hashes=b"x" * 17)
        )
