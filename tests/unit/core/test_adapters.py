from __future__ import annotations

import pytest

from kvmesh.core.adapters import (
    adapter_id,
    adapter_name,
    lacking,
    made_by,
    maker_of,
    name_problem,
)
from tests.unit.policy.fleet_examples import worker_info


@pytest.mark.parametrize("name", ["sql", "org/sql", "a@b"])
def test_an_id_tells_the_name(name: str) -> None:
    assert adapter_name(adapter_id(name, "0123")) == name
    assert adapter_id(name, "0123") != adapter_id(name, "0124")


def test_no_adapter_has_no_name() -> None:
    assert adapter_name("") == ""


@pytest.mark.parametrize("name", ["", " sql", "a,b", "a=b", "a\nb", "x" * 129])
def test_names_that_options_or_clients_cannot_write(name: str) -> None:
    assert name_problem(name)


def test_names_that_they_can() -> None:
    assert not any(map(name_problem, ["sql", "org/sql-v2", "two words", "x" * 128]))


def test_who_lacks_an_adapter() -> None:
    workers = [
        worker_info("has", adapters=("sql@1",)),
        worker_info("older", adapters=("sql@0",)),
        worker_info("none"),
        worker_info("other", model="o"),
    ]
    assert lacking(workers, "m", "sql@1") == {"older", "none"}


@pytest.mark.parametrize("maker", [("fp", ""), ("fp", "sql@1"), ("fp", "a+b@1"), ("", "")])
def test_what_made_a_stream_is_one_text(maker: tuple[str, str]) -> None:
    assert maker_of(made_by(*maker)) == maker


def test_nothing_made_it_while_no_checkpoint_is_chosen() -> None:
    assert made_by("", "sql@1") == ""
