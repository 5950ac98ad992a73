from __future__ import annotations

import multiprocessing
import os
import signal
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from kvmesh.core.errors import ConfigError
from kvmesh.engine.shared_cores import SharedCores


class Engine:
    """One in this process; `threads` are those of its steps, as they changed."""

    def __init__(self, path: Path, cores: int = 8) -> None:
        self.threads: list[int] = []
        self.cores = SharedCores(path, cores, self.threads.append)


def other_engine(path: Path, orders: Connection) -> None:
    """Runs in a process of its own, since locks are a process's."""
    cores = SharedCores(path, 8, lambda _: None)
    while (order := orders.recv()) != "end":
        cores.begin_step() if order == "step" else cores.rest()
        orders.send("done")


class Other:
    """An engine of another process."""

    def __init__(self, path: Path) -> None:
        context = multiprocessing.get_context("spawn")
        self._orders, theirs = context.Pipe()
        self.process = context.Process(target=other_engine, args=(path, theirs), daemon=True)
        self.process.start()

    def do(self, order: str) -> None:
        self._orders.send(order)
        assert self._orders.recv() == "done"

    def kill(self) -> None:
        assert self.process.pid is not None
        os.kill(self.process.pid, signal.SIGKILL)
        self.process.join()


def test_an_engine_alone_has_all_cores_and_asks_for_them_once(tmp_path: Path) -> None:
    engine = Engine(tmp_path / "cores")
    for _ in range(3):
        engine.cores.begin_step()
    assert engine.threads == [8]
    engine.cores.rest()
    engine.cores.rest()
    engine.cores.begin_step()
    assert engine.threads == [8]
    engine.cores.close()


def test_cores_are_divided_among_the_engines_that_have_work(tmp_path: Path) -> None:
    engine = Engine(tmp_path / "cores")
    others = [Other(tmp_path / "cores") for _ in range(2)]
    engine.cores.begin_step()
    others[0].do("step")
    engine.cores.begin_step()
    others[1].do("step")
    engine.cores.begin_step()
    assert engine.threads == [8, 4, 2]
    others[0].do("rest")
    engine.cores.begin_step()
    assert engine.threads == [8, 4, 2, 4]
    others[1].kill()
    engine.cores.begin_step()
    assert engine.threads == [8, 4, 2, 4, 8]
    others[0].kill()
    engine.cores.close()


def test_each_engine_has_a_thread_however_many_there_are(tmp_path: Path) -> None:
    engine = Engine(tmp_path / "cores", cores=1)
    other = Other(tmp_path / "cores")
    other.do("step")
    engine.cores.begin_step()
    assert engine.threads == [1]
    other.kill()
    engine.cores.close()


def test_a_file_that_cannot_be_opened_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"engine\.cores_file: .*nowhere/cores"):
        SharedCores(tmp_path / "nowhere" / "cores", 8, lambda _: None)


def test_engines_of_one_file_have_cores_of_one_name(tmp_path: Path) -> None:
    one, two, other = (Engine(tmp_path / name).cores for name in ("a", "a", "b"))
    assert one.name == two.name != other.name
    for each in (one, two, other):
        each.close()
