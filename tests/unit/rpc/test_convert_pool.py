from __future__ import annotations

import pytest

from kvmesh.core.errors import ProtocolError
from kvmesh.core.pool import (
    CopyOrder,
    CopyOutcome,
    CopyResult,
    EvictionHint,
    OldBlocks,
    OldestOrder,
    PoolMember,
    PoolOrder,
    PoolReport,
)
from kvmesh.core.types import BlockHash, Endpoint, Role, WorkerId
from kvmesh.policy.heat import HeatTable
from kvmesh.rpc.convert_pool import (
    cooled_from_proto,
    copy_result_from_proto,
    copy_result_to_proto,
    heat_from_proto,
    knowledge_to_proto,
    pool_member_from_proto,
    pool_order_from_proto,
    pool_order_to_proto,
    pool_report_from_proto,
    pool_report_to_proto,
)
from kvmesh.v1 import pool_types_pb2 as pb
from tests.unit.policy.test_heat import SIZE, prefix

HASHES = (BlockHash(b"a" * 16), BlockHash(b"b" * 16))
REPORT = PoolReport(Role.DECODE, Endpoint("h", 7), 4096, 12, 345, leaving=True, scenario="chat")


@pytest.mark.parametrize(
    "order",
    [
        CopyOrder("o", WorkerId("w"), 3, Endpoint("h", 1), HASHES),
        EvictionHint(HASHES),
        OldestOrder(7),
    ],
)
def test_orders_survive_the_way(order: PoolOrder) -> None:
    assert pool_order_from_proto(pool_order_to_proto(order)) == order


def test_an_order_of_an_unknown_kind_is_none() -> None:
    assert pool_order_from_proto(pb.PoolOrder()) is None


@pytest.mark.parametrize("outcome", CopyOutcome)
def test_results_survive_the_way(outcome: CopyOutcome) -> None:
    result = CopyResult("o", outcome, "why", 5, 600)
    assert copy_result_from_proto(copy_result_to_proto(result)) == result


def test_knowledge_survives_the_way() -> None:
    table = HeatTable(SIZE, 100)
    table.note(prefix("abc"), 2.5)
    oldest = OldBlocks("pool", HASHES), OldBlocks("disk", HASHES[:1])
    member = PoolMember(WorkerId("w"), 9, "east", "m", REPORT, 1.5, oldest)
    hottest = table.hottest(10)
    cooled = table.cooled(2.0, 3.0, 10)
    message = pb.PoolKnowledge.FromString(
        knowledge_to_proto({"m": hottest}, {"m": cooled}, [member]).SerializeToString()
    )
    assert message.heat[0].namespace == "m"
    assert heat_from_proto(message.heat[0]) == hottest
    assert len(cooled) == 1
    assert cooled_from_proto(message.heat[0]) == cooled
    assert [pool_member_from_proto(each) for each in message.members] == [member]


def test_what_breaks_the_contract_is_refused() -> None:
    bad_role = pool_report_to_proto(REPORT)
    bad_role.ClearField("role")
    with pytest.raises(ProtocolError, match="role"):
        pool_report_from_proto(bad_role)
    with pytest.raises(ProtocolError, match="outcome"):
        copy_result_from_proto(pb.CopyResult(order_id="o"))
    with pytest.raises(ProtocolError, match="17 bytes"):
        pool_order_from_proto(pb.PoolOrder(evict_first=pb.EvictionHint(block_hashes=b"x" * 17)))
