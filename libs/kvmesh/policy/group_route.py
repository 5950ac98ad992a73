"""The P/D group of a request: workers labelled with a scenario serve that scenario.

A fleet without labels is one group for all. Source: P/D-Serve 3.2.
Tests: tests/unit/policy/test_group_route.py.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

from kvmesh.core.types import Role, RouteQuery
from kvmesh.policy.groups import GroupKey
from kvmesh.policy.pdserve import Group, GroupChoice, choose_group
from kvmesh.policy.view import FleetView, WorkerView


def restrict_to_group(
    view: FleetView, query: RouteQuery, remote: str = ""
) -> tuple[FleetView, GroupChoice | None]:
    """Returns the workers among which the route policy chooses (P/D-Serve 3.2).

    The workers of a group share a checkpoint, a scenario and a cluster. Workers without a scenario
    serve any scenario that has no group of its own. A group counts if one of its workers accepts
    new requests and fits this one.

    Args:
        remote: name of the offload cluster, whose workers prefill for all groups.

    Returns:
        The group's part of the view, and the choice of the group. If no group serves the scenario,
        the whole view: an answer from elsewhere is better than none. The choice is None if no
        worker has a scenario. Workers of another checkpoint than the requested one are left out.
    """
    view = _of_checkpoint(view, query)
    for worker in view.workers:
        if worker.info.scenario:
            break
    else:
        return view, None
    members: dict[str, list[WorkerView]] = {}
    groups: dict[str, Group] = {}
    for worker in view.workers:
        info = worker.info
        if info.model == query.model and info.cluster != remote:
            members.setdefault(GroupKey.of(info).name, []).append(worker)
    for name, each in members.items():
        if any(_takes(worker, query) for worker in each):
            groups[name] = Group(name, each[0].info.scenario, _busy_share(each))
    choice = choose_group(query.scenario, list(groups.values()))
    if choice.group is None:
        return view, choice
    chosen = members[choice.group.name]
    chosen += [worker for worker in view.workers if remote and worker.info.cluster == remote]
    return dataclasses.replace(view, workers=tuple(chosen)), choice


def _of_checkpoint(view: FleetView, query: RouteQuery) -> FleetView:
    wanted = query.fingerprint
    if not wanted:
        return view
    for worker in view.workers:
        if worker.info.layout.model_fingerprint != wanted:
            break
    else:
        return view
    kept = [each for each in view.workers if each.info.layout.model_fingerprint == wanted]
    return dataclasses.replace(view, workers=tuple(kept))


def _takes(worker: WorkerView, query: RouteQuery) -> bool:
    info = worker.info
    longest = min(info.max_model_len, info.num_blocks * info.layout.block_size)
    return not worker.load.draining and longest >= query.num_tokens


def _busy_share(workers: Iterable[WorkerView]) -> float:
    """Returns the used fraction of the prefill slots of a group."""
    prefills = [worker for worker in workers if worker.info.role is not Role.DECODE]
    slots = sum(worker.info.prefill_slots for worker in prefills)
    return sum(worker.prefill_used for worker in prefills) / max(slots, 1)
