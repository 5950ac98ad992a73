"""docker-compose.yml and Dockerfile as values, for the tests in this folder."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from services.decode.config import DecodeConfig
from services.gateway.config import GatewayConfig
from services.kvmanager.config import KvManagerConfig
from services.launcher.config import LauncherConfig
from services.prefill.config import PrefillConfig
from services.ranks.config import RanksConfig
from services.scheduler.config import SchedulerConfig

ROOT = Path(__file__).resolve().parents[3]
COMPOSE_FILE = ROOT / "docker-compose.yml"
CONFIGS: dict[str, type[Any]] = {
    "gateway": GatewayConfig,
    "scheduler": SchedulerConfig,
    "kvmanager": KvManagerConfig,
    "launcher": LauncherConfig,
    "prefill": PrefillConfig,
    "decode": DecodeConfig,
    "ranks": RanksConfig,
}
VLLM_ALONE = {"ranks"}
"""Services that only vLLM's ranks need."""
TARGETS = {
    **{name: name for name in CONFIGS if name not in VLLM_ALONE},
    **{f"{name}-vllm": name for name in ("prefill", "decode", "ranks")},
}
"""Targets of the Dockerfile that are services' images -> the service."""
CONTROL_PLANE = {
    "gateway": "gateway",
    "scheduler": "scheduler",
    "kvmanager": "kvmanager",
    "launcher": "kubernetes",
}
"""Services without an engine -> the extra that they need."""
KUBERNETES_ALONE = {"launcher", "ranks"}
"""Services that Compose does not start."""

_VARIABLE = re.compile(r"\$\{(\w+):-([^}]*)\}")


def interpolated(value: str) -> str:
    """A value of the compose file with the defaults of its variables."""
    text = _VARIABLE.sub(lambda match: match[2], value)
    assert "$" not in text, f"a variable without a default: {value}"
    return text


def all_services() -> dict[str, dict[str, Any]]:
    """Services of all profiles."""
    services: dict[str, dict[str, Any]] = yaml.safe_load(COMPOSE_FILE.read_text())["services"]
    return services


def compose_services() -> dict[str, dict[str, Any]]:
    """Services that start without a profile."""
    return {name: each for name, each in all_services().items() if "profiles" not in each}


def kvmesh_services() -> dict[str, dict[str, Any]]:
    """Services that run an image of ours, of all profiles."""
    return {name: each for name, each in all_services().items() if "build" in each}


def service_of(service: dict[str, Any]) -> str:
    """Which of our services a service of the stack runs."""
    return TARGETS[service["build"]["target"]]


def environment_of(service: dict[str, Any]) -> dict[str, str]:
    return {name: interpolated(value) for name, value in service["environment"].items()}


@dataclass(frozen=True, slots=True)
class Stage:
    """A stage of the Dockerfile: its instructions after those of the stages it builds on."""

    name: str
    base: str
    lines: tuple[tuple[str, str], ...]

    def values(self, instruction: str) -> list[str]:
        return [value for name, value in self.lines if name == instruction]


def dockerfile_stages() -> dict[str, Stage]:
    text = (ROOT / "Dockerfile").read_text().replace("\\\n", " ")
    stages: dict[str, Stage] = {}
    current: Stage | None = None
    for line in text.splitlines():
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        instruction, _, value = line.strip().partition(" ")
        if instruction == "FROM":
            base, _, name = shlex.split(value)
            inherited = stages[base].lines if base in stages else ()
            current = stages[name] = Stage(name, base, inherited)
        elif current is not None:
            lines = (*current.lines, (instruction, value.strip()))
            current = stages[current.name] = Stage(current.name, current.base, lines)
    return stages
