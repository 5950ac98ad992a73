"""Groups live: what one goes through is not noticed in another, and three are upgraded under load
by schedulers that are killed in every state.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.fleet_engines import STEP_S, FleetEngine
from benchmarks.fleet_load import WAIT_S, Asked, Clients, Schedulers, clients, p99_ms, say
from benchmarks.result import Row, Target
from kvmesh.cli.stack_state import read_description
from kvmesh.v1 import scheduler_service_pb2 as pb
from tests.e2e.local_stack import group, member, running_up
from tests.mesh_processes import MODEL_FOLDER
from tests.waiting import until

ONE_OF_EACH = ("--prefill", "1", "--decode", "1")
STATE = "state"


def group_file(folder: Path, *groups: tuple[str, int, int]) -> Path:
    """A file for `kvmesh group apply`: scenarios with their prefill and decode workers."""
    file = folder / "groups.toml"
    tables = (
        f'[[group]]\nscenario = "{name}"\nprefill = {prefill}\ndecode = {decode}\n'
        for name, prefill, decode in groups
    )
    file.write_text("\n".join(tables))
    return file


# --- isolation -----------------------------------------------------------------------------------

POLICIES = ("kvmesh", "joint", "pdserve")
SLOW = {
    "KVMESH_PLANNING__ROLES": "apply",
    "KVMESH_LIMITS__TTFT_DEADLINE_MS": "120000",
    "KVMESH_ROUTING__AGGREGATE_TOKENS": "256",
}

LONG_STEP_S = 0.3
"""Long beside what a busy machine adds to a request."""

LONG_PROMPT, FEW_TOKENS = 400, 4
CALM_CLIENTS = 2
CROWD = 20
"""Two of them keep the group's only prefill worker busy: this is ten times its load."""


async def isolation(folder: Path, scale: float, engine: FleetEngine) -> list[Row]:
    """A group alone, beside one at ten times its load, and alone again."""
    rows = []
    for policy in POLICIES:
        own = folder / policy
        own.mkdir()
        file = group_file(own, ("calm", 2, 2))
        more = {
            **SLOW,
            **engine.prepare(own, LONG_STEP_S),
            "KVMESH_ROUTING__POLICY": policy,
        }
        async with running_up(own, *engine.words, *ONE_OF_EACH, more=more) as told:
            await group(own / STATE, "apply", str(file))
            row = await _beside_a_crowd(f"http://{told['http']}", engine, int(40 * scale))
            rows.append({"part": "isolation", "case": f"policy {policy}", **row})
            say(f"  {rows[-1]}")
    return rows


async def _beside_a_crowd(url: str, engine: FleetEngine, count: int) -> Row:
    lengths = (LONG_PROMPT, LONG_PROMPT)
    async with clients(url, engine, {"calm": CALM_CLIENTS}, FEW_TOKENS, lengths) as calm:

        async def more() -> Sequence[Asked]:
            await calm.more(2)  # what began before
            first = len(calm.asked)
            await calm.more(count)
            return calm.asked[first:]

        alone = [*await more()]
        async with clients(url, engine, {"": CROWD}, FEW_TOKENS, lengths) as crowd:
            beside = await more()
        alone += await more()
    return {
        "answers": len(calm.asked),
        "failed": calm.failed() + crowd.failed(),
        "wrong": calm.wrong(),
        "p99 ms before": p99_ms(alone),
        "p99 ms": p99_ms(beside),
        "ratio": round(p99_ms(beside) / p99_ms(alone), 3),
        "detail": f"the crowd's p99 is {p99_ms(crowd.asked):.0f} ms",
    }


def judge_isolation(rows: Sequence[Row]) -> list[Target]:
    """What was to hold."""
    return [
        Target(
            f"isolation, {row['case']}: p99 beside ten times the other group's load over alone",
            row["ratio"],
            1.2,
            at_most=True,
        )
        for row in rows
    ]


# --- upgrade -------------------------------------------------------------------------------------

STREAM_TOKENS = 60
CLIENTS = 2


@dataclass(frozen=True, slots=True)
class Step:
    """One action of people, and when the scheduler is killed in it.

    Attributes:
        kill_in: whether the killing may begin, from the group; None: at once.
        is_done: whether the group is as it was to be; None: there is no such group.
    """

    name: str
    words: tuple[str, ...]
    scenario: str
    killed_in: str
    kill_in: Callable[[pb.GroupView | None], bool]
    is_done: Callable[[pb.GroupView | None], bool]


def _is_in(state: int, *, closed: bool | None = None) -> Callable[[pb.GroupView | None], bool]:
    """Whether a group is in a state, with workers of before that were closed or not."""

    def fact(view: pb.GroupView | None) -> bool:
        if view is None or view.state != state:
            return False
        return closed is None or closed == (view.wish.opened == view.wish.checkpoint)

    return fact


