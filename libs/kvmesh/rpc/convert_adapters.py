"""Converts LoRA adapters to messages and back. Tests: tests/unit/rpc/test_convert_adapters.py."""

from __future__ import annotations

from kvmesh.core.adapters import AdapterReport, AdapterWish, AdapterWishes
from kvmesh.v1 import scheduler_service_pb2 as pb


def adapter_wishes_to_proto(wishes: AdapterWishes) -> pb.AdapterWishes:
    """AdapterWishes as a message to the workers of one model."""
    return pb.AdapterWishes(
        version=wishes.version,
        wishes=[
            pb.AdapterWish(name=each.name, folder=each.folder, revision=each.revision)
            for each in wishes.wishes
        ],
    )


def adapter_wishes_from_proto(message: pb.AdapterWishes) -> AdapterWishes:
    """AdapterWishes from a message."""
    wishes = tuple(AdapterWish(each.name, each.folder, each.revision) for each in message.wishes)
    return AdapterWishes(message.version, wishes)


def adapter_report_to_proto(report: AdapterReport) -> pb.AdapterReport:
    """AdapterReport as a message."""
    return pb.AdapterReport(version=report.version, failures=report.failures)


def adapter_report_from_proto(message: pb.AdapterReport) -> AdapterReport:
    """AdapterReport from a message."""
    return AdapterReport(message.version, dict(message.failures))
