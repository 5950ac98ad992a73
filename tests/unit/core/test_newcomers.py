"""Unknown connections of a port."""

from __future__ import annotations

from kvmesh.core.newcomers import Newcomers


def test_of_too_many_the_oldest_is_cut() -> None:
    cut: list[str] = []
    newcomers = Newcomers(cut.append, limit=2)
    for name in ("a", "b", "c"):
        newcomers.enter(name)
    assert cut == ["a"]
    assert len(newcomers) == 2
    assert "a" not in newcomers


def test_who_is_known_is_not_cut_and_leaves_once() -> None:
    cut: list[str] = []
    newcomers = Newcomers(cut.append, limit=2)
    newcomers.enter("a")
    newcomers.leave("a")
    newcomers.leave("a")
    for name in ("b", "c", "d"):
        newcomers.enter(name)
    newcomers.cut_oldest()
    newcomers.cut_oldest()
    newcomers.cut_oldest()
    assert cut == ["b", "c", "d"]
    assert (len(newcomers), newcomers.num_cut) == (0, 3)
