from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from kvmesh.cli.flags import (
    add_flag,
    add_list,
    add_switch,
    count,
    new_parser,
    not_negative,
    output_file,
    picture_file,
    port_number,
    positive,
    positive_int,
)


def _parser() -> argparse.ArgumentParser:
    parser = new_parser("kvmesh test", "A test.")
    add_flag(parser, "--num-things", 3, "how many", kind=positive_int)
    add_flag(parser, "--color", "red", "which", choices=("red", "blue"))
    add_switch(parser, "--fast", "be fast")
    add_list(parser, "--names", "whom", "NAME")
    return parser


def test_defaults() -> None:
    values = _parser().parse_args([])
    assert (values.num_things, values.color, values.fast, values.names) == (3, "red", False, [])


def test_the_environment_beats_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVMESH_NUM_THINGS", "5")
    monkeypatch.setenv("KVMESH_COLOR", "blue")
    monkeypatch.setenv("KVMESH_FAST", "true")
    monkeypatch.setenv("KVMESH_NAMES", "a b")
    values = _parser().parse_args([])
    assert (values.num_things, values.color, values.fast) == (5, "blue", True)
    assert values.names == ["a", "b"]


def test_the_command_line_beats_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVMESH_NUM_THINGS", "5")
    assert _parser().parse_args(["--num-things", "7"]).num_things == 7


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("KVMESH_NUM_THINGS", "many"),
        ("KVMESH_NUM_THINGS", "0"),
        ("KVMESH_COLOR", "green"),
        ("KVMESH_FAST", "perhaps"),
    ],
)
def test_a_bad_value_names_its_variable(
    name: str, value: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit):
        _parser()
    assert name in capsys.readouterr().err


def test_help_names_the_twin() -> None:
    assert "KVMESH_NUM_THINGS" in _parser().format_help()


def test_numbers() -> None:
    assert (positive_int("1"), count("0"), port_number("65535")) == (1, 0, 65535)
    for kind, raw in ((positive_int, "0"), (count, "-1"), (port_number, "65536")):
        with pytest.raises(argparse.ArgumentTypeError):
            kind(raw)
    assert (positive("0.5"), not_negative("0")) == (0.5, 0.0)
    for number in ("0", "-1", "nan", "inf", "much"):
        with pytest.raises(argparse.ArgumentTypeError):
            positive(number)
    with pytest.raises(argparse.ArgumentTypeError):
        not_negative("-0.1")


def test_files_that_cannot_be_written_are_told_before_the_work(tmp_path: Path) -> None:
    assert output_file(str(tmp_path / "a.json")) == str(tmp_path / "a.json")
    with pytest.raises(argparse.ArgumentTypeError, match="is a folder"):
        output_file(str(tmp_path))
    with pytest.raises(argparse.ArgumentTypeError, match="does not exist"):
        output_file(str(tmp_path / "nowhere" / "a.json"))
    assert picture_file(str(tmp_path / "a.PNG")) == str(tmp_path / "a.PNG")
    with pytest.raises(argparse.ArgumentTypeError, match="does not end in"):
        picture_file(str(tmp_path / "a.bmp"))


def test_what_is_wrong_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        _parser().parse_args(["--num-things", "two"])
    assert caught.value.code == 2
    assert capsys.readouterr().err == (
        "kvmesh test: argument --num-things: 'two' is not a whole number; "
        "see `kvmesh test --help`\n"
    )