def _is_ready(num_workers: int, checkpoint: str | None = None) -> Callable[..., bool]:
    def fact(view: pb.GroupView | None) -> bool:
        return (
            view is not None
            and view.state == pb.GROUP_STATE_READY
            and len(view.workers) == num_workers
            and checkpoint in (None, view.wish.checkpoint)
        )

    return fact


def steps(file: Path, new: Path) -> list[Step]:
    """From one group to three, all of another checkpoint, and to two."""
    to = ("--to", str(new))
    old_serves = _is_in(pb.GROUP_STATE_UPGRADING, closed=False)
    new_serves = _is_in(pb.GROUP_STATE_UPGRADING, closed=True)
    changing = _is_in(pb.GROUP_STATE_CHANGING)
    return [
        Step(
            "set up", ("apply", str(file)), "chat", "gathering",
            _is_in(pb.GROUP_STATE_GATHERING), _is_ready(2),
        ),
        Step("set up the third", (), "doc", "ready", _is_ready(2), _is_ready(2)),
        Step(
            "scale out", ("scale", "chat", "--decode", "2"), "chat", "changing, one starts",
            changing, _is_ready(3),
        ),
        Step(
            "scale in", ("scale", "chat", "--decode", "1"), "chat", "changing, one is to go",
            changing, _is_ready(2),
        ),
        Step(
            "upgrade any", ("upgrade", "any", *to), "", "the wish is written",
            lambda _: True, _is_ready(2, str(new)),
        ),
        Step(
            "upgrade chat", ("upgrade", "chat", *to), "chat", "upgrading, the old ones serve",
            old_serves, _is_ready(2, str(new)),
        ),
        Step(
            "upgrade doc", ("upgrade", "doc", *to), "doc", "upgrading, the new ones serve",
            new_serves, _is_ready(2, str(new)),
        ),
        Step(
            "remove doc", ("remove", "doc"), "doc", "draining",
            _is_in(pb.GROUP_STATE_DRAINING), lambda view: view is None,
        ),
    ]  # fmt: skip


async def upgrade(folder: Path, _scale: float, engine: FleetEngine) -> list[Row]:
    """Three groups to another checkpoint under load; the scheduler is killed in every state."""
    new = engine.another_checkpoint(folder / "new")
    file = group_file(folder, ("chat", 1, 1), ("doc", 1, 1))
    rows = []
    more = engine.prepare(folder, STEP_S)
    async with running_up(folder, *engine.words, *ONE_OF_EACH, more=more) as told:
        url, schedulers = f"http://{told['http']}", Schedulers(told)
        asking = dict.fromkeys(("", "chat", "doc"), CLIENTS)
        async with clients(url, engine, asking, STREAM_TOKENS) as load:
            for step in steps(file, new):
                row = await _carried_out(step, folder / STATE, schedulers, load, new)
                rows.append({"part": "upgrade", **row})
                say(f"  {rows[-1]}")
    return rows


async def _carried_out(
    step: Step, state: Path, schedulers: Schedulers, load: Clients, new: Path
) -> Row:
    began, first = time.perf_counter(), len(load.asked)

    async def is_time() -> bool:
        views = await schedulers.groups()
        return step.kill_in(views.get(step.scenario))

    # On a busy machine the state may pass before the command has ended.
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(until(is_time, f"{step.name}: {step.killed_in}", WAIT_S))
        if step.words:
            await group(state, *step.words, "--no-wait")
    was_over = not await is_time()
    killed = _scheduler(state)
    os.kill(killed, signal.SIGKILL)
    await until(lambda: _scheduler(state) not in (0, killed), "it is started again", WAIT_S)

    async def is_done() -> bool:
        views = await schedulers.groups()
        return bool(views) and step.is_done(views.get(step.scenario))

    await until(is_done, f"{step.name} is done", WAIT_S)
    seconds = round(time.perf_counter() - began, 1)
    await load.more(6)
    return {
        "case": step.name,
        "scheduler killed in": step.killed_in + (" (was over)" if was_over else ""),
        "done s": seconds,
        "answers": len(load.asked) - first,
        "failed": load.failed(first),
        "wrong": await asyncio.to_thread(load.wrong, MODEL_FOLDER, new, since=first),
    }


def _scheduler(state: Path) -> int:
    told: Mapping[str, Any] | None = read_description(state)
    return 0 if told is None else int(member(dict(told), "scheduler")["pid"])


def judge_upgrade(rows: Sequence[Row]) -> list[Target]:
    """What was to hold."""
    answers = sum(row["answers"] for row in rows)
    what = f"upgrade: {answers} requests while three groups changed and the scheduler was killed"
    return [
        Target(
            f"{what} {len(rows)} times, failed", sum(r["failed"] for r in rows), 0, at_most=True
        ),
        Target(
            "upgrade: answers that are not of one checkpoint",
            sum(row["wrong"] for row in rows),
            0,
            at_most=True,
        ),
    ]
