"""Starts a gateway: `python -m services.gateway`."""

from kvmesh.runtime.app import run_service
from services.gateway.config import GatewayConfig
from services.gateway.service import build

if __name__ == "__main__":
    run_service("gateway", GatewayConfig, build)
