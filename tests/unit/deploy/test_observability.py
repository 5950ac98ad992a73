"""What Prometheus, Grafana and the collector are given names nothing that does not exist."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from scripts.gen_dashboard import DASHBOARD, text
from scripts.render_manifests import CHART
from tests.unit.deploy.metric_names import known_metrics
from tests.unit.deploy.promql import FOLDER, expressions, metrics_of, recorded
from tests.unit.packaging.compose_file import (
    ROOT,
    all_services,
    compose_services,
    environment_of,
    kvmesh_services,
)


def yaml_of(name: str) -> dict[str, Any]:
    content: dict[str, Any] = yaml.safe_load((FOLDER / name).read_text())
    return content


@pytest.mark.parametrize("where", ["rules.yml", "grafana/kvmesh.json"])
def test_every_metric_exists(where: str) -> None:
    named = {name for each in expressions(where) for name in metrics_of(each)}
    assert len(named) > 10
    assert named <= known_metrics() | recorded()


def test_the_dashboard_is_the_script_s() -> None:
    assert DASHBOARD.read_text() == text(), "run `make dashboard`"


def test_panels_do_not_overlap() -> None:
    cells: set[tuple[int, int]] = set()
    panels = json.loads(DASHBOARD.read_text())["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    for panel in panels:
        place = panel["gridPos"]
        own = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not own & cells, panel["title"]
        assert place["x"] + place["w"] <= 24
        cells |= own


def test_alerts_say_what_to_do() -> None:
    rules = [rule for group in yaml_of("rules.yml")["groups"] for rule in group["rules"]]
    alerts = [rule for rule in rules if "alert" in rule]
    assert len({rule["alert"] for rule in alerts}) == len(alerts) > 8
    for rule in alerts:
        assert rule["labels"]["severity"] in {"warning", "critical"}
        assert set(rule["annotations"]) == {"summary", "action"}


def test_brackets_are_balanced() -> None:
    for where in ("rules.yml", "grafana/kvmesh.json"):
        for each in expressions(where):
            for left, right in ("()", "[]", "{}"):
                assert each.count(left) == each.count(right), each


def test_prometheus_scrapes_every_service_of_the_stack() -> None:
    targets: set[str] = set()
    jobs: set[str] = set()
    for job in yaml_of("prometheus.yml")["scrape_configs"]:
        jobs.add(job["job_name"])
        targets |= {each for config in job["static_configs"] for each in config["targets"]}
        for config in job.get("dns_sd_configs", []):
            targets |= {f"{name}:{config['port']}" for name in config["names"]}
    ours = kvmesh_services()
    expected = {
        f"{name}:{environment_of(service)['KVMESH_TELEMETRY__METRICS_PORT']}"
        for name, service in ours.items()
    }
    assert targets == expected
    used = set(
        re.findall(r'job="(\w+)"', (FOLDER / "rules.yml").read_text() + DASHBOARD.read_text())
    )
    used |= set(re.findall(r'job=\\"(\w+)\\"', DASHBOARD.read_text()))
    assert used <= jobs


def test_autoscalers_get_their_series_from_the_adapter() -> None:
    (rule,) = yaml_of("prometheus-adapter.yaml")["rules"]["custom"]
    pattern = re.search(r'__name__=~"([^"]+)"', rule["seriesQuery"])
    assert pattern is not None
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    asked = {values[name]["autoscaling"]["metric"] for name in ("gateway", "prefill", "decode")}
    assert all(re.fullmatch(pattern[1], name) for name in asked)
    assert asked <= known_metrics()


def test_the_collector_s_pipelines_name_parts_that_are_there() -> None:
    config = yaml_of("otel-collector.yaml")
    for pipeline in config["service"]["pipelines"].values():
        for kind in ("receivers", "processors", "exporters"):
            assert set(pipeline[kind]) <= set(config[kind])
    exported = config["exporters"]["otlp/jaeger"]["endpoint"]
    assert exported.partition(":")[0] in all_services()
    traced = environment_of(compose_services()["gateway"])["KVMESH_TELEMETRY__TRACE__TARGET"]
    host, _, port = traced.partition(":")
    assert host in all_services()
    assert config["receivers"]["otlp"]["protocols"]["grpc"]["endpoint"].endswith(f":{port}")


def test_services_of_the_profile_have_no_rights_and_read_what_is_there() -> None:
    extra = {
        name: each
        for name, each in all_services().items()
        if "observability" in each.get("profiles", ())
    }
    assert set(extra) == {"prometheus", "grafana", "jaeger", "otel-collector"}
    for name, service in extra.items():
        assert service["profiles"] == ["observability"]
        assert service["read_only"] is True
        assert service["cap_drop"] == ["ALL"]
        assert re.search(r":v?\d", service["image"]), "pinned"
        assert all(port.startswith("127.0.0.1:") for port in service.get("ports", [])), name
        for volume in service.get("volumes", []):
            source, _, mode = volume.split(":")
            assert (ROOT / Path(source)).is_file()
            assert mode == "ro"


needs_promtool = pytest.mark.skipif(
    shutil.which("promtool") is None, reason="promtool is not installed"
)


def _promtool(*arguments: str | Path) -> str:
    """Runs Prometheus' own checker; what it says when it refuses."""
    done = subprocess.run(["promtool", *arguments], capture_output=True, text=True, check=False)
    return "" if done.returncode == 0 else done.stdout + done.stderr


@needs_promtool
def test_prometheus_takes_its_configuration(tmp_path: Path) -> None:
    (tmp_path / "rules.yml").write_text((FOLDER / "rules.yml").read_text())
    config = yaml_of("prometheus.yml")
    config["rule_files"] = [str(tmp_path / Path(each).name) for each in config["rule_files"]]
    file = tmp_path / "prometheus.yml"
    file.write_text(yaml.safe_dump(config))
    assert _promtool("check", "config", file) == ""


@needs_promtool
def test_prometheus_can_read_every_query_of_the_dashboard(tmp_path: Path) -> None:
    def checked(queries: list[str]) -> str:
        rules = [{"record": f"query:{n}", "expr": each} for n, each in enumerate(queries)]
        file = tmp_path / "queries.yml"
        file.write_text(yaml.safe_dump({"groups": [{"name": "queries", "rules": rules}]}))
        return _promtool("check", "rules", file)

    queries = [
        each.replace("$__rate_interval", "1m").replace("$__range", "1h")
        for each in expressions("grafana/kvmesh.json")
    ]
    assert checked(queries) == ""
    assert "parse error" in checked([*queries, "sum(rate(x[1m]) by (y)"])
