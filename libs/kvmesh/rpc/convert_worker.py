"""Converts workers' identity and load, and the fleet, to messages and back.

Tests: tests/unit/rpc/test_convert.py.
"""

from __future__ import annotations

import math

from kvmesh.core.details import FleetWorker
from kvmesh.core.empty_spare import Assignment, Origin
from kvmesh.core.errors import ProtocolError
from kvmesh.core.health import NO_DEVICE_ERRORS, DeviceErrors, Health
from kvmesh.core.kv_groups import KvGroups
from kvmesh.core.pace import PaceRoom, StepPace
from kvmesh.core.types import Role, WorkerId, WorkerInfo, WorkerLoad
from kvmesh.rpc.convert import (
    endpoint_from_proto,
    endpoint_to_proto,
    kv_layout_from_proto,
    kv_layout_to_proto,
)
from kvmesh.rpc.convert_detail import worker_detail_from_proto, worker_detail_to_proto
from kvmesh.v1 import scheduler_service_pb2, types_pb2

_ROLES: dict[Role, types_pb2.Role.ValueType] = {
    Role.PREFILL: types_pb2.ROLE_PREFILL,
    Role.DECODE: types_pb2.ROLE_DECODE,
    Role.HYBRID: types_pb2.ROLE_HYBRID,
    Role.SPARE: types_pb2.ROLE_SPARE,
}
_ROLES_BACK = {number: role for role, number in _ROLES.items()}


_HEALTH: dict[Health, types_pb2.Health.ValueType] = {
    Health.OK: types_pb2.HEALTH_UNSPECIFIED,
    Health.SUSPECT: types_pb2.HEALTH_SUSPECT,
    Health.DEGRADED: types_pb2.HEALTH_DEGRADED,
    Health.DEAD: types_pb2.HEALTH_DEAD,
}
_HEALTH_BACK = {number: health for health, number in _HEALTH.items()}


def role_to_proto(role: Role) -> types_pb2.Role.ValueType:
    """Role as an enum value."""
    return _ROLES[role]


def role_from_proto(value: types_pb2.Role.ValueType) -> Role | None:
    """Role from an enum value; None if it is unknown."""
    return _ROLES_BACK.get(value)


def worker_info_to_proto(info: WorkerInfo) -> types_pb2.WorkerInfo:
    """WorkerInfo as a message."""
    return types_pb2.WorkerInfo(
        worker_id=info.worker_id,
        incarnation=info.incarnation,
        role=_ROLES[info.role],
        cluster=info.cluster,
        control_endpoint=endpoint_to_proto(info.control_endpoint),
        data_endpoint=endpoint_to_proto(info.data_endpoint),
        model=info.model,
        layout=kv_layout_to_proto(info.layout),
        max_model_len=info.max_model_len,
        prefill_slots=info.prefill_slots,
        decode_slots=info.decode_slots,
        num_blocks=info.num_blocks,
        scenario=info.scenario,
        unpublished=not info.publishes,
        missing_native=info.missing_native,
        start_s=info.origin.start_s,
        origin=_origin_to_proto(info.origin),
        pair_share=info.pair_share,
        adapters=info.adapters,
        embeds=info.embeds,
        kv_windows=info.groups.windows,
        state_blocks=info.groups.state_blocks,
        shared_cores=info.shared_cores,
    )


def worker_info_from_proto(message: types_pb2.WorkerInfo) -> WorkerInfo:
    """WorkerInfo from a message.

    Raises:
        ProtocolError: an unknown role or an empty worker id.
    """
    if message.role not in _ROLES_BACK or not message.worker_id:
        raise ProtocolError("bad_worker", f"role {message.role}, id {message.worker_id!r}")
    return WorkerInfo(
        worker_id=WorkerId(message.worker_id),
        incarnation=message.incarnation,
        role=_ROLES_BACK[message.role],
        cluster=message.cluster,
        control_endpoint=endpoint_from_proto(message.control_endpoint),
        data_endpoint=endpoint_from_proto(message.data_endpoint),
        model=message.model,
        layout=kv_layout_from_proto(message.layout),
        max_model_len=message.max_model_len,
        prefill_slots=message.prefill_slots,
        decode_slots=message.decode_slots,
        num_blocks=message.num_blocks,
        scenario=message.scenario,
        publishes=not message.unpublished,
        missing_native=tuple(message.missing_native),
        origin=_origin_from_proto(message),
        pair_share=message.pair_share,
        adapters=tuple(message.adapters),
        embeds=message.embeds,
        groups=KvGroups(tuple(message.kv_windows) or (0,), message.state_blocks),
        shared_cores=message.shared_cores,
    )


def _origin_to_proto(origin: Origin) -> types_pb2.WorkerOrigin:
    assignment = origin.assignment
    return types_pb2.WorkerOrigin(
        checkpoint=origin.checkpoint,
        load_s=origin.load_s,
        assignment=None if assignment is None else assignment_to_proto(assignment),
    )


def _origin_from_proto(message: types_pb2.WorkerInfo) -> Origin:
    origin = message.origin
    told = origin.HasField("assignment")
    assignment = assignment_from_proto(origin.assignment) if told else None
    return Origin(origin.checkpoint, message.start_s, origin.load_s, assignment)


def assignment_to_proto(assignment: Assignment) -> types_pb2.WorkerAssignment:
    """Assignment as a message."""
    return types_pb2.WorkerAssignment(
        role=_ROLES[assignment.role],
        scenario=assignment.scenario,
        model=assignment.model,
        checkpoint=assignment.checkpoint,
        dtype=assignment.dtype,
        block_size=assignment.block_size,
        max_model_len=assignment.max_model_len,
        group_checkpoint=assignment.group_checkpoint,
        reason=assignment.reason,
    )


