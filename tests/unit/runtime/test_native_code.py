"""What workers say of native code."""

from __future__ import annotations

import pytest
from prometheus_client import CollectorRegistry

from kvmesh.kernels import host_library
from kvmesh.runtime import native_code
from kvmesh.runtime.native_code import native_levels
from kvmesh.runtime.worker_config import EngineSection
from kvmesh.runtime.worker_metrics import WorkerMetrics
from tests.native import needs_host_library, needs_transfer_library


@needs_host_library
@needs_transfer_library
def test_levels_of_a_worker_on_the_cpu() -> None:
    levels = native_levels(EngineSection(kind="kvmesh", device="cpu"))
    assert set(levels) == {"kernels", "transfer"}
    assert all(levels.values())


@pytest.mark.parametrize(("kind", "device"), [("fake", "cpu"), ("kvmesh", "cuda")])
def test_kernels_are_of_the_cpu(kind: str, device: str) -> None:
    assert set(native_levels(EngineSection(kind=kind, device=device))) == {"transfer"}


def test_what_is_missing_has_no_level(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native_code, "load_native", lambda: None)
    monkeypatch.setattr(host_library, "load_host_library", lambda: None)
    levels = native_levels(EngineSection(kind="kvmesh", device="cpu"))
    assert levels == {"kernels": "", "transfer": ""}


def test_the_metric_tells_both() -> None:
    metrics = WorkerMetrics(CollectorRegistry())
    metrics.show_native({"kernels": "", "transfer": "avx2"})
    found = metrics.registry.get_sample_value
    name = "kvmesh_native_library"
    assert found(name, {"library": "kernels", "level": "none"}) == 0
    assert found(name, {"library": "transfer", "level": "avx2"}) == 1
