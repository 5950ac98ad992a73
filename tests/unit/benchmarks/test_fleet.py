"""What needs no processes of the fleet's benchmark: steps, answers, verdicts."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from benchmarks import fleet_faults, fleet_groups
from benchmarks.fleet import NOTES, PARTS
from benchmarks.fleet_engines import ENGINES, FleetEngine
from benchmarks.fleet_fates import fate_of, is_met
from benchmarks.fleet_load import Asked, Clients, p99_ms
from benchmarks.result import Row
from kvmesh.cli.group import read_groups
from kvmesh.policy.group_life import GroupState, GroupWish
from kvmesh.rpc.convert_group import state_word
from kvmesh.v1 import scheduler_service_pb2 as pb
from tests.e2e.api_client import Answer, ApiClient, Choice
from tests.mesh_processes import MODEL_FOLDER

PROMPT, TOKENS = [5, 6, 7], 12
FAKE = ENGINES["fake"]


SEED = 1


def asked(token_ids: list[int], took_s: float = 1.0) -> Asked:
    answer = Answer(200, {}, 0.1, {0: Choice(token_ids=token_ids)})
    return Asked("", PROMPT, SEED, 0.0, took_s, answer)


async def clients(*answers: Asked, engine: FleetEngine = FAKE) -> Clients:
    async with ApiClient("http://127.0.0.1:1") as client:
        return Clients(client, TOKENS, (1, 1), engine, list(answers))


@pytest.mark.parametrize("engine", ENGINES.values(), ids=ENGINES)
async def test_an_answer_is_of_one_checkpoint_or_wrong(tmp_path: Path, engine: FleetEngine) -> None:
    new = engine.another_checkpoint(tmp_path / "new")
    old_tokens, new_tokens = (
        engine.tokens(PROMPT, TOKENS, SEED, folder) for folder in (MODEL_FOLDER, new)
    )
    assert old_tokens != new_tokens
    assert old_tokens[0] != new_tokens[0]
    mixed = old_tokens[: TOKENS // 2] + new_tokens[TOKENS // 2 :]
    load = await clients(asked(old_tokens), asked(new_tokens), asked(mixed), engine=engine)
    assert load.wrong(MODEL_FOLDER, new) == 1
    assert load.wrong() == 2
    assert load.wrong(MODEL_FOLDER, new, since=3) == 0


async def test_a_request_without_a_whole_answer_has_failed() -> None:
    refused = Asked("", PROMPT, 1, 0.0, 0.1, Answer(503, {}, 0.1))
    broken = Asked("", PROMPT, 1, 0.0, 0.1, Answer(200, {}, 0.1, error={"message": "lost"}))
    load = await clients(asked([1]), refused, broken)
    assert (load.failed(), load.failed(2)) == (2, 1)


def test_a_request_met_a_worker_that_had_it_in_time_or_kept_it_waiting() -> None:
    phases = [("waiting", "", 0), ("prefill", "p0", 100), ("decode", "d0", 200), ("", "", 900)]
    told = {
        "at": 50.0,
        "decode": "d0",
        "phases": [
            {"phase": phase, "worker": worker, "start_ms": start, "end_ms": end}
            for (phase, worker, start), (_, _, end) in itertools.pairwise(phases)
        ],
        "events": [
            {"what": "refused", "worker": "p1", "text": "prefill: busy"},
            {"what": "refused", "worker": "p2", "text": "prefill: lost"},
            {"what": "lost", "worker": "d1", "text": "decode_stalled"},
        ],
    }
    fate = fate_of(told, 50.0)
    assert [is_met(fate, name, 100.15, 100.16) for name in ("p0", "d0")] == [True, True]
    assert [is_met(fate, name, 100.25, 101.0) for name in ("p0", "d0")] == [False, True]
    assert not is_met(fate, "d0", 100.95, 101.0)
    assert [is_met(fate, name, 0.0, 1.0) for name in ("p1", "p2", "d1")] == [False, True, True]
    times = [asked([], took_s=number / 100) for number in range(1, 102)]
    assert p99_ms(times) == pytest.approx(1000.0)


def view(wish: GroupWish, state: pb.GroupState.ValueType, num_workers: int = 2) -> pb.GroupView:
    message = pb.GroupView(state=state, workers=[pb.GroupWorker()] * num_workers)
    message.wish.checkpoint = wish.checkpoint
    if wish.opened is not None:
        message.wish.opened = wish.opened
    return message


def test_the_scheduler_is_killed_in_every_state_of_the_workflow(tmp_path: Path) -> None:
    file = fleet_groups.group_file(tmp_path, ("chat", 1, 1), ("doc", 1, 1))
    assert [wish.scenario for wish in read_groups(file)] == ["chat", "doc"]
    steps = fleet_groups.steps(file, Path("/new"))
    states = [value for name, value in pb.GroupState.items() if value]
    wishes = [GroupWish("chat", "/new", opened=opened) for opened in (None, "", "/new")]
    killed = {
        state_word(state)
        for step in steps
        for state in states
        for wish in wishes
        if step.kill_in(view(wish, state))
    }
    assert killed == {state.value for state in GroupState} - {GroupState.GONE.value}
    before, after = (
        view(GroupWish("chat", "/new", opened=opened), pb.GROUP_STATE_UPGRADING)
        for opened in ("", "/new")
    )
    told = {step.name: (step.kill_in(before), step.kill_in(after)) for step in steps}
    assert told["upgrade chat"] == (True, False)
    assert told["upgrade doc"] == (False, True)
    done = {step.name: step.is_done for step in steps}
    ready = view(GroupWish("chat", "/new", opened="/new"), pb.GROUP_STATE_READY)
    assert done["upgrade chat"](ready)
    assert not done["upgrade chat"](view(GroupWish("chat"), pb.GROUP_STATE_READY))
    assert not done["remove doc"](ready)
    assert done["remove doc"](None)


ROW: Row = {"answers": 9, "failed": 0, "wrong": 0, "p99 ms": 100.0, "p99 ms before": 100.0}
ROWS: dict[str, Row] = {
    "isolation": {**ROW, "case": "policy kvmesh", "ratio": 1.0},
    "upgrade": ROW,
    "substitutes": {**ROW, "as meant": True, "substitutes": 1},
    "restarts": {"answers": 9, "failed or wrong": 0, "longest pause ms": 900},
    "ejection": {**ROW, "case": "hang", "ratio": 1.0, "ejected s": 2.0, "met it": 4}
    | {"ejected beside": 0},
}
WORSE: dict[str, Row] = {
    "isolation": {"ratio": 1.3},
    "upgrade": {"wrong": 1},
    "substitutes": {"substitutes": 2},
    "restarts": {"failed or wrong": 1},
    "ejection": {"ejected s": 3.1},
}


@pytest.mark.parametrize("part", list(PARTS))
def test_targets_are_met_or_not(part: str) -> None:
    rows = [ROWS[part]] * len(fleet_faults.WAYS)
    assert all(target.met for target in PARTS[part].judge(rows))
    worse = [*rows[1:], {**rows[0], **WORSE[part]}]  # the last row of restarts is of all of them
    assert not all(target.met for target in PARTS[part].judge(worse))


def test_a_long_pause_in_a_restart_misses_its_target() -> None:
    paused = {**ROWS["restarts"], "longest pause ms": 2001}
    assert not all(target.met for target in PARTS["restarts"].judge([paused, ROWS["restarts"]]))


def test_every_part_has_a_note() -> None:
    told = {note.partition(":")[0] for note in NOTES}
    assert {part.rstrip("s") for part in PARTS} <= {each.rstrip("s") for each in told}


def test_each_way_to_fill_a_place_has_a_stack() -> None:
    assert tuple(fleet_faults.SUBSTITUTES) == fleet_faults.WAYS
