"""`kvmesh fleet`: lists the workers and gives orders to one of them.

Tests: tests/e2e/test_fleet_command.py.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import sys
from collections.abc import Callable, Sequence
from typing import Any

from rich.table import Table

from kvmesh.cli.flags import add_switch, new_parser
from kvmesh.cli.scheduler_access import (
    LiveFleet,
    NoAnswerError,
    SchedulerAccess,
    live_fleet,
    scheduler_access,
)
from kvmesh.cli.scheduler_flags import add_scheduler_flags
from kvmesh.cli.screen import terminal
from kvmesh.core.config import OneLineParser
from kvmesh.core.details import FleetWorker
from kvmesh.core.empty_spare import EmptySpare
from kvmesh.core.health import Health
from kvmesh.core.types import Role, WorkerId
from kvmesh.policy.groups import GroupKey
from kvmesh.rpc.convert_worker import role_to_proto
from kvmesh.v1.scheduler_service_pb2 import (
    OrderWorkerRequest,
    WorkerCordon,
    WorkerDrain,
    WorkerRole,
)

Workers = tuple[FleetWorker, ...]

_EPILOG = """\
orders:
  cordon    routes no new requests to the worker; running ones continue. Lasts until uncordon or a
            restart of the worker
  uncordon  routes new requests to the worker again
  drain     as cordon; then the worker finishes its running requests and leaves the fleet. Its
            process stays, idle and NOT_SERVING, until it is stopped or restarted
  set-role  changes the role to prefill, decode, hybrid or spare. Running requests continue, since
            every worker can do both; a spare gets no new ones. Lasts until a restart, or until the
            planner changes the role

options of every action (`kvmesh fleet list --help` explains them):
  --scheduler HOST:PORT[,...]  --state-dir DIR  --timeout SECONDS  --secret-file FILE
  --tls-ca FILE  --tls-cert FILE  --tls-key FILE

Each order returns when the fleet list shows its effect.

examples:
  kvmesh fleet list --json
  kvmesh fleet cordon prefill-0
  kvmesh fleet drain decode-1 --timeout 600
  kvmesh fleet set-role prefill-1 decode

