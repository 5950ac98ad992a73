from __future__ import annotations

import dataclasses

import pytest

from services.launcher.pods import Pod, in_the_way

ONE, TWO = Pod("one", "d", "r1"), Pod("two", "d", "r1")


def test_of_pods_that_are_alike_the_marked_one_ends() -> None:
    assert in_the_way(ONE, [ONE, TWO], 2) == ""


@pytest.mark.parametrize(
    "change",
    [{"is_assigned": False}, {"phase": "Pending"}, {"phase": "Unknown"}, {"is_ready": False}],
)
def test_a_pod_that_is_not_ready_would_end_first(change: dict[str, object]) -> None:
    worse = dataclasses.replace(TWO, **change)  # type: ignore[arg-type]
    assert in_the_way(ONE, [ONE, worse], 2) == "two would end first, not being ready"
    assert in_the_way(worse, [ONE, worse], 2) == ""


def test_nothing_ends_while_the_deployment_is_being_changed() -> None:
    assert in_the_way(ONE, [ONE, TWO], 3) == "d has 2 pods and is to have 3"
    other = dataclasses.replace(TWO, revision="r2")
    assert in_the_way(ONE, [ONE, other], 2) == "d is being rolled out"
