"""`kvmesh adapter`: loads, lists and removes LoRA adapters while requests run.

Tests: tests/unit/cli/test_adapter.py, tests/e2e/test_adapters.py.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from kvmesh.cli.flags import add_flag, add_switch, new_parser
from kvmesh.cli.scheduler_access import (
    NoAnswerError,
    SchedulerAccess,
    ask_scheduler,
    scheduler_access,
)
from kvmesh.cli.scheduler_flags import add_scheduler_flags
from kvmesh.cli.screen import terminal
from kvmesh.core.config import OneLineParser
from kvmesh.core.errors import ConfigError
from kvmesh.core.named_values import named_values
from kvmesh.v1.scheduler_service_pb2 import (
    AdapterHolder,
    AdapterView,
    ListAdaptersRequest,
    LoadAdapterRequest,
    RemoveAdapterRequest,
)

_EPILOG = """\
An adapter is a model of the API: clients name it in `model`. --max-loras of `kvmesh up`, or
--engine.max-loras of workers, reserves room for adapters. Workers that start later load the same
adapters. If the name is already loaded, `load` reads the folder again; running requests keep the
weights with which they began.

options of every action (`kvmesh adapter list --help` explains them):
  --scheduler HOST:PORT[,...]  --state-dir DIR  --timeout SECONDS  --secret-file FILE
  --tls-ca FILE  --tls-cert FILE  --tls-key FILE

examples:
  kvmesh adapter load sql=/adapters/sql
  kvmesh adapter list
  kvmesh adapter remove sql

exit code: 0 done on all workers; 1 no answer, refused, or not on all workers; 2 wrong usage
"""


def _parser() -> argparse.ArgumentParser:
    common = OneLineParser(add_help=False)
    add_scheduler_flags(common, 120.0)
    parser = new_parser("kvmesh adapter", "Loads and removes LoRA adapters.", _EPILOG)
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    load = actions.add_parser("load", parents=[common], help="load an adapter, or reload it")
    load.add_argument(
        "adapter",
        metavar="NAME=FOLDER",
        help="name, and PEFT folder as seen by the workers' machines",
    )
    remove = actions.add_parser("remove", parents=[common], help="remove an adapter")
    remove.add_argument("name", metavar="NAME", help="name of the adapter")
    for action in (load, remove):
        add_flag(
            action, "--model", "", "model that the adapter belongs to; default: the only model"
        )
    listing = actions.add_parser(
        "list", parents=[common], help="list all adapters and the workers that hold them"
    )
    add_switch(listing, "--json", "print JSON")
    return parser


def main(argv: Sequence[str]) -> int:
    """Runs one action; returns exit code 1 if it was not done, 2 if its arguments are wrong."""
    arguments = _parser().parse_args(argv)
    try:
        named = _named(arguments.adapter) if arguments.action == "load" else ("", "")
    except ConfigError as error:
        print(f"kvmesh adapter: {error}", file=sys.stderr)
        return 2
    access = scheduler_access(arguments)
    try:
        if arguments.action == "list":
            return asyncio.run(_list(access, as_json=arguments.json))
        if arguments.action == "remove":
            return asyncio.run(_remove(access, arguments.name, arguments.model))
        return asyncio.run(_load(access, *named, arguments.model))
    except NoAnswerError as error:
        print(f"kvmesh adapter: {error}", file=sys.stderr)
        return 1


def _named(text: str) -> tuple[str, str]:
    """Returns name and folder; a folder that is here becomes absolute.

    Raises:
        ConfigError: the text is not one NAME=FOLDER.
    """
    found = list(named_values(text, "load", "NAME=FOLDER").items())
    if len(found) != 1:
        raise ConfigError("load takes one adapter, as NAME=FOLDER")
    name, folder = found[0]
    return name, str(Path(folder).resolve()) if Path(folder).is_dir() else folder


async def _load(access: SchedulerAccess, name: str, folder: str, model: str) -> int:
    request = LoadAdapterRequest(name=name, folder=folder, model=model)
    answer = await ask_scheduler(access, lambda stub: stub.LoadAdapter, request, access.timeout_s)
    view = answer.adapter
    without = [each for each in view.holders if each.problem or not each.answered]
    for each in without:
        print(f"kvmesh adapter: {each.worker_id}: {_state(each)}", file=sys.stderr)
    num_having = len(view.holders) - len(without)
    print(f"{name}: loaded on {num_having} of {len(view.holders)} workers of {view.model}")
    return 1 if without else 0


async def _remove(access: SchedulerAccess, name: str, model: str) -> int:
    request = RemoveAdapterRequest(name=name, model=model)
    await ask_scheduler(access, lambda stub: stub.RemoveAdapter, request, access.timeout_s)
    print(f"{name}: removed")
    return 0


async def _list(access: SchedulerAccess, *, as_json: bool) -> int:
    request = ListAdaptersRequest()
    answer = await ask_scheduler(access, lambda stub: stub.ListAdapters, request, access.timeout_s)
    views = list(answer.adapters)
    if as_json:
        print(json.dumps([described(each) for each in views], indent=2))
    else:
        terminal().print(table_of(views))
    return 0


def described(view: AdapterView) -> dict[str, Any]:
    """Returns an adapter as JSON values."""
    return {
        "name": view.name,
        "model": view.model,
        "folder": view.folder,
        "workers": [
            {"worker_id": each.worker_id, "adapter": each.adapter, "state": _state(each)}
            for each in view.holders
        ],
    }


def table_of(views: Sequence[AdapterView]) -> Table:
    """Returns the adapters as a table for the terminal."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for heading in ("adapter", "model", "folder", "workers"):
        table.add_column(heading)
    for view in views:
        workers = ", ".join(f"{each.worker_id} ({_state(each)})" for each in view.holders)
        table.add_row(view.name, view.model, view.folder or "(engine.lora)", workers)
    return table


def _state(holder: AdapterHolder) -> str:
    if holder.problem:
        return holder.problem
    if not holder.answered and not holder.adapter:
        return "not answered yet"
    return "has it" if holder.adapter else "without it"
