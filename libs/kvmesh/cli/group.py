"""`kvmesh group`: sets groups of workers up, scales, upgrades and removes them while requests run.

Tests: tests/unit/cli/test_group.py, tests/e2e/test_group_life.py.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from kvmesh.cli.flags import add_flag, add_switch, count, new_parser
from kvmesh.cli.scheduler_access import (
    NoAnswerError,
    SchedulerAccess,
    ask_scheduler,
    scheduler_access,
)
from kvmesh.cli.scheduler_flags import add_scheduler_flags
from kvmesh.cli.screen import terminal
from kvmesh.core.config import OneLineParser
from kvmesh.core.errors import ConfigError, ProtocolError
from kvmesh.core.text_files import UNREADABLE, why_unreadable
from kvmesh.core.types import Role
from kvmesh.policy.group_life import GroupState
from kvmesh.rpc.convert_group import state_word, wish_from_proto
from kvmesh.rpc.convert_worker import role_from_proto
from kvmesh.v1.scheduler_service_pb2 import (
    ApplyGroupRequest,
    GroupView,
    GroupWish,
    GroupWorker,
    ListGroupsRequest,
)

ANY = "any"
"""Name of the group without a scenario."""

ANSWER_S = 10.0
_POLL_S = 0.25
_FIELDS = {"scenario", "checkpoint", "prefill", "decode", "hybrid"}

_EPILOG = """\
GROUP is the scenario that a group serves (x-kvmesh-scenario of requests), or `any` for the group
that serves all other requests. The scheduler's launcher starts and ends workers; `kvmesh up` is a
launcher. A worker that is removed gets no new requests and ends when its last request has ended.

  apply FILE  changes groups to match a TOML file; groups that are not in the file stay as they are:
                [[group]]
                scenario = "chat"
                checkpoint = "/models/one"   # omit it for the launcher's model
                prefill = 1
                decode = 2
  upgrade     starts workers with another checkpoint beside the serving ones. When all of them are
              ready, new requests go there. A stream ends on the checkpoint on which it began

options of every action (`kvmesh group list --help` explains them):
  --scheduler HOST:PORT[,...]  --state-dir DIR  --timeout SECONDS  --secret-file FILE
  --tls-ca FILE  --tls-cert FILE  --tls-key FILE

Each action except list waits until the group has its desired state; --no-wait returns at once.

examples:
  kvmesh group list
  kvmesh group scale any --decode 3
  kvmesh group upgrade any --to /models/two --timeout 1800
  kvmesh group remove chat

