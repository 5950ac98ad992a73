"""Writes deploy/observability/grafana/kvmesh.json: python -m scripts.gen_dashboard.

The panels are the table below; the rest of a dashboard is the same for all of them.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

DASHBOARD = (
    Path(__file__).resolve().parent.parent / "deploy" / "observability" / "grafana" / "kvmesh.json"
)
COLUMNS, WIDTH, HEIGHT = 3, 8, 8
SOURCE = {"type": "prometheus", "uid": "${source}"}
RATE = "$__rate_interval"
WORKERS = "max by (model, checkpoint, scenario, cluster, role) (kvmesh_scheduler_workers)"
"""Each scheduler tells the same number of workers of a group."""


@dataclass(frozen=True)
class Panel:
    """One chart.

    Attributes:
        unit: Grafana's name of the unit.
        queries: legend and PromQL.
        stacked: areas on top of each other.
    """

    title: str
    unit: str
    queries: tuple[tuple[str, str], ...]
    stacked: bool = False


def quantiles(metric: str) -> tuple[tuple[str, str], ...]:
    """Median and tail of a histogram of the gateway."""
    buckets = f'sum by (le) (rate({metric}_bucket{{job="gateway"}}[{RATE}]))'
    return tuple(
        (name, f"histogram_quantile({share}, {buckets})")
        for name, share in (("p50", 0.5), ("p90", 0.9), ("p99", 0.99))
    )


def tail(metric: str, by: str = "") -> str:
    """p99 of a histogram, by a label."""
    labels = f"le, {by}" if by else "le"
    return f"histogram_quantile(0.99, sum by ({labels}) (rate({metric}_bucket[{RATE}])))"


def share(part: str, whole: str, by: str) -> str:
    """One counter's rate by another's."""
    return f"{rate(part, by)} / {rate(whole, by)}"


def rate(metric: str, by: str, where: str = "") -> str:
    """Sum of a counter's rates by some labels."""
    return f"sum by ({by}) (rate({metric}{where}[{RATE}]))"


READS_CV = "kvmesh_kvmanager_pool_reads_cv and on (instance) kvmesh_kvmanager_pool_planning == 1"

SECTIONS: dict[str, tuple[Panel, ...]] = {
    "Requests": (
        Panel("Time to first token", "s", quantiles("vllm:time_to_first_token_seconds")),
        Panel("Between tokens", "s", quantiles("vllm:inter_token_latency_seconds")),
        Panel("Waiting for prefill", "s", quantiles("vllm:request_queue_time_seconds")),
        Panel(
            "Ended requests",
            "reqps",
            (
                (
                    "{{finished_reason}}",
                    rate("vllm:request_success_total", "finished_reason", '{job="gateway"}'),
                ),
            ),
            stacked=True,
        ),
        Panel("Open requests", "short", (("{{instance}}", "kvmesh_gateway_requests_open"),), True),
        Panel(
            "Tokens",
            "short",
            (
                ("generated", f'sum(rate(vllm:generation_tokens_total{{job="gateway"}}[{RATE}]))'),
                ("prompt", f'sum(rate(vllm:prompt_tokens_total{{job="gateway"}}[{RATE}]))'),
            ),
        ),
        Panel(
            "Refusals, by who and why",
            "reqps",
            (("{{stage}}: {{reason}}", rate("kvmesh_gateway_refusals_total", "stage, reason")),),
            stacked=True,
        ),
        Panel(
            "Moves", "reqps", (("{{reason}}", rate("kvmesh_gateway_moves_total", "reason")),), True
        ),
        Panel(
            "Offers until a worker accepted",
            "short",
            (
                (
                    "mean",
                    share(
                        "kvmesh_gateway_prefill_offers_sum",
                        "kvmesh_gateway_prefill_offers_count",
                        "job",
                    ),
                ),
            ),
        ),
    ),
    "Groups": (
        Panel(
            "Time to first token, p99",
            "s",
            (("{{scenario}}", tail("kvmesh_gateway_group_ttft_seconds", "scenario")),),
        ),
        Panel(
            "Time per token, p99",
            "s",
            (("{{scenario}}", tail("kvmesh_gateway_group_tpot_seconds", "scenario")),),
        ),
        Panel(
            "Requests ended",
            "reqps",
            (
                (
                    "{{scenario}} {{finished_reason}}",
                    rate("kvmesh_gateway_group_requests_total", "scenario, finished_reason"),
                ),
            ),
            True,
        ),
        Panel(
            "Refusals met",
            "reqps",
            (
                (
                    "{{scenario}} {{reason}}",
                    rate("kvmesh_gateway_group_refusals_total", "scenario, reason"),
                ),
            ),
            True,
        ),
        Panel(
            "Workers",
            "short",
            (
                (
                    "{{scenario}}@{{cluster}} {{role}}",
                    f"sum by (scenario, cluster, role) ({WORKERS})",
                ),
            ),
        ),
    ),
    "Fleet": (
        Panel("Workers by role", "short", (("{{role}}", f"sum by (role) ({WORKERS})"),)),
        Panel(
            "Prefill slots in use", "short", (("{{instance}}", "kvmesh_prefill_slots_used"),), True
        ),
        Panel(
            "Decode: sequences and reservations",
            "short",
            (
                ("{{instance}} sequences", "kvmesh_decode_sequences"),
                ("{{instance}} reservations", "kvmesh_decode_reservations_open"),
            ),
            stacked=True,
        ),
        Panel("KV blocks in use", "percentunit", (("{{instance}}", "vllm:kv_cache_usage_perc"),)),
        Panel(
            "Prefix cache hits",
            "percentunit",
            (
                (
                    "{{instance}}",
                    share(
                        "vllm:prefix_cache_hits_total",
                        "vllm:prefix_cache_queries_total",
                        "instance",
                    ),
                ),
            ),
        ),
        Panel(
            "Preemptions",
            "ops",
            (("{{instance}}", rate("vllm:num_preemptions_total", "instance")),),
        ),
        Panel(
            "Engine step, p99",
            "s",
            (
                (
                    "{{instance}}",
                    tail("kvmesh_engine_step_seconds", "instance"),
                ),
            ),
        ),
    ),
    "KV on its way": (
        Panel(
            "Bytes by link",
            "Bps",
            (
                (
                    "{{instance}} → {{peer}}",
                    rate("kvmesh_link_bytes_total", "instance, peer", '{direction="sent"}'),
                ),
            ),
            stacked=True,
        ),
        Panel(
            "Handoff of a request, p99",
            "s",
            (
                (
                    "to {{dst}}",
                    tail("kvmesh_kv_transfer_seconds", "dst"),
                ),
            ),
        ),
        Panel(
            "Links: lost and resumed",
            "ops",
            (
                ("lost to {{peer}}", rate("kvmesh_link_lost_total", "peer")),
                ("resumed to {{peer}}", rate("kvmesh_link_resumed_total", "peer")),
            ),
        ),
    ),
    "Control plane": (
        Panel(
            "Route plans, p99",
            "s",
            (
                (
                    "plan",
                    tail("kvmesh_scheduler_route_seconds"),
                ),
            ),
        ),
        Panel(
            "Route decisions",
            "reqps",
            (
                (
                    "{{outcome}} {{placement}}",
                    rate("kvmesh_scheduler_routes_total", "outcome, placement"),
                ),
            ),
            stacked=True,
        ),
        Panel(
            "Prefix lookups",
            "reqps",
            (("{{outcome}}", rate("kvmesh_kvmanager_matches_total", "outcome")),),
            stacked=True,
        ),
        Panel("Blocks known", "short", (("blocks", "max(kvmesh_kvmanager_blocks)"),)),
        Panel("Redis answers", "bool", (("{{instance}}", "kvmesh_kvmanager_redis_up"),)),
        Panel(
            "Unevenness of cache reads",
            "short",
            (
                (
                    "{{cluster}} {{role}}",
                    f"max by (cluster, role) ({READS_CV})",
                ),
            ),
        ),
        Panel(
            "Copies of hot prefixes",
            "short",
            (
                (
                    "{{outcome}} {{reason}}",
                    rate("kvmesh_kvmanager_pool_copies_total", "outcome, reason"),
                ),
            ),
            stacked=True,
        ),
    ),
}