def assignment_from_proto(message: types_pb2.WorkerAssignment) -> Assignment:
    """Assignment from a message.

    Raises:
        ProtocolError: an unknown role, or blocks without a size.
    """
    role = role_from_proto(message.role)
    if role is None or not message.block_size:
        raise ProtocolError("bad_assignment", f"role {message.role}, {message.block_size} a block")
    return Assignment(
        role,
        message.scenario,
        message.model,
        message.checkpoint,
        message.dtype,
        message.block_size,
        message.max_model_len,
        message.group_checkpoint if message.HasField("group_checkpoint") else None,
        message.reason,
    )


def worker_load_to_proto(load: WorkerLoad) -> types_pb2.WorkerLoad:
    """WorkerLoad as a message."""
    return types_pb2.WorkerLoad(
        prefill_active=load.prefill_active,
        decode_running=load.decode_running,
        decode_reserved=load.decode_reserved,
        decode_preempted=load.decode_preempted,
        blocks_free=load.blocks_free,
        draining=load.draining,
        prefill_tokens_total=load.prefill_tokens_total,
        decode_tokens_total=load.decode_tokens_total,
        prefill_sending=load.prefill_sending,
        pending_tokens=load.pending_tokens,
        budget_used=load.budget_used,
        compute_used=load.compute_used,
        memory_bandwidth_used=load.memory_bandwidth_used,
        sent_bytes_total=load.sent_bytes_total,
        sending_bytes=load.sending_bytes,
        sending_s_total=load.sending_s_total,
        step_age_s=load.step_age_s,
        step_expected_s=load.step_expected_s,
        slowdown=load.slowdown,
        room=_room_to_proto(load.room),
        damaged_total=load.damaged_total,
        host_token_s=load.host_token_s,
        disk_token_s=load.disk_token_s,
        device=_device_to_proto(load.device),
    )


def worker_load_from_proto(message: types_pb2.WorkerLoad) -> WorkerLoad:
    """WorkerLoad from a message."""
    return WorkerLoad(
        prefill_active=message.prefill_active,
        decode_running=message.decode_running,
        decode_reserved=message.decode_reserved,
        decode_preempted=message.decode_preempted,
        blocks_free=message.blocks_free,
        draining=message.draining,
        prefill_tokens_total=message.prefill_tokens_total,
        decode_tokens_total=message.decode_tokens_total,
        prefill_sending=message.prefill_sending,
        pending_tokens=message.pending_tokens,
        budget_used=message.budget_used,
        compute_used=message.compute_used,
        memory_bandwidth_used=message.memory_bandwidth_used,
        sent_bytes_total=message.sent_bytes_total,
        sending_bytes=message.sending_bytes,
        sending_s_total=message.sending_s_total,
        step_age_s=message.step_age_s,
        step_expected_s=message.step_expected_s,
        slowdown=message.slowdown,
        room=_room_from_proto(message.room),
        damaged_total=message.damaged_total,
        host_token_s=message.host_token_s,
        disk_token_s=message.disk_token_s,
        device=_device_from_proto(message),
    )


def _device_to_proto(device: DeviceErrors) -> types_pb2.DeviceErrors | None:
    if device == NO_DEVICE_ERRORS:
        return None
    return types_pb2.DeviceErrors(
        errors_total=device.errors_total,
        last_xid=device.last_xid,
        failing=device.failing,
        lost=device.lost,
    )


def _device_from_proto(message: types_pb2.WorkerLoad) -> DeviceErrors:
    if not message.HasField("device"):
        return NO_DEVICE_ERRORS
    told = message.device
    return DeviceErrors(told.errors_total, told.last_xid, told.failing, told.lost)


def _room_to_proto(room: PaceRoom) -> types_pb2.PaceRoom:
    message = types_pb2.PaceRoom(
        constant_s=room.pace.constant_s,
        token_s=room.pace.token_s,
        context_tokens=room.context_tokens,
    )
    if math.isfinite(room.strictest_s):
        message.strictest_s = room.strictest_s
    if math.isfinite(room.spare_s):
        message.spare_s = room.spare_s
    return message


def _room_from_proto(message: types_pb2.PaceRoom) -> PaceRoom:
    return PaceRoom(
        StepPace(message.constant_s, message.token_s),
        message.context_tokens,
        message.strictest_s if message.HasField("strictest_s") else math.inf,
        message.spare_s if message.HasField("spare_s") else math.inf,
    )


def fleet_worker_to_proto(
    worker: FleetWorker, *, with_detail: bool = False, with_info: bool = True
) -> scheduler_service_pb2.FleetWorker:
    """FleetWorker as a message.

    Args:
        with_detail: include details for people.
        with_info: include the worker's info; otherwise only its id.
    """
    return scheduler_service_pb2.FleetWorker(
        info=worker_info_to_proto(worker.info) if with_info else None,
        worker_id="" if with_info else worker.info.worker_id,
        load=worker_load_to_proto(worker.load),
        detail=worker_detail_to_proto(worker.detail) if with_detail else None,
        health=_HEALTH[worker.health],
        fault=worker.fault,
        connecting=worker.connecting,
    )


def fleet_worker_from_proto(message: scheduler_service_pb2.FleetWorker) -> FleetWorker:
    """FleetWorker from a message."""
    return FleetWorker(
        worker_info_from_proto(message.info),
        worker_load_from_proto(message.load),
        worker_detail_from_proto(message.detail),
        health=health_from_proto(message.health),
        fault=message.fault,
        connecting=message.connecting,
    )


def health_from_proto(value: types_pb2.Health.ValueType) -> Health:
    """Health from an enum value. An unknown value, of a newer scheduler, becomes the worst."""
    return _HEALTH_BACK.get(value, Health.DEAD)
