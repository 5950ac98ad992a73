"""Starts the kvmanager: `python -m services.kvmanager`."""

from kvmesh.core.interrupts import end_when_interrupted
from kvmesh.core.loading import load_without_collector

if __name__ == "__main__":
    end_when_interrupted()  # before imports that take a second
    load_without_collector()

    from kvmesh.runtime.app import run_service
    from services.kvmanager.config import KvManagerConfig
    from services.kvmanager.service import build

    run_service("kvmanager", KvManagerConfig, build)
