"""Starts a prefill worker: `python -m services.prefill`."""

from kvmesh.core.interrupts import end_when_interrupted
from kvmesh.core.loading import load_without_collector

if __name__ == "__main__":
    end_when_interrupted()  # before imports that take a second
    load_without_collector()

    from kvmesh.runtime.app import run_service
    from services.prefill.config import PrefillConfig
    from services.prefill.service import build

    run_service("prefill", PrefillConfig, build)
