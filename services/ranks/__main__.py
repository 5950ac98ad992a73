"""Starts the ranks of one more host of a worker: `python -m services.ranks`."""

from kvmesh.core.interrupts import end_when_interrupted
from kvmesh.core.loading import load_without_collector

if __name__ == "__main__":
    end_when_interrupted()  # before imports that take a second
    load_without_collector()

    from kvmesh.runtime.app import run_service
    from services.ranks.config import RanksConfig
    from services.ranks.service import build

    run_service("ranks", RanksConfig, build)