exit code: 0 done; 1 no answer, unknown worker, or not done in time; 2 wrong usage
"""


def _parser() -> argparse.ArgumentParser:
    common = OneLineParser(add_help=False)
    add_scheduler_flags(common, 30.0)
    parser = new_parser(
        "kvmesh fleet",
        "Lists the workers, and cordons, drains or changes the role of one.",
        _EPILOG,
    )
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    listing = actions.add_parser("list", parents=[common], help="list all workers and their load")
    add_switch(listing, "--json", "print JSON")
    for name, text in (
        ("cordon", "route no new work to a worker"),
        ("uncordon", "route to it again"),
        ("drain", "let it finish what runs and leave"),
        ("set-role", "use it for something else"),
    ):
        order = actions.add_parser(name, parents=[common], help=text)
        order.add_argument("worker", metavar="WORKER", help="worker.id of the worker")
        if name == "set-role":
            order.add_argument("role", choices=[role.value for role in Role])
    return parser


def main(argv: Sequence[str]) -> int:
    """Runs one action; exit code 1 if it was not done."""
    arguments = _parser().parse_args(argv)
    access = scheduler_access(arguments)
    try:
        if arguments.action == "list":
            return asyncio.run(_list(access, as_json=arguments.json))
        return asyncio.run(_order(access, arguments))
    except NoAnswerError as error:
        print(f"kvmesh fleet: {error}", file=sys.stderr)
        return 1


async def _list(access: SchedulerAccess, *, as_json: bool) -> int:
    async with live_fleet(access, "kvmesh fleet") as view:
        workers, empties = view.workers, view.empty_spares
    if as_json:
        told = [*map(described, workers), *map(described_empty, empties)]
        print(json.dumps(told, indent=2))
    else:
        terminal().print(table_of(workers, empties))
    return 0


async def _order(access: SchedulerAccess, arguments: argparse.Namespace) -> int:
    name = WorkerId(arguments.worker)
    async with live_fleet(access, "kvmesh fleet") as view:
        found = [each for each in view.workers if each.info.worker_id == name]
        if not found:
            known = ", ".join(each.info.worker_id for each in view.workers) or "none"
            raise NoAnswerError(f"no worker {name!r} in the fleet; known: {known}")
        request, is_done = _request(arguments, found[0])
        await view.order(request)
        await view.until(is_done, f"{name}: {arguments.action}")
        print(_report(view, name, arguments.action))
    return 0


def _request(
    arguments: argparse.Namespace, worker: FleetWorker
) -> tuple[OrderWorkerRequest, Callable[[Workers], bool]]:
    """Returns the order, and a condition on the fleet that holds when it is carried out."""
    name, reason = worker.info.worker_id, "ordered by kvmesh fleet"
    request = OrderWorkerRequest(worker_id=name)

    def now(workers: Workers) -> FleetWorker | None:
        """Returns this incarnation of the worker, if it is still in the fleet."""
        lives = (each for each in workers if each.info.worker_id == name)
        return next((e for e in lives if e.info.incarnation == worker.info.incarnation), None)

    if arguments.action == "drain":
        request.drain.CopyFrom(WorkerDrain(reason=reason))
        return request, lambda workers: now(workers) is None
    if arguments.action == "set-role":
        role = Role(arguments.role)
        request.role.CopyFrom(WorkerRole(role=role_to_proto(role), reason=reason))
        return request, lambda workers: (its := now(workers)) is None or its.info.role is role
    cordoned = arguments.action == "cordon"
    request.cordon.CopyFrom(WorkerCordon(cordoned=cordoned, reason=reason))
    # Both values must change: routes read the load, people the detail.
    return (
        request,
        lambda workers: (
            (its := now(workers)) is None or its.detail.cordoned == its.load.draining == cordoned
        ),
    )


def _report(view: LiveFleet, name: WorkerId, action: str) -> str:
    for each in view.workers:
        if each.info.worker_id == name:
            return f"{name} {state_of(each)}, role {each.info.role.value}"
    return f"{name} left the fleet" if action == "drain" else f"{name} is gone"


def state_of(worker: FleetWorker) -> str:
    """Returns one word that says whether a worker gets new requests."""
    if worker.detail.cordoned:
        return "cordoned"
    if worker.health is not Health.OK:
        return worker.health.name.lower()
    if worker.info.role is Role.SPARE:
        return "spare"
    if worker.connecting:
        return "connecting"
    return "draining" if worker.load.draining else "ready"


def described(worker: FleetWorker) -> dict[str, Any]:
    """Returns a worker as JSON values."""
    info, load, detail = worker.info, worker.load, worker.detail
    return {
        "worker_id": info.worker_id,
        "incarnation": info.incarnation,
        "role": info.role.value,
        "cluster": info.cluster,
        "model": info.model,
        "state": state_of(worker),
        "scenario": info.scenario,
        "checkpoint": info.layout.model_fingerprint,
        "fault": worker.fault,
        "missing_native": list(info.missing_native),
        "control_endpoint": str(info.control_endpoint),
        "prefill_active": load.prefill_active,
        "prefill_slots": info.prefill_slots,
        "decode_running": load.decode_running,
        "decode_reserved": load.decode_reserved,
        "decode_slots": info.decode_slots,
        "num_blocks": info.num_blocks,
        "blocks_free": load.blocks_free,
        "blocks_cached": detail.blocks_cached,
        "prefill_queues": dataclasses.asdict(detail.prefill_queues),
        "decode_queues": dataclasses.asdict(detail.decode_queues),
    }


def described_empty(spare: EmptySpare) -> dict[str, Any]:
    """Returns a worker without a model as JSON values; fields that come with a model are absent."""
    return {
        "worker_id": spare.worker_id,
        "incarnation": spare.incarnation,
        "role": Role.SPARE.value,
        "cluster": spare.cluster,
        "model": "" if spare.assignment is None else spare.assignment.model,
        "state": state_of_empty(spare),
        "engine": spare.engine,
    }


def state_of_empty(spare: EmptySpare) -> str:
    """Returns one word that says whether a worker without a model waits for one."""
    return "empty" if spare.is_waiting else "loading"


def table_of(workers: Sequence[FleetWorker], empties: Sequence[EmptySpare] = ()) -> Table:
    """Returns the workers as a table for the terminal."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for heading in ("worker", "role", "group", "state"):
        table.add_column(heading)
    for heading in ("prefill", "decode", "KV used", "KV cached"):
        table.add_column(heading, justify="right")
    table.add_column("address", style="dim")
    for each in sorted(workers, key=lambda each: (GroupKey.of(each.info), each.info.worker_id)):
        info, load = each.info, each.load
        used = 1 - load.blocks_free / info.num_blocks
        cached = each.detail.blocks_cached / info.num_blocks
        table.add_row(
            info.worker_id,
            info.role.value,
            GroupKey.of(info).name,
            state_of(each),
            f"{load.prefill_active}/{info.prefill_slots}",
            f"{load.decode_running + load.decode_reserved}/{info.decode_slots}",
            f"{used:.0%}",
            f"{cached:.0%}",
            str(info.control_endpoint),
        )
    for spare in empties:
        table.add_row(spare.worker_id, Role.SPARE.value, "", state_of_empty(spare))
    return table
