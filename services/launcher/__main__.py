"""Starts the launcher for Kubernetes: `python -m services.launcher`."""

from kvmesh.core.interrupts import end_when_interrupted
from kvmesh.core.loading import load_without_collector

if __name__ == "__main__":
    end_when_interrupted()  # before imports that take a second
    load_without_collector()

    from kvmesh.runtime.app import run_service
    from services.launcher.config import LauncherConfig
    from services.launcher.service import build

    run_service("launcher", LauncherConfig, build)
