"""PromQL in the rules and the dashboard, and the metrics that it names."""

from __future__ import annotations

import json
import re
from pathlib import Path

import yaml

FOLDER = Path(__file__).parents[3] / "deploy" / "observability"

_STRING = re.compile(r'"[^"]*"')
_METRIC = re.compile(r"\b(?:vllm|kvmesh)[:_][a-z0-9_:]+")


def expressions(where: str) -> list[str]:
    """All expressions of a file of rules or of a dashboard."""
    content = (FOLDER / where).read_text()
    if where.endswith(".json"):
        panels = json.loads(content)["panels"]
        return [target["expr"] for panel in panels for target in panel.get("targets", ())]
    return [rule["expr"] for group in yaml.safe_load(content)["groups"] for rule in group["rules"]]


def metrics_of(expression: str) -> set[str]:
    """Names of metrics in an expression."""
    return set(_METRIC.findall(_STRING.sub("", expression)))


def recorded() -> set[str]:
    """Names that the rules themselves record."""
    groups = yaml.safe_load((FOLDER / "rules.yml").read_text())["groups"]
    return {rule["record"] for group in groups for rule in group["rules"] if "record" in rule}
