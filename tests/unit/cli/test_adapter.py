from __future__ import annotations

import pytest

from kvmesh.cli.adapter import described, main, table_of
from kvmesh.v1 import scheduler_service_pb2 as pb

VIEW = pb.AdapterView(
    name="sql",
    model="m",
    folder="/adapters/sql",
    holders=[
        pb.AdapterHolder(worker_id="d", adapter="sql@1", answered=True),
        pb.AdapterHolder(worker_id="p", problem="no place", answered=True),
        pb.AdapterHolder(worker_id="q"),
        pb.AdapterHolder(worker_id="r", answered=True),
    ],
)


@pytest.mark.parametrize("text", ["sql", "=folder", "a=1,b=2", ""])
def test_what_is_not_one_adapter_is_wrong_usage(
    text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["load", text]) == 2
    assert "NAME=FOLDER" in capsys.readouterr().err


def test_what_people_see() -> None:
    states = {each["worker_id"]: each["state"] for each in described(VIEW)["workers"]}
    assert states == {
        "d": "has it",
        "p": "no place",
        "q": "not answered yet",
        "r": "without it",
    }
    cells = [list(column.cells) for column in table_of([VIEW, pb.AdapterView(name="py")]).columns]
    assert cells[2] == ["/adapters/sql", "(engine.lora)"]
    assert "p (no place)" in str(cells[3][0])


def test_no_scheduler_is_exit_code_1(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["list", "--scheduler", "127.0.0.1:1", "--timeout", "0.3"]) == 1
    assert "no scheduler answers at 127.0.0.1:1" in capsys.readouterr().err
