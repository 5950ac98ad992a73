"""Starts a gateway: `python -m services.gateway`."""

import sys

from kvmesh.core.interrupts import end_when_interrupted
from kvmesh.core.loading import load_without_collector

if __name__ == "__main__":
    end_when_interrupted()  # before imports that take a second
    load_without_collector()

    from kvmesh.cli.processes import end_with
    from kvmesh.core.config import environment, load_config
    from kvmesh.core.errors import KvMeshError
    from kvmesh.runtime.app import cannot_start, run_service
    from kvmesh.telemetry.logs import configure_logging
    from services.gateway.config import GatewayConfig
    from services.gateway.processes import PARENT_VARIABLE, run_processes
    from services.gateway.service import build

    if parent := environment(PARENT_VARIABLE):
        end_with(int(parent))
    configure_logging("gateway")
    try:
        config = load_config(GatewayConfig, sys.argv[1:], prog="python -m services.gateway")
        if config.http.processes > 1:
            configure_logging("gateway", config.telemetry.log.level, config.telemetry.log.format)
            sys.exit(run_processes(config, sys.argv[1:]))
    except KvMeshError as error:
        cannot_start("gateway", error)
        sys.exit(2)
    run_service("gateway", GatewayConfig, build)