exit code: 0 done; 1 no answer, unknown group, or not done in time; 2 wrong usage
"""


def _parser() -> argparse.ArgumentParser:
    common = OneLineParser(add_help=False)
    add_scheduler_flags(common, 600.0)
    parser = new_parser(
        "kvmesh group", "Sets up, scales, upgrades and removes groups of workers.", _EPILOG
    )
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    listing = actions.add_parser("list", parents=[common], help="list all groups and their workers")
    add_switch(listing, "--json", "print JSON")
    apply = actions.add_parser("apply", parents=[common], help="change groups to match a file")
    apply.add_argument("file", metavar="FILE", help="TOML with [[group]] tables")
    scale = actions.add_parser(
        "scale", parents=[common], help="change a group's numbers of workers"
    )
    upgrade = actions.add_parser(
        "upgrade", parents=[common], help="switch a group to another model"
    )
    remove = actions.add_parser(
        "remove", parents=[common], help="remove a group after its running requests have ended"
    )
    for action in (scale, upgrade, remove):
        action.add_argument("group", metavar="GROUP", help=f"its scenario, or `{ANY}`")
    for role in ("prefill", "decode", "hybrid"):
        text = f"{role} workers; -1: as many as now"
        add_flag(scale, f"--{role}", -1, text, kind=_count_or_same)
    add_flag(upgrade, "--to", "", "model folder as seen by the launcher's machine", metavar="MODEL")
    for action in (apply, scale, upgrade, remove):
        add_switch(action, "--no-wait", "return when the wish is written down")
    return parser


def _count_or_same(text: str) -> int:
    return -1 if text == "-1" else count(text)


def main(argv: Sequence[str]) -> int:
    """Runs one action; returns exit code 1 if it was not done, 2 if its arguments are wrong."""
    arguments = _parser().parse_args(argv)
    try:
        wishes = read_groups(Path(arguments.file)) if arguments.action == "apply" else []
        if arguments.action == "upgrade" and not arguments.to:
            raise ConfigError("upgrade: --to names the model to serve")
    except ConfigError as error:
        print(f"kvmesh group: {error}", file=sys.stderr)
        return 2
    access = scheduler_access(arguments)
    try:
        if arguments.action == "list":
            return asyncio.run(_list(access, as_json=arguments.json))
        return asyncio.run(_change(access, arguments, wishes))
    except NoAnswerError as error:
        print(f"kvmesh group: {error}", file=sys.stderr)
        return 1


def read_groups(file: Path) -> list[GroupWish]:
    """Returns the wanted groups of a TOML file.

    Raises:
        ConfigError: the file cannot be read, or a group in it is wrong.
    """
    try:
        tables = tomllib.loads(file.read_text()).get("group", [])
    except UNREADABLE as error:
        raise ConfigError(f"{file}: {why_unreadable(error)}") from error
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{file}: {error}") from error
    if not (isinstance(tables, list) and tables and all(isinstance(each, dict) for each in tables)):
        raise ConfigError(f"{file}: no [[group]] in it; see `kvmesh group --help`")
    wishes = [_wish_of(each, file) for each in tables]
    scenarios = [wish.scenario for wish in wishes]
    if len(set(scenarios)) < len(scenarios):
        raise ConfigError(f"{file}: two groups of one scenario: {scenarios}")
    return wishes


def _wish_of(table: dict[str, Any], file: Path) -> GroupWish:
    if unknown := table.keys() - _FIELDS:
        known = ", ".join(sorted(_FIELDS))
        names = ", ".join(sorted(unknown))
        raise ConfigError(f"{file}: a group has no field {names}; its fields are {known}")
    try:
        wish = GroupWish(**{**table, "scenario": _scenario(table.get("scenario", ""))})
        wish_from_proto(wish)
    except (TypeError, ValueError, ProtocolError) as error:
        raise ConfigError(f"{file}: {table.get('scenario', ANY)}: {error}") from error
    return wish


def _scenario(name: str) -> str:
    return "" if name == ANY else name


async def _list(access: SchedulerAccess, *, as_json: bool) -> int:
    views = await _views(access)
    if as_json:
        print(json.dumps([described(each) for each in views], indent=2))
    else:
        terminal().print(table_of(views))
    return 0


async def _change(
    access: SchedulerAccess, arguments: argparse.Namespace, wishes: Sequence[GroupWish]
) -> int:
    if arguments.action != "apply":
        wishes = [_changed(_find(await _views(access), arguments.group), arguments)]
    for wish in wishes:
        await _apply(access, ApplyGroupRequest(wish=wish))
    if not arguments.no_wait:
        await _until_done(access, wishes)
    for wish in wishes:
        name = wish.scenario or ANY
        verb = "wished for" if arguments.no_wait else "done"
        print(f"{name}: {arguments.action} {verb}")
    return 0


async def _apply(access: SchedulerAccess, request: ApplyGroupRequest) -> None:
    await ask_scheduler(access, lambda stub: stub.ApplyGroup, request, ANSWER_S)


def _find(views: Sequence[GroupView], name: str) -> GroupWish:
    for view in views:
        if view.wish.scenario == _scenario(name):
            return view.wish
    known = ", ".join(view.wish.scenario or ANY for view in views) or "none"
    raise NoAnswerError(f"no group {name!r}; known: {known}; `kvmesh group apply` makes one")


def _changed(wish: GroupWish, arguments: argparse.Namespace) -> GroupWish:
    """Returns the wish after the action.

    Raises:
        NoAnswerError: the group could not serve with it.
    """
    changed = GroupWish()
    changed.CopyFrom(wish)
    if arguments.action == "remove":
        changed.removing = True
    elif arguments.action == "upgrade":
        folder = Path(arguments.to)
        changed.checkpoint = str(folder.resolve()) if folder.is_dir() else arguments.to
    else:
        for role in ("prefill", "decode", "hybrid"):
            if getattr(arguments, role) >= 0:
                setattr(changed, role, getattr(arguments, role))
    try:
        wish_from_proto(changed)
    except ProtocolError as error:
        raise NoAnswerError(str(error)) from error
    return changed


async def _until_done(access: SchedulerAccess, wishes: Sequence[GroupWish]) -> None:
    """Waits until the groups are as wished.

    Raises:
        NoAnswerError: they are not in time.
    """
    views: dict[str, GroupView] = {}
    try:
        async with asyncio.timeout(access.timeout_s):
            while True:
                views = {view.wish.scenario: view for view in await _views(access)}
                if all(_is_done(wish, views.get(wish.scenario)) for wish in wishes):
                    return
                await asyncio.sleep(_POLL_S)
    except TimeoutError as error:
        told = [f"{name or ANY} is {_says(view)}" for name, view in views.items()]
        text = f"not done after {access.timeout_s:g} s: {'; '.join(told)}; increase --timeout"
        raise NoAnswerError(text) from error


def _is_done(wish: GroupWish, view: GroupView | None) -> bool:
    if wish.removing:
        return view is None
    if view is None or state_word(view.state) != GroupState.READY.value:
        return False
    fields = ("checkpoint", "prefill", "decode", "hybrid")
    return all(getattr(view.wish, each) == getattr(wish, each) for each in fields)


async def _views(access: SchedulerAccess) -> list[GroupView]:
    request = ListGroupsRequest()
    answer = await ask_scheduler(access, lambda stub: stub.ListGroups, request, ANSWER_S)
    return list(answer.groups)


def described(view: GroupView) -> dict[str, Any]:
    """Returns a group as JSON values."""
    wish = view.wish
    return {
        "group": wish.scenario or ANY,
        "state": state_word(view.state),
        "checkpoint": wish.checkpoint,
        "prefill": wish.prefill,
        "decode": wish.decode,
        "hybrid": wish.hybrid,
        "problem": view.problem,
        "workers": [
            {
                "worker_id": each.worker_id,
                "role": (role_from_proto(each.role) or Role.SPARE).value,
                "checkpoint": each.checkpoint,
                "registered": each.registered,
                "closed": each.closed,
                "connecting": each.connecting,
            }
            for each in view.workers
        ],
    }


def table_of(views: Sequence[GroupView]) -> Table:
    """Returns the groups as a table for the terminal."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for heading in ("group", "state", "checkpoint", "wished", "workers"):
        table.add_column(heading)
    for view in views:
        wish = view.wish
        counts = {"prefill": wish.prefill, "decode": wish.decode, "hybrid": wish.hybrid}
        wished = ", ".join(f"{count} {role}" for role, count in counts.items() if count)
        workers = ", ".join(_shown(each) for each in view.workers)
        table.add_row(
            wish.scenario or ANY, _says(view), wish.checkpoint or "(default)", wished, workers
        )
    return table


def _says(view: GroupView) -> str:
    return f"{state_word(view.state)}{f': {view.problem}' if view.problem else ''}"


def _shown(worker: GroupWorker) -> str:
    if not worker.registered:
        return f"{worker.worker_id} (starts)"
    if worker.connecting:
        return f"{worker.worker_id} (connecting)"
    return f"{worker.worker_id} (closed)" if worker.closed else worker.worker_id
