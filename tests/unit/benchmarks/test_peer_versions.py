from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path

import pytest

from benchmarks import gateway, transfer
from benchmarks.peer_versions import PEERS, own_versions, peer_versions, program_version
from benchmarks.result import document

HERE = Path(sys.executable)


OURS = {"modules": ("aiohttp", "yaml"), "packages": ("numpy",), "none": ("no_such_module",)}


def test_a_peer_is_asked_of_the_interpreter_that_has_it() -> None:
    found = peer_versions({"modules": HERE, "packages": HERE}, OURS)
    assert {name.lower(): each for name, each in found.items()} == {
        package: version(package) for package in ("aiohttp", "pyyaml", "numpy")
    }
    assert own_versions("transformers") == {"transformers": version("transformers")}


def test_a_package_that_is_not_there_has_no_version(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(PEERS, "none", OURS["none"])
    assert own_versions("none") == {}
    with pytest.raises(SystemExit, match="no package of none"):
        peer_versions({"none": HERE}, OURS)


@pytest.mark.parametrize("python", ["/nowhere/bin/python", "/bin/false"])
def test_what_is_no_interpreter_is_said_before_anything_is_measured(python: str) -> None:
    with pytest.raises(SystemExit, match="no interpreter to ask for nixl"):
        peer_versions({"nixl": Path(python)})


def test_a_program_says_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "iperf3"
    program.write_text("#!/bin/sh\necho 'iperf 3.99 (x 1.2)'\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert program_version("iperf3") == {"iperf3": "3.99"}
    program.unlink()
    assert program_version("iperf3") == {}


def test_a_result_names_them_beside_our_own() -> None:
    found = document([], [], 0, [], {"nixl": "1.2"})["versions"]
    assert found["nixl"] == "1.2"
    assert found["python"]


@pytest.mark.parametrize(("main", "peer"), [(gateway.main, "dynamo"), (transfer.main, "mooncake")])
def test_benchmarks_ask_before_they_measure(
    main: Callable[[Sequence[str]], int], peer: str
) -> None:
    with pytest.raises(SystemExit, match=f"no interpreter to ask for {peer}"):
        main([f"--{peer}-python", "/nowhere/bin/python"])
