from __future__ import annotations

import subprocess
import sys
from types import ModuleType

import pytest

from kvmesh.core.loading import without

# What a service without an admin port, traces and callers of reflection never needs: together
# some 20 MiB and 0.3 s of its start.
HEAVY = (
    *("aiohttp", "opentelemetry", "google.protobuf.descriptor_pb2"),
    *("torch", "numpy", "transformers", "pydantic", "jinja2", "tokenizers"),
)


def loaded_by(*modules: str) -> set[str]:
    code = f"import sys, {', '.join(modules)}; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(done.stdout.split())


@pytest.mark.parametrize("service", ["scheduler", "kvmanager"])
def test_a_service_loads_only_what_it_needs(service: str) -> None:
    name = f"services.{service}"
    found = loaded_by("kvmesh.runtime.app", f"{name}.config", f"{name}.service")
    assert "redis.asyncio" in found
    assert found.isdisjoint(HEAVY)


def test_a_gateway_loads_neither_traces_nor_an_engine() -> None:
    found = loaded_by("kvmesh.runtime.app", "services.gateway.service", "redis")
    assert found.isdisjoint({"torch", "numpy", "transformers", "opentelemetry.sdk.trace"})


def test_hidden_modules_are_there_again_afterwards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "colorsys", raising=False)
    kept = ModuleType("kept")
    monkeypatch.setitem(sys.modules, "kept", kept)
    with without("colorsys", "kept"):
        with pytest.raises(ImportError):
            import colorsys
        assert sys.modules["kept"] is kept
    import colorsys

    assert colorsys.rgb_to_hsv(0, 0, 0) == (0.0, 0, 0)
