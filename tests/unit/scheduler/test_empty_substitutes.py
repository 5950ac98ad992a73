"""Places that are filled by spares which load the model only then."""

from __future__ import annotations

from kvmesh.core.empty_spare import Assignment, EmptySpare, Origin
from kvmesh.core.types import Role, WorkerId, WorkerInfo, WorkerLoad
from services.scheduler.registrations import Orders
from tests.unit.policy.fleet_examples import worker_info
from tests.unit.scheduler.test_substitutes import START_S, TWO, Places

LOAD_S = 0.5
"""Seconds in which an empty spare loads the model."""


def loaded(name: str, role: Role = Role.DECODE, incarnation: int = 1) -> WorkerInfo:
    origin = Origin("/m", START_S, LOAD_S)
    return worker_info(name, role, incarnation=incarnation, origin=origin)


WAS_EMPTY = worker_info(
    "e0",
    Role.DECODE,
    origin=Origin("/m", START_S, LOAD_S, Assignment.like(loaded("d0"), "an earlier loss")),
)


class WithEmpty(Places):
    """Two of each role that loaded their model in `LOAD_S`, and empty spares."""

    def __init__(self, *names: str) -> None:
        super().__init__({})
        self.streams: dict[str, Orders] = {}
        for name, role in TWO.items():
            self.take(loaded(name, role))
        for name in names:
            self.wait_empty(name)

    def wait_empty(self, name: str) -> None:
        self.streams[name] = Orders()
        self.empties.note(EmptySpare(WorkerId(name), 1, "east", "kvmesh"), self.streams[name])

    def loading(self) -> dict[str, str]:
        """Empty spares that load a model, and why."""
        found = {each.worker_id: each.assignment for each in self.empties.all()}
        return {str(name): a.reason.partition(":")[0] for name, a in found.items() if a}

    def becomes(self, name: str) -> None:
        """An empty spare has loaded its model."""
        spare = self.empties.find(WorkerId(name))
        assert spare is not None
        assert spare.assignment is not None
        told = spare.assignment
        self.empties.forget(self.streams[name])
        origin = Origin(told.checkpoint, START_S, LOAD_S, told)
        self.take(worker_info(name, told.role, scenario=told.scenario, origin=origin))

    def fails_to_load(self, name: str) -> None:
        """Its process ends, and waits again."""
        self.empties.forget(self.streams[name])
        self.wait_empty(name)


async def test_an_empty_spare_loads_the_model_and_takes_the_place() -> None:
    parts = WithEmpty("e0", "e1")
    await parts.look()
    parts.lose("d0")
    for _ in range(3):
        await parts.look()
    assert parts.loading() == {"e0": "takes the place of d0"}, "one, and once"
    parts.becomes("e0")
    await parts.look(LOAD_S)
    parts.take(loaded("d0", incarnation=2))
    await parts.look(START_S)
    await parts.look()
    roles = {name: role.value for name, role in TWO.items()}
    assert parts.roles() == roles | {"e0": "decode", "d0": "spare"}
    assert parts.steps() == ["empty", "filled", "returned"]
    assert parts.loading() == {}


async def test_an_empty_spare_that_comes_after_the_lost_worker_makes_room() -> None:
    parts = WithEmpty("e0")
    await parts.look()
    parts.lose("d0")
    await parts.look()
    parts.take(loaded("d0", incarnation=2))
    await parts.look()
    assert parts.steps() == ["empty"]
    parts.becomes("e0")
    await parts.look()
    assert (parts.roles()["d0"], parts.roles()["e0"]) == ("decode", "spare")
    assert parts.steps() == ["empty", "returned"]


async def test_an_empty_spare_that_cannot_load_is_not_tried_again() -> None:
    parts = WithEmpty("e0", "e1")
    await parts.look()
    parts.lose("d0")
    await parts.look()
    parts.fails_to_load("e0")
    await parts.look(3 * LOAD_S + 1.1)
    assert parts.loading() == {"e1": "takes the place of d0"}
    parts.fails_to_load("e1")
    await parts.look(3 * LOAD_S + 1.1)
    assert parts.steps() == ["empty", "empty", "return"]


async def test_a_lost_worker_whose_next_life_is_empty_takes_its_place_again() -> None:
    parts = WithEmpty()
    parts.take(WAS_EMPTY)
    parts.fleet.leave(parts.members["p1"])
    parts.fleet.leave(parts.members["d0"])
    await parts.look()
    parts.lose("e0")
    await parts.look()
    assert parts.steps() == ["return"]
    parts.wait_empty("e0")
    await parts.look(START_S - LOAD_S)
    assert parts.loading() == {"e0": "takes the place of e0"}
    parts.becomes("e0")
    await parts.look(LOAD_S)
    await parts.look()
    assert parts.roles() == {"p0": "prefill", "d1": "decode", "e0": "decode"}
    assert parts.steps() == ["return", "empty", "returned"]


async def test_a_helper_goes_back_when_the_empty_spare_has_its_place_again() -> None:
    parts = WithEmpty()
    parts.take(WAS_EMPTY)
    for name in ("d0", "d1"):
        parts.take(parts.infos[name], WorkerLoad(blocks_free=0))
    await parts.look()
    parts.lose("e0")
    for _ in range(2):
        await parts.look()
    assert parts.steps() == ["flip", "filled"]
    parts.wait_empty("e0")
    await parts.look(START_S)
    parts.becomes("e0")
    await parts.look(LOAD_S)
    roles = {name: role.value for name, role in TWO.items()}
    assert parts.roles() == roles | {"e0": "decode"}


async def test_an_empty_spare_that_comes_back_empty_leaves_its_place_to_another() -> None:
    parts = WithEmpty("e1")
    parts.take(WAS_EMPTY)
    await parts.look()
    parts.lose("e0")
    await parts.look()
    parts.becomes("e1")
    await parts.look(LOAD_S)
    parts.wait_empty("e0")
    await parts.look(START_S)
    roles = {name: role.value for name, role in TWO.items()}
    assert parts.roles() == roles | {"e1": "decode"}
    assert parts.steps() == ["empty", "filled", "returned"]
    assert parts.loading() == {}, "it waits for the next"
    assert not await parts.substitutes.look()
