"""What people and programs look for in a repository: licence, citation, metadata of the package."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import yaml

from tests.unit.packaging.compose_file import ROOT

APACHE_2_SHA256 = "cfc7749b96f63bd31c3c42b5c471bf756814053e847c10f3eb003417bc523d30"
"""Of https://www.apache.org/licenses/LICENSE-2.0.txt."""

PAPERS = {"2408.08147", "2504.03775", "2508.17219", "2604.15039"}

PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def test_the_licence_is_apache_2_word_for_word() -> None:
    assert hashlib.sha256((ROOT / "LICENSE").read_bytes()).hexdigest() == APACHE_2_SHA256
    assert PROJECT["license"] == "Apache-2.0"
    assert set(PROJECT["license-files"]) == {"LICENSE", "NOTICE"}


def test_the_notice_names_the_text_that_the_embedded_model_was_trained_on() -> None:
    notice = (ROOT / "NOTICE").read_text()
    data = (ROOT / "models/pydoc-6m/LICENSE-DATA").read_text()
    copyright_line = next(line.strip() for line in data.splitlines() if "Copyright" in line)
    assert copyright_line in notice
    assert "models/pydoc-6m/LICENSE-DATA" in notice


def _validate(path: Path) -> subprocess.CompletedProcess[str]:
    schema = ("--builtin-schema", "vendor.citation-file-format")
    command = [str(Path(sys.executable).with_name("check-jsonschema")), *schema, str(path)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_the_citation_is_valid_and_names_the_four_papers(tmp_path: Path) -> None:
    found = _validate(ROOT / "CITATION.cff")
    assert found.returncode == 0, found.stdout
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert (citation["version"], citation["license"]) == (PROJECT["version"], PROJECT["license"])
    assert {
        each["doi"].removeprefix("10.48550/arXiv.") for each in citation["references"]
    } == PAPERS
    assert all(each["url"].endswith(each["doi"][15:]) for each in citation["references"])
    del citation["references"][0]["authors"]
    damaged = tmp_path / "CITATION.cff"
    damaged.write_text(json.dumps(citation))
    assert _validate(damaged).returncode != 0


def test_the_package_says_that_it_is_typed_and_it_is() -> None:
    assert "Typing :: Typed" in PROJECT["classifiers"]
    assert (ROOT / "libs/kvmesh/py.typed").is_file()


def test_only_versions_of_python_that_are_tested_are_promised() -> None:
    start = "Programming Language :: Python :: "
    promised = [each.removeprefix(start) for each in PROJECT["classifiers"] if start in each]
    promised.remove("3 :: Only")
    assert promised[0] == PROJECT["requires-python"].removeprefix(">=")
    job = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text())["jobs"]["ci"]
    assert job["strategy"]["matrix"]["python"] == promised
    versions = [step.get("with", {}).get("python-version") for step in job["steps"]]
    assert "${{ matrix.python }}" in versions
