from __future__ import annotations

from dataclasses import dataclass, field, replace

import pytest

from kvmesh.core.details import FleetWorker
from kvmesh.core.errors import LostError
from kvmesh.core.types import (
    Endpoint,
    KvLayout,
    Placement,
    Refusal,
    RefusalReason,
    RequestId,
    Role,
    RoutePlan,
    RouteQuery,
    WorkerId,
    WorkerInfo,
    WorkerLoad,
)
from kvmesh.policy.groups import GroupKey
from services.gateway.request.routing import (
    Router,
    candidate_of,
    missing_native,
    missing_role,
    model_facts,
)

LAYOUT = KvLayout("fp", "float32", 16, 2, 2, 8)
QUERY = RouteQuery(RequestId("r"), "tiny", 10, 5)


def worker(name: str, role: Role, **changes: object) -> FleetWorker:
    endpoint = Endpoint("host", 1)
    info = WorkerInfo(
        WorkerId(name), 1, role, "a", endpoint, endpoint, "tiny", LAYOUT, 512, 1, 8, 100
    )
    return FleetWorker(replace(info, **changes), WorkerLoad())  # type: ignore[arg-type]


P, D, H = (worker(role.value, role) for role in (Role.PREFILL, Role.DECODE, Role.HYBRID))


def test_workers_without_native_code_are_named() -> None:
    slow = worker("slow", Role.DECODE, missing_native=("kernels", "transfer"))
    other = worker("other", Role.DECODE, missing_native=("kernels",), model="large")
    assert missing_native((P, slow, other), "tiny") == {"slow": ["kernels", "transfer"]}


@dataclass
class Fleet:
    workers: tuple[FleetWorker, ...]


@dataclass
class Source:
    answer: RoutePlan | Refusal | None
    timeouts: list[float] = field(default_factory=list)

    async def route(
        self, query: RouteQuery, traceparent: str, timeout_s: float
    ) -> RoutePlan | Refusal:
        self.timeouts.append(timeout_s)
        if self.answer is None:
            raise LostError("no scheduler")
        return self.answer


@pytest.mark.parametrize(
    ("workers", "missing"),
    [
        ((P, D), ""),
        ((H,), ""),
        ((P,), "no decode"),
        ((D,), "no prefill"),
        ((), "no prefill and no decode"),
        ((P, FleetWorker(D.info, WorkerLoad(draining=True))), "no decode"),
        ((P, worker("x", Role.DECODE, model="other")), "no decode"),
    ],
)
def test_missing_role(workers: tuple[FleetWorker, ...], missing: str) -> None:
    reason = missing_role(workers, "tiny")
    assert reason.startswith(missing)
    assert bool(reason) == bool(missing)


def test_facts_are_the_common_ground() -> None:
    other = replace(LAYOUT, model_fingerprint="older")
    workers = (P, D, worker("x", Role.DECODE, layout=other, max_model_len=300))
    facts = model_facts(workers, "tiny")
    assert facts is not None
    assert (facts.fingerprint, facts.block_size, facts.max_model_len) == ("fp", 16, 300)
    small = worker("y", Role.DECODE, num_blocks=4)
    shorter = model_facts((P, small), "tiny")
    assert shorter is not None
    assert shorter.max_model_len == 64  # what its blocks can hold
    assert model_facts(workers, "other") is None


async def test_scheduler_decides_when_it_answers() -> None:
    plan = RoutePlan(Placement.AGGREGATED, (candidate_of(P),), (), True, "r", "p")
    source = Source(plan)
    router = Router("tiny", Fleet((P, D)), source, dict, 0.5)
    assert await router.route(QUERY, "", 10.0) is plan
    assert await router.route(QUERY, "", 0.1) is plan
    assert source.timeouts == [0.5, 0.1]
    assert router.not_ready == ""


async def test_refusals_of_the_scheduler_are_kept() -> None:
    refusal = Refusal(RefusalReason.NO_WORKERS, "none")
    router = Router("tiny", Fleet((P, D)), Source(refusal), dict, 0.5)
    assert await router.route(QUERY, "", 1.0) is refusal


async def test_without_a_scheduler_the_least_used_comes_first() -> None:
    busy, idle = worker("p1", Role.PREFILL), worker("p2", Role.PREFILL)
    in_flight = {WorkerId("p1"): 5}
    router = Router("tiny", Fleet((busy, idle, D)), Source(None), lambda: in_flight, 0.5)
    plan = await router.route(QUERY, "", 1.0)
    assert isinstance(plan, RoutePlan)
    assert [candidate.worker_id for candidate in plan.prefill] == ["p2", "p1"]
    assert not plan.cache_known


def test_a_scenario_is_served_by_its_group_else_by_a_general_one() -> None:
    chat = worker("c", Role.HYBRID, scenario="chat", max_model_len=64)
    fleet = Fleet((P, D, chat))
    router = Router("tiny", fleet, Source(None), dict, 1.0)
    served = {scenario: router.served(scenario, 0.0) for scenario in ("chat", "other", "")}
    for scenario, label in (("chat", "chat"), ("other", ""), ("", "")):
        found = served[scenario]
        assert found is not None
        assert found.group == GroupKey("tiny", "fp", label, "")
        assert found.facts.max_model_len == (64 if label else 512)
    fleet.workers = (chat,)
    elsewhere = router.served("other", 0.0)
    assert elsewhere is not None, "better from elsewhere than not"
    assert elsewhere.facts.max_model_len == 64
    fleet.workers = ()
    assert router.served("chat", 0.0) is None


