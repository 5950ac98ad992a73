from __future__ import annotations

from dataclasses import dataclass

import pytest

from kvmesh.core.config import option
from scripts.gen_config_docs import DOCUMENT, SERVICES, all_tables, table, with_tables


@dataclass(frozen=True)
class Inner:
    size_s: float = option(1.5, "a | b")
    on: bool = option(True, "switch")


@dataclass(frozen=True)
class Outer:
    part: Inner = option(Inner, "")
    name: str = option("", "who")


@dataclass(frozen=True)
class OtherOuter:
    part: Inner = option(Inner, "")
    name: str = option("other", "who")


def test_the_document_is_up_to_date() -> None:
    text = DOCUMENT.read_text()
    assert with_tables(text, all_tables()) == text, "run python -m scripts.gen_config_docs"


def test_each_service_has_all_its_options_in_the_document() -> None:
    tables = all_tables()
    for service, config in SERVICES.items():
        own = tables.get(service, tables["workers"])
        for line in table([config]).splitlines()[2:]:
            name = line.split("|")[2]  # a secret has no flag
            assert name in own or name in tables["common"], (service, name)


def test_rows_show_flag_environment_default_and_meaning() -> None:
    assert table([Outer]).splitlines()[2:] == [
        "| `--part.size-s` | `KVMESH_PART__SIZE_S` | `1.5` | a \\| b |",
        "| `--part.on` | `KVMESH_PART__ON` | `true` | switch |",
        "| `--name` | `KVMESH_NAME` | – | who |",
    ]


def test_defaults_that_differ_stand_side_by_side() -> None:
    assert "| – / `other` |" in table([Outer, OtherOuter])


def test_options_of_other_tables_are_left_out() -> None:
    assert len(table([Outer], without=[Inner]).splitlines()) == 5  # Inner's paths have no `part`
    assert table([Outer], without=[Outer]).splitlines()[2:] == []


def test_tables_replace_what_is_between_their_markers() -> None:
    text = "a\n<!-- options: x -->\nold\n<!-- end of options: x -->\nb\n"
    fresh = with_tables(text, {"x": "new\n"})
    assert fresh == "a\n<!-- options: x -->\nnew\n<!-- end of options: x -->\nb\n"
    with pytest.raises(SystemExit, match="markers of the options of y"):
        with_tables(text, {"y": "new\n"})
