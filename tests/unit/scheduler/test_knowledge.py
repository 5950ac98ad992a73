"""PrefixKnowledge: the index first, whoever can be asked next, and every way counted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import pytest
from prometheus_client import REGISTRY

from kvmesh.core.slots import PrefixMatch
from kvmesh.core.types import BlockHash, Role, WorkerId
from services.scheduler.fleet import Fleet
from services.scheduler.knowledge import Known, Lookup, PrefixKnowledge
from tests.unit.policy.fleet_examples import LAYOUT, query, worker_info

ASKED = query(block_hashes=(BlockHash(bytes(16)),))
H1, H2 = WorkerId("h1"), WorkerId("h2")


@dataclass
class Answer:
    matches: Sequence[PrefixMatch] = ()
    known: bool = True
    why: str = ""


@dataclass
class Asked:
    answer: Answer

    async def match(self, namespace: str, hashes: Sequence[BlockHash], timeout_s: float) -> Answer:
        return self.answer


@dataclass
class Index:
    known: bool = True
    held: dict[str, Mapping[WorkerId, int]] = field(default_factory=dict)

    def match(self, namespace: str, hashes: Sequence[BlockHash]) -> Mapping[WorkerId, int]:
        return self.held.get(namespace, {})


def fleet() -> Fleet:
    made = Fleet(3.0)
    made.register(worker_info("h1", Role.HYBRID), 0.0)
    return made


def count(how: Lookup) -> float:
    labels = {"outcome": how.value}
    return REGISTRY.get_sample_value("kvmesh_scheduler_prefix_lookups_total", labels) or 0.0


@pytest.mark.parametrize("why", [Lookup.LATE, Lookup.DEGRADED, Lookup.AWAY])
async def test_a_lookup_that_failed_says_why_and_is_counted(why: Lookup) -> None:
    before = count(why)
    asked = Asked(Answer(known=False, why=why.value))
    knowledge = PrefixKnowledge(fleet(), asked, Index(known=False), 0.05)
    assert await knowledge.of(ASKED) == Known(None, why)
    assert count(why) == before + 1


async def test_the_index_is_asked_first_and_others_while_it_does_not_know() -> None:
    index = Index(held={LAYOUT.model_fingerprint: {H1: 4}})
    asked = Asked(Answer([PrefixMatch(H1, 1, "east", 3), PrefixMatch(H2, 1, "east", 9)]))
    knowledge = PrefixKnowledge(fleet(), asked, index, 0.05)
    assert await knowledge.of(ASKED) == Known({H1: 4}, Lookup.INDEX)
    index.known = False
    assert await knowledge.of(ASKED) == Known({H1: 3}, Lookup.ASKED), "h2 is no member"


async def test_two_namespaces_count_together() -> None:
    made = fleet()
    new = type(LAYOUT)("new", "float32", 16, 2, 2, 32)
    made.register(worker_info("h2", Role.HYBRID, layout=new), 0.0)
    index = Index(held={LAYOUT.model_fingerprint: {H1: 4}, "new": {H2: 7}})
    knowledge = PrefixKnowledge(made, Asked(Answer()), index, 0.05)
    assert (await knowledge.of(ASKED)).matches == {H1: 4, H2: 7}


async def test_nothing_to_look_up_and_nobody_to_ask() -> None:
    knowledge = PrefixKnowledge(fleet(), Asked(Answer()), Index(), 0.05)
    assert await knowledge.of(query()) == Known({}, Lookup.NOTHING)
    nobody = PrefixKnowledge(Fleet(3.0), Asked(Answer()), Index(), 0.05)
    assert await nobody.of(ASKED) == Known({}, Lookup.NOTHING)
    alone = PrefixKnowledge(fleet(), None, None, 0.05)
    assert await alone.of(ASKED) == Known(None, Lookup.OFF)
