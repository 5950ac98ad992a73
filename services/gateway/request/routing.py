"""Route plans from the scheduler, and the gateway's view of the fleet.

While no scheduler answers, the gateway ranks the last known fleet itself.
Tests: tests/unit/gateway/request/test_routing.py.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from kvmesh.core.adapters import adapter_name, lacking
from kvmesh.core.details import FleetWorker
from kvmesh.core.errors import LostError
from kvmesh.core.types import Candidate, Refusal, Role, RoutePlan, RouteQuery, WorkerId
from kvmesh.core.values import changed
from kvmesh.policy.groups import GroupKey, serving_label
from kvmesh.policy.routing import plan_without_scheduler
from kvmesh.telemetry.logs import event_logger

log = event_logger(__name__)


class Fleet(Protocol):
    """The last known fleet."""

    @property
    def workers(self) -> tuple[FleetWorker, ...]:
        """All live workers."""
        ...


class RouteSource(Protocol):
    """Makes route plans: the scheduler."""

    async def route(
        self, query: RouteQuery, traceparent: str, timeout_s: float
    ) -> RoutePlan | Refusal:
        """A plan or a refusal; raises LostError if the scheduler does not answer."""
        ...


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """The facts that all workers of a model report about it."""

    fingerprint: str
    block_size: int
    max_model_len: int


def served_workers(workers: tuple[FleetWorker, ...], model: str) -> tuple[FleetWorker, ...]:
    """The workers of one model."""
    return tuple(worker for worker in workers if worker.info.model == model)


def model_facts(workers: tuple[FleetWorker, ...], model: str) -> ModelFacts | None:
    """The facts of a model, from its workers; None without workers.

    The longest sequence is the smallest limit of any worker, so every worker can take every
    request. During an upgrade, block hashes use the checkpoint that most workers hold.
    """
    served = served_workers(workers, model)
    if not served:
        return None
    layouts = Counter(
        (each.info.layout.model_fingerprint, each.info.layout.block_size) for each in served
    )
    # Sorted, so that all gateways choose the same one of two equally common checkpoints.
    fingerprint, block_size = max(sorted(layouts), key=lambda layout: layouts[layout])
    longest = min(
        min(each.info.max_model_len, each.info.num_blocks * each.info.layout.block_size)
        for each in served
    )
    return ModelFacts(fingerprint, block_size, longest)


@dataclass(frozen=True, slots=True)
class Served:
    """The workers of one checkpoint that serve a scenario's requests.

    Attributes:
        group: their group over all clusters; the scheduler's plan chooses the cluster.
        num_awake: number of workers that accept new requests; 0 also if prefill or decode has none.
        adapters: ids of the LoRA adapters that they serve, by name. Of several of one name, as
            during a reload, the one that most workers have.
        embeds: all these workers compute embeddings.
        engines: names of their engines.
        num_slots: requests that those of them which accept new ones may decode at once.
    """

    group: GroupKey
    facts: ModelFacts
    num_awake: int
    adapters: Mapping[str, str] = field(default_factory=dict)
    embeds: bool = False
    engines: frozenset[str] = frozenset()
    num_slots: int = 0


def served_by_label(workers: tuple[FleetWorker, ...], model: str) -> dict[str, list[Served]]:
    """The checkpoints that serve each scenario, by the scenario's label.

    The label "" exists if there is any worker. If no worker is general, "" means all workers, as
    it does in route plans. While a checkpoint is being replaced, a label has several entries,
    sorted.
    """
    served = served_workers(workers, model)
    members: dict[str, list[FleetWorker]] = {}
    for worker in served:
        members.setdefault(worker.info.scenario, []).append(worker)
    if served:
        members.setdefault("", list(served))
    return {label: _by_checkpoint(each, model, label) for label, each in members.items()}


def _by_checkpoint(workers: list[FleetWorker], model: str, label: str) -> list[Served]:
    checkpoints: dict[str, list[FleetWorker]] = {}
    for worker in workers:
        checkpoints.setdefault(worker.info.layout.model_fingerprint, []).append(worker)
    found = []
    for fingerprint, each in sorted(checkpoints.items()):
        members = tuple(each)
        facts = model_facts(members, model)
        assert facts is not None, "a checkpoint is there because a worker has it"
        awake = sum(not worker.load.draining for worker in members)
        is_able = not missing_role(members, model)
        group = GroupKey(model, fingerprint, label, "")
        adapters = _adapters_of(members)
        embeds = all(each.info.embeds for each in members)
        engines = frozenset(each.info.layout.engine for each in members)
        num_awake = awake if is_able else 0
        slots = sum(
            each.info.decode_slots
            for each in members
            if each.info.role is not Role.PREFILL and not each.load.draining
        )
        found.append(Served(group, facts, num_awake, adapters, embeds, engines, slots))
    return found


def _merged(served: Mapping[str, list[Served]]) -> dict[str, str]:
    """The adapters of all groups, by name; of several ids, that of the group with most workers."""
    groups = [each for found in served.values() for each in found]
    merged: dict[str, str] = {}
    for each in sorted(groups, key=lambda each: each.num_awake):
        merged.update(each.adapters)
    return dict(sorted(merged.items()))


def _adapters_of(members: Sequence[FleetWorker]) -> dict[str, str]:
    """The adapters that members of one checkpoint can serve, by name.

    An adapter that only prefill or only decode workers have, as while it is loaded, is not served
    yet.
    """
    having: dict[str, list[tuple[str, FleetWorker]]] = {}
    for worker in members:
        for each in worker.info.adapters:
            having.setdefault(adapter_name(each), []).append((each, worker))
    absent = _missing_roles(members)
    found = {}
    for name, pairs in having.items():
        if _missing_roles([worker for _, worker in pairs]) == absent:
            counts = Counter(each for each, _ in pairs)
            found[name] = max(sorted(counts), key=counts.__getitem__)
    return found


def _missing_roles(workers: Sequence[FleetWorker]) -> list[str]:
    """Roles for which none of these workers takes new requests."""
    roles = {each.info.role for each in workers if not each.load.draining}
    return [role.value for role in (Role.PREFILL, Role.DECODE) if not roles & {role, Role.HYBRID}]


def missing_role(workers: tuple[FleetWorker, ...], model: str) -> str:
    """The reason why the fleet cannot serve a model; empty if it can."""
    served = served_workers(workers, model)
    missing = _missing_roles(served)
    if not missing:
        return ""
    num_awake = sum(not each.load.draining for each in served)
    ready = f"{num_awake} of {len(workers)} workers ready"
    return f"no {' and no '.join(missing)} worker for {model}; {ready}"


def missing_native(workers: tuple[FleetWorker, ...], model: str) -> dict[str, list[str]]:
    """Native libraries that a model's workers lack, by worker. Such workers run slower."""
    served = served_workers(workers, model)
    return {
        each.info.worker_id: list(each.info.missing_native)
        for each in served
        if each.info.missing_native
    }


