"""`python -m services.scheduler`."""

from kvmesh.runtime.app import run_service
from services.scheduler.config import SchedulerConfig
from services.scheduler.service import build

if __name__ == "__main__":
    run_service("scheduler", SchedulerConfig, build)
