from __future__ import annotations

from pathlib import Path

import pytest

from kvmesh.cli.group import described, main, read_groups, table_of
from kvmesh.core.errors import ConfigError
from kvmesh.v1 import scheduler_service_pb2 as pb
from kvmesh.v1.types_pb2 import ROLE_DECODE

FILE = """
[[group]]
scenario = "any"
prefill = 1
decode = 2

[[group]]
scenario = "chat"
checkpoint = "/models/two"
hybrid = 1
"""


def test_a_file_of_groups(tmp_path: Path) -> None:
    file = tmp_path / "groups.toml"
    file.write_text(FILE)
    assert read_groups(file) == [
        pb.GroupWish(prefill=1, decode=2),
        pb.GroupWish(scenario="chat", checkpoint="/models/two", hybrid=1),
    ]


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("[[group]]\nprefill = 1", "needs a prefill and a decode worker"),
        ("[[group]]\nprefil = 1", "a group has no field prefil; its fields are checkpoint"),
        ("[[group]]\nhybrid = -1", "any"),
        ('[[group]]\nhybrid = "one"', "any"),
        ("[[group]]\nhybrid = 1\n[[group]]\nhybrid = 1", "two groups of one scenario"),
        ("", r"no \[\[group\]\] in it"),
        ("group = 1", r"no \[\[group\]\] in it"),
        ("[[group", "group"),
    ],
)
def test_files_that_make_no_sense(tmp_path: Path, text: str, why: str) -> None:
    file = tmp_path / "groups.toml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=why):
        read_groups(file)
    assert main(["apply", str(file)]) == 2


def test_a_file_that_is_not_there_and_no_model_are_wrong_usage(tmp_path: Path) -> None:
    assert main(["apply", str(tmp_path / "none.toml")]) == 2
    assert main(["upgrade", "any"]) == 2


def test_what_people_see() -> None:
    worker = pb.GroupWorker(worker_id="decode-0", role=ROLE_DECODE, registered=True, closed=True)
    wish = pb.GroupWish(prefill=1, decode=2)
    view = pb.GroupView(wish=wish, state=pb.GROUP_STATE_CHANGING, workers=[worker])
    shown = described(view)
    assert (shown["group"], shown["state"]) == ("any", "changing")
    assert shown["workers"][0]["role"] == "decode"
    columns = [list(column.cells) for column in table_of([view]).columns]
    assert columns == [
        ["any"],
        ["changing"],
        ["(default)"],
        ["1 prefill, 2 decode"],
        ["decode-0 (closed)"],
    ]


def test_a_worker_that_connects_is_shown_as_such() -> None:
    worker = pb.GroupWorker(
        worker_id="decode-0", role=ROLE_DECODE, registered=True, closed=True, connecting=True
    )
    problem = "decode-0: prefill-0 cannot send KV to it"
    state = pb.GROUP_STATE_CONNECTING
    view = pb.GroupView(state=state, workers=[worker], problem=problem)
    assert described(view)["workers"][0]["connecting"]
    columns = [list(column.cells) for column in table_of([view]).columns]
    assert columns[1] == [f"connecting: {problem}"]
    assert columns[4] == ["decode-0 (connecting)"]
