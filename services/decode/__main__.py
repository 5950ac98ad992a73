"""Starts a decode worker: `python -m services.decode`."""

from kvmesh.core.interrupts import end_when_interrupted
from kvmesh.core.loading import load_without_collector

if __name__ == "__main__":
    end_when_interrupted()  # before imports that take a second
    load_without_collector()

    from kvmesh.runtime.app import run_service
    from services.decode.config import DecodeConfig
    from services.decode.service import build

    run_service("decode", DecodeConfig, build)
