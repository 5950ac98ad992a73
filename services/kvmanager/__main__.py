"""Starts the kvmanager: `python -m services.kvmanager`."""

from kvmesh.runtime.app import run_service
from services.kvmanager.config import KvManagerConfig
from services.kvmanager.service import build

if __name__ == "__main__":
    run_service("kvmanager", KvManagerConfig, build)
