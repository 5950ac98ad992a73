"""That commands which cannot be typed are found."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.unit.docs.documents import ROOT
from tests.unit.docs.programs import wrong_in
from tests.unit.docs.shell import Command, shell_commands, simple_commands


@pytest.mark.parametrize(
    "line",
    [
        "make bench-no-such-thing",
        "make up NODES=2",
        "make bench-transfer ARGS='--size 16'",
        "make setup ARGS=--fast",
        "kvmesh upp",
        "kvmesh up --prefil 2",
        "kvmesh up --prefill none",
        ".venv/bin/python -m kvmesh.cli fleet set-role prefill-0 encode",
        "python -m services.gateway --http.prt 8000",
        "python -m services.gateway --http.port eight",
        "python -m scripts.no_such_script",
        "docker compose --profile observe up",
        "KVMESH_NO_SUCH_NAME=1 docker compose up",
        "helm install kvmesh deploy/helm/kvmesh --set image.registri=x",
        "kubectl apply -f deploy/manifests/none.yaml",
        "pip install '.[evnts]'",
        "curl http://127.0.0.1:8000/v1/completion",
    ],
)
def test_a_wrong_command_is_wrong(line: str, capsys: pytest.CaptureFixture[str]) -> None:
    [(variables, words)] = simple_commands(line)
    assert wrong_in(Command(ROOT / "README.md", 1, True, variables, words))
    capsys.readouterr()


def test_blocks_and_sentences_are_cut_as_a_shell_cuts(tmp_path: Path) -> None:
    document = tmp_path / "page.md"
    document.write_text(
        "Use `kvmesh top`, not `top`.\n\n"
        "```console\n$ A=1 make up  # starts\n$ curl -d '{\n  1}' x | grep y > z\n```\n\n"
        "    kvmesh plan --local 2 \\\n        --remote 1\n\n    other text\n"
    )
    found = [(c.line, c.is_whole, c.variables, c.words) for c in shell_commands(document)]
    assert found == [
        (1, False, (), ("kvmesh", "top")),
        (4, True, ("A=1",), ("make", "up")),
        (5, True, (), ("curl", "-d", "{\n  1}", "x")),
        (5, True, (), ("grep", "y")),
        (9, True, (), ("kvmesh", "plan", "--local", "2", "--remote", "1")),
    ]