def candidate_of(worker: FleetWorker) -> Candidate:
    """A worker of the fleet as a candidate."""
    info = worker.info
    return Candidate(info.worker_id, info.incarnation, info.control_endpoint)


class Router:
    """Gets route plans for one model.

    Args:
        model: its served name.
        fleet: the last known fleet.
        source: the scheduler.
        in_flight: this gateway's open attempts per worker.
        timeout_s: longest wait for the scheduler's answer.
    """

    def __init__(
        self,
        model: str,
        fleet: Fleet,
        source: RouteSource,
        in_flight: Callable[[], Mapping[WorkerId, int]],
        timeout_s: float,
    ) -> None:
        self._model = model
        self._fleet = fleet
        self._source = source
        self._in_flight = in_flight
        self._timeout_s = timeout_s
        self._alone = False
        self._served_of: tuple[FleetWorker, ...] = ()
        self._facts: ModelFacts | None = None
        self._served: dict[str, list[Served]] = {}
        self._adapters: dict[str, str] = {}
        self._scenarios: frozenset[str] = frozenset()

    @property
    def facts(self) -> ModelFacts | None:
        """The facts of the model, as its workers report them; None while no worker is known."""
        self._look()
        return self._facts

    @property
    def adapters(self) -> Mapping[str, str]:
        """Ids of the LoRA adapters that clients may name, by name, sorted."""
        self._look()
        return self._adapters

    @property
    def scenarios(self) -> frozenset[str]:
        """Scenarios that have workers of their own; empty while no worker is known."""
        self._look()
        return self._scenarios

    @property
    def engines_without_embeddings(self) -> list[str]:
        """Names of the engines in use if no worker computes embeddings; empty if some do.

        It is also empty while no worker is known.
        """
        self._look()
        every = [each for found in self._served.values() for each in found]
        if any(each.embeds for each in every):
            return []
        return sorted(frozenset[str]().union(*(each.engines for each in every)))

    def served(
        self, scenario: str, draw: float, adapter: str = "", *, embeds: bool = False
    ) -> Served | None:
        """The workers for a new request; None while no worker is known.

        Args:
            draw: random, from 0 to 1; chooses a checkpoint in proportion to its workers.
            adapter: id of the LoRA adapter that the workers must have; empty for none.
            embeds: the workers must compute embeddings.
        """
        self._look()
        found = self._served.get(serving_label(scenario, self._served), [])
        if adapter:
            found = [each for each in found if adapter in each.adapters.values()]
        if embeds:
            found = [each for each in found if each.embeds]
        able = [each for each in found if each.num_awake] or found
        place = draw * sum(each.num_awake for each in able)
        for each in able:
            place -= each.num_awake
            if place < 0:
                return each
        return able[-1] if able else None

    def served_as_before(self, scenario: str, fingerprint: str) -> Served | None:
        """The workers that can continue tokens of a checkpoint; None without any.

        Workers of another scenario are preferred to another checkpoint.
        """
        self._look()
        label = serving_label(scenario, self._served)
        for found in (self._served.get(label, []), *self._served.values()):
            for each in found:
                if each.group.fingerprint == fingerprint:
                    return each
        return None

    def _look(self) -> None:
        workers = self._fleet.workers
        if self._served_of is not workers:  # computed once per fleet view
            self._served_of = workers
            self._facts = model_facts(workers, self._model)
            self._served = served_by_label(workers, self._model)
            self._adapters = _merged(self._served)
            served = served_workers(workers, self._model)
            self._scenarios = frozenset(each.info.scenario for each in served)

    @property
    def not_ready(self) -> str:
        """The reason why the fleet cannot serve the model; empty if it can."""
        return missing_role(self._fleet.workers, self._model)

    @property
    def missing_native(self) -> dict[str, list[str]]:
        """Native libraries that the model's workers lack, by worker."""
        return missing_native(self._fleet.workers, self._model)

    async def route(
        self, query: RouteQuery, traceparent: str, longest_s: float
    ) -> RoutePlan | Refusal:
        """A plan from the scheduler, or from the last known fleet while no scheduler answers.

        Args:
            longest_s: time left; the wait for the scheduler is at most `timeout_s`.
        """
        timeout_s = min(self._timeout_s, longest_s)
        try:
            plan = await self._source.route(query, traceparent, timeout_s)
        except LostError as error:
            if not self._alone:  # logged once, not per request
                log.warning("routing_without_scheduler", error=str(error))
            self._alone = True
            if query.adapter:
                infos = (each.info for each in self._fleet.workers)
                without = lacking(infos, query.model, query.adapter)
                query = changed(query, avoid=query.avoid | without)
            return plan_without_scheduler(self._fleet.workers, query, self._in_flight())
        if self._alone:
            log.info("routing_by_scheduler_again")
        self._alone = False
        return plan
