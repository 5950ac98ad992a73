"""The chart by Helm itself: a library with Helm's own code, in a process of its own."""

from __future__ import annotations

import base64
import importlib.util
import json
import subprocess
import sys
from functools import cache
from typing import Any

import kubernetes_validate
import pytest
import yaml

from kvmesh.core.mesh_secret import MIN_SECRET_CHARS
from scripts.render_manifests import CHART, HELM_ALONE, RELEASE, merged
from tests.unit.deploy.rendered_chart import KUBERNETES, VALUES, Manifest, rendered

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("helm_python") is None, reason="no Helm library for this machine"
)

WRONG: dict[str, dict[str, Any]] = {
    "'prefil'": {"prefil": {"replicas": 3}},
    "'replica'": {"decode": {"replica": 3}},
    "/decode/replicas": {"decode": {"replicas": -1}},
    "/engine/dtype": {"engine": {"dtype": "float23"}},
    "/engine/kind": {"engine": {"kind": "vlm"}},
    "/engine/blockSize": {"engine": {"kind": "vllm"}},
    "at '/engine/blockSize'": {"engine": {"kind": "vllm", "blockSize": 8, "device": "cuda"}},
    "/engine/device": {"engine": {"device": "gpu"}},
    "/engine/tensorParallel": {"engine": {"tensorParallel": 2}},
    "/engine/pipelineParallel": {"engine": {"pipelineParallel": 2}},
    "/engine/hosts": {"engine": {"hosts": 2}},
    "at '/launcher/enabled'": {
        "engine": {"kind": "vllm", "blockSize": 32, "tensorParallel": 2, "hosts": 2},
        "launcher": {"enabled": True},
    },
    "at '/spare/empty'": {
        "engine": {"kind": "vllm", "blockSize": 32, "tensorParallel": 2, "hosts": 2},
        "spare": {"replicas": 1, "empty": True},
    },
    "/engine/lora": {"engine": {"lora": "sql=/models/sql"}},
    "/engine/maxLoras": {"engine": {"maxLoras": 1}},
    "/image/registry": {"image": {"registry": "registry.example"}},
    "/spare/replicas": {"spare": {"replicas": -1}},
    "/decode/autoscaling/enabled": {
        "launcher": {"enabled": True},
        "decode": {"autoscaling": {"enabled": True}},
    },
    "/launcher/groups/0": {"launcher": {"groups": [{"scenario": "chat"}]}},
    "'engine.growth_tokens'": {"decode": {"env": {"engine.growth_tokens": 1}}},
}
"""What the schema's complaint names -> values."""

# Apart, because the library brings a whole Go runtime with its own signal handlers.
_RUN = """
import json, sys
import helm_python as helm
chart_folder, release, asked = sys.argv[1], sys.argv[2], json.load(sys.stdin)
answers = {"rendered": {}, "refused": {}, "lint": helm.lint(chart_folder)["errors"]}
with helm.Chart.load(chart_folder) as chart:
    for name, values in asked["rendered"].items():
        answers["rendered"][name] = chart.render(values, name=release)
    for name, values in asked["refused"].items():
        try:
            chart.validate_schema(values)
            answers["refused"][name] = ""
        except helm.HelmError as error:
            answers["refused"][name] = str(error)
print(json.dumps(answers))
"""


@cache
def by_helm() -> dict[str, Any]:
    asked = json.dumps({"rendered": VALUES, "refused": {**WRONG, **VALUES}})
    done = subprocess.run(
        [sys.executable, "-c", _RUN, str(CHART), RELEASE],
        input=asked,
        check=True,
        stdout=subprocess.PIPE,
        text=True,
    )
    answers: dict[str, Any] = json.loads(done.stdout)
    return answers


def in_order(manifests: list[Manifest]) -> list[Manifest]:
    return sorted(manifests, key=lambda each: (each["kind"], each["metadata"]["name"]))


@pytest.mark.parametrize("values", list(VALUES))
def test_helm_renders_the_same(values: str) -> None:
    files = by_helm()["rendered"][values].items()
    texts = [text for name, text in files if name.endswith(".yaml")]
    every = [each for text in texts for each in yaml.safe_load_all(text) if each]
    manifests = [each for each in every if each["kind"] != "Secret"]
    assert in_order(manifests) == in_order(rendered(values))
    (notes,) = (text for name, text in files if name.endswith("NOTES.txt"))
    name = merged({"model": {"name": "pydoc-6m"}}, VALUES[values])["model"]["name"]
    assert f"serves {name} at http://{RELEASE}-gateway:80/v1" in notes


def secrets_of(values: str) -> list[Manifest]:
    texts = by_helm()["rendered"][values].items()
    found = [each for name, text in texts if name.endswith(HELM_ALONE) for each in loaded(text)]
    assert all(each["kind"] == "Secret" for each in found)
    return found


def loaded(text: str) -> list[Manifest]:
    return [each for each in yaml.safe_load_all(text) if each]


def test_helm_makes_secrets_that_differ_each_time() -> None:
    seen: set[str] = set()
    for values in ("defaults", "autoscaled"):
        (secret,) = secrets_of(values)
        kubernetes_validate.validate(secret, KUBERNETES[-1], strict=True)
        assert secret["metadata"]["name"] == f"{RELEASE}-mesh"
        assert set(secret["data"]) == {"secret", "redis-password"}
        texts = [base64.b64decode(each).decode() for each in secret["data"].values()]
        assert all(len(text) >= MIN_SECRET_CHARS for text in texts)
        seen |= set(texts)
    assert len(seen) == 4


def test_a_secret_that_is_named_is_used_and_none_is_made() -> None:
    assert secrets_of("secured") == []
    text = yaml.safe_dump(rendered("secured"))
    assert "own-mesh" in text
    assert f"{RELEASE}-mesh" not in text


def test_helm_finds_no_fault() -> None:
    assert by_helm()["lint"] == []


@pytest.mark.parametrize("values", list(VALUES))
def test_the_schema_takes_our_values(values: str) -> None:
    assert by_helm()["refused"][values] == ""


@pytest.mark.parametrize("named", list(WRONG))
def test_the_schema_refuses_what_would_have_no_effect(named: str) -> None:
    assert named in by_helm()["refused"][named]
