"""Renders the Helm chart into deploy/manifests/kvmesh.yaml: python -m scripts.render_manifests.

The templates use only functions of Go's text/template, sprig and toYaml, so they render without
helm, all but the one that makes the mesh's Secret: no secret belongs into a file of a repository.
`--check` fails if the file in the tree differs.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parent.parent
CHART = ROOT / "deploy" / "helm" / "kvmesh"
MANIFESTS = ROOT / "deploy" / "manifests" / "kvmesh.yaml"
RELEASE = "kvmesh"
HEADER = f"""\
# The chart in deploy/helm with its default values, by `make manifests`. Make its Secret once:
#   kubectl create secret generic {RELEASE}-mesh --from-literal=secret="$(openssl rand -hex 32)" \\
#     --from-literal=redis-password="$(openssl rand -hex 32)"
"""
HELM_ALONE = "secret.yaml"
"""Looks into the cluster for the Secret that an earlier installation made."""

# In a process of its own: the library brings a whole Go runtime with its own signal handlers.
_RENDER = """
import json, sys
from pathlib import Path
import go_template
scope = json.loads(sys.argv[1])
texts = [go_template.render(Path(name), scope).decode() for name in sys.argv[2:]]
print(json.dumps(texts))
"""


def merged(values: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Values with changes on top, as helm merges them."""
    result = dict(values)
    for name, value in changes.items():
        known = result.get(name)
        if isinstance(known, dict) and isinstance(value, dict):
            result[name] = merged(known, value)
        else:
            result[name] = value
    return result


def render(changes: Mapping[str, Any] | None = None, release: str = RELEASE) -> str:
    """The chart's manifests as one YAML stream.

    Args:
        changes: values that differ from values.yaml.

    Raises:
        subprocess.CalledProcessError: a template is wrong; the message is on stderr.
    """
    values = merged(yaml.safe_load((CHART / "values.yaml").read_text()), changes or {})
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    scope = {
        "Values": values,
        "Release": {"Name": release, "Namespace": "default"},
        "Chart": {"Name": chart["name"], "AppVersion": chart["appVersion"]},
    }
    parts = (CHART / "templates" / "_parts.tpl").read_text()
    with tempfile.TemporaryDirectory() as folder:
        wholes = []
        for template in sorted((CHART / "templates").glob("*.yaml")):
            if template.name == HELM_ALONE:
                continue
            wholes.append(Path(folder) / template.name)
            wholes[-1].write_text(parts + template.read_text())
        done = subprocess.run(
            [sys.executable, "-c", _RENDER, json.dumps(scope), *map(str, wholes)],
            check=True,
            stdout=subprocess.PIPE,
            text=True,
        )
    documents = [text.strip().removeprefix("---").strip() for text in json.loads(done.stdout)]
    return HEADER + "".join(f"---\n{each}\n" for each in documents if each)


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="fail if the file in the tree differs")
    text = render()
    if not parser.parse_args().check:
        MANIFESTS.write_text(text)
    elif text != MANIFESTS.read_text():
        raise SystemExit(
            "deploy/manifests/kvmesh.yaml is not what the chart renders: make manifests"
        )


if __name__ == "__main__":
    main()
