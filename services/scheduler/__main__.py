"""Starts the scheduler: `python -m services.scheduler`."""

from kvmesh.core.interrupts import end_when_interrupted
from kvmesh.core.loading import load_without_collector

if __name__ == "__main__":
    end_when_interrupted()  # before imports that take a second
    load_without_collector()

    from kvmesh.runtime.app import run_service
    from services.scheduler.config import SchedulerConfig
    from services.scheduler.service import build

    # A planner cycle makes a dozen short-lived objects per worker; collecting them often would cost
    # time.
    run_service("scheduler", SchedulerConfig, build, collect_after=200_000)