def dashboard() -> dict[str, Any]:
    """The dashboard as Grafana reads it."""
    panels: list[dict[str, Any]] = []
    y = 0
    for title, section in SECTIONS.items():
        panels.append(_row(len(panels) + 1, title, y))
        y += 1
        for index, panel in enumerate(section):
            x, row = WIDTH * (index % COLUMNS), HEIGHT * (index // COLUMNS)
            panels.append(_panel(len(panels) + 1, panel, x, y + row))
        y += HEIGHT * -(-len(section) // COLUMNS)
    return {
        "uid": "kvmesh",
        "title": "KVMesh",
        "tags": ["kvmesh"],
        "schemaVersion": 41,
        "timezone": "browser",
        "editable": True,
        "graphTooltip": 1,
        "refresh": "10s",
        "time": {"from": "now-30m", "to": "now"},
        "templating": {
            "list": [
                {
                    "name": "source",
                    "label": "Prometheus",
                    "type": "datasource",
                    "query": "prometheus",
                }
            ]
        },
        "panels": panels,
    }


def _row(number: int, title: str, y: int) -> dict[str, Any]:
    place = {"x": 0, "y": y, "w": WIDTH * COLUMNS, "h": 1}
    return {
        "id": number,
        "type": "row",
        "title": title,
        "collapsed": False,
        "gridPos": place,
        "panels": [],
    }


def _panel(number: int, panel: Panel, x: int, y: int) -> dict[str, Any]:
    custom = {
        "drawStyle": "line",
        "lineWidth": 1,
        "fillOpacity": 25 if panel.stacked else 5,
        "showPoints": "never",
        "stacking": {"mode": "normal" if panel.stacked else "none"},
    }
    return {
        "id": number,
        "type": "timeseries",
        "title": panel.title,
        "datasource": SOURCE,
        "gridPos": {"x": x, "y": y, "w": WIDTH, "h": HEIGHT},
        "fieldConfig": {
            "defaults": {"unit": panel.unit, "min": 0, "custom": custom},
            "overrides": [],
        },
        "options": {
            "legend": {"displayMode": "list", "placement": "bottom", "showLegend": True},
            "tooltip": {"mode": "multi", "sort": "desc"},
        },
        "targets": [
            {
                "refId": chr(ord("A") + i),
                "datasource": SOURCE,
                "legendFormat": legend,
                "expr": query,
            }
            for i, (legend, query) in enumerate(panel.queries)
        ],
    }


def text() -> str:
    """The file's content."""
    return json.dumps(dashboard(), indent=1, ensure_ascii=False) + "\n"


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="fail if the file in the tree differs")
    if not parser.parse_args().check:
        DASHBOARD.write_text(text())
    elif text() != DASHBOARD.read_text():
        raise SystemExit(f"{DASHBOARD.name} is old: python -m scripts.gen_dashboard")


if __name__ == "__main__":
    main()