NEWER = replace(LAYOUT, model_fingerprint="newer")


def test_a_group_has_a_checkpoint_of_its_own() -> None:
    """What most workers of other groups hold says nothing of this group."""
    others = [worker(f"d{n}", Role.HYBRID, scenario="doc", layout=NEWER) for n in range(3)]
    fleet = Fleet((worker("c", Role.HYBRID, scenario="chat"), *others))
    router = Router("tiny", fleet, Source(None), dict, 1.0)
    served = [router.served(each, 0.5) for each in ("chat", "doc")]
    assert [each.group.fingerprint for each in served if each] == ["fp", "newer"]


def test_while_a_checkpoint_is_replaced_each_gets_requests_by_its_workers() -> None:
    newer = [worker(f"n{n}", Role.HYBRID, layout=NEWER) for n in range(3)]
    fleet = Fleet((H, *newer))
    router = Router("tiny", fleet, Source(None), dict, 1.0)

    def drawn() -> list[str]:
        found = [router.served("", (number + 0.5) / 8) for number in range(8)]
        return [each.group.fingerprint for each in found if each]

    assert drawn() == ["fp"] * 2 + ["newer"] * 6
    draining = FleetWorker(H.info, WorkerLoad(draining=True))
    fleet.workers = (draining, *newer)
    assert drawn() == ["newer"] * 8, "the other one takes nothing new"
    assert router.served_as_before("", "fp") is not None
    fleet.workers = tuple(newer)
    assert router.served_as_before("", "fp") is None
    fleet.workers = (worker("p", Role.PREFILL), *newer)
    assert drawn() == ["newer"] * 8, "alone it can finish nothing"


def test_adapters_are_asked_of_workers_that_have_them() -> None:
    other = replace(LAYOUT, model_fingerprint="with")
    having = [
        worker(f"with-{role.value}", role, layout=other, adapters=("py@1", "sql@1"))
        for role in (Role.PREFILL, Role.DECODE)
    ]
    router = Router("tiny", Fleet((P, D, *having)), Source(None), dict, 1.0)
    assert router.adapters == {"py": "py@1", "sql": "sql@1"}
    for draw in (0.0, 0.4, 0.9):
        served = router.served("", draw, "sql@1")
        assert served is not None
        assert served.group.fingerprint == "with"
    anybody = [router.served("", draw) for draw in (0.0, 0.9)]
    assert {each.group.fingerprint for each in anybody if each} == {"fp", "with"}
    assert router.served("", 0.5, "unknown@1") is None


def test_an_adapter_is_served_when_prefill_and_decode_have_it() -> None:
    fleet = Fleet((P, D))
    router = Router("tiny", fleet, Source(None), dict, 1.0)

    def given(prefill: str, decode: str, *more: str) -> dict[str, str]:
        fleet.workers = (
            worker("p", Role.PREFILL, adapters=(prefill,) if prefill else ()),
            worker("d", Role.DECODE, adapters=(decode,) if decode else ()),
            *(worker(f"d-{each}", Role.DECODE, adapters=(each,)) for each in more),
        )
        return dict(router.adapters)

    assert given("", "") == {}
    assert given("sql@1", "") == given("", "sql@1") == {}, "it is being loaded"
    assert given("sql@1", "sql@1") == {"sql": "sql@1"}
    assert given("sql@2", "sql@1") == {"sql": "sql@1"}, "it is being loaded again"
    assert given("sql@2", "sql@1", "sql@2") == {"sql": "sql@2"}, "most have the newer one"


async def test_without_a_scheduler_workers_that_lack_the_adapter_come_last() -> None:
    more = [worker(f"d{each}", Role.DECODE, adapters=("sql@1",)) for each in range(2)]
    router = Router("tiny", Fleet((P, D, *more)), Source(None), dict, 1.0)
    for number in range(8):
        query = RouteQuery(RequestId(f"r{number}"), "tiny", 10, 10, adapter="sql@1")
        plan = await router.route(query, "", 1.0)
        assert isinstance(plan, RoutePlan)
        assert plan.decode[0].worker_id in ("d0", "d1")


def test_embeddings_are_asked_of_workers_that_compute_them() -> None:
    fleet = Fleet((P, D))
    router = Router("tiny", fleet, Source(None), dict, 1.0)
    assert router.served("", 0.5, embeds=True) is None
    assert router.engines_without_embeddings == [P.info.layout.engine]
    other = replace(LAYOUT, model_fingerprint="other", engine="vllm")
    having = [
        worker(f"v-{role.value}", role, layout=other, embeds=True)
        for role in (Role.PREFILL, Role.DECODE)
    ]
    fleet.workers = (P, D, *having)
    assert router.engines_without_embeddings == []
    for draw in (0.0, 0.9):
        served = router.served("", draw, embeds=True)
        assert served is not None
        assert served.group.fingerprint == "other"
    fleet.workers = (
        P,
        D,
        replace(having[0], info=replace(having[0].info, embeds=False)),
        having[1],
    )
    assert router.engines_without_embeddings == [P.info.layout.engine, "vllm"]
    fleet.workers = ()
    assert router.engines_without_embeddings == []
