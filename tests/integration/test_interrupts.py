"""Ctrl-C or SIGTERM while a program loads its modules: it ends without a word."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvmesh.core.interrupts import end_when_interrupted, ended_when_interrupted

ROOT = Path(__file__).resolve().parents[2]
LOADS_FOR_EVER = "import threading\nprint('loading', flush=True)\nthreading.Event().wait()\n"


@pytest.fixture(autouse=True)
def handled_by_python() -> Iterator[None]:
    """Also where the tests run in the background, which ignores interrupts, as children would."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    term = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGINT, before)
    signal.signal(signal.SIGTERM, term)


SERVICES = ("gateway", "scheduler", "kvmanager", "prefill", "decode")


@pytest.mark.parametrize(
    ("module", "arguments", "loaded", "number", "code"),
    [
        ("kvmesh.cli", [], "difflib", signal.SIGINT, -signal.SIGINT),
        ("kvmesh.cli", ["up"], "psutil", signal.SIGINT, -signal.SIGINT),
        *(
            (f"services.{name}", [], "grpc", *each)
            for name in SERVICES
            for each in ((signal.SIGINT, -signal.SIGINT), (signal.SIGTERM, 0))
        ),
    ],
)
def test_nothing_is_said(
    module: str,
    arguments: list[str],
    loaded: str,
    number: signal.Signals,
    code: int,
    tmp_path: Path,
) -> None:
    (tmp_path / f"{loaded}.py").write_text(LOADS_FOR_EVER)
    paths = f"{tmp_path}:{ROOT / 'libs'}:{ROOT}"
    with subprocess.Popen(
        [sys.executable, "-m", module, *arguments],
        env={**os.environ, "PYTHONPATH": paths},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "loading\n"
            process.send_signal(number)
            out, err = process.communicate()
        finally:
            process.kill()
    assert (process.returncode, out, err) == (code, "", "")


def test_python_handles_interrupts_again_after_the_imports() -> None:
    with ended_when_interrupted():
        assert signal.getsignal(signal.SIGINT) is signal.SIG_DFL
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_it_does_so_when_an_import_fails() -> None:
    with pytest.raises(ModuleNotFoundError), ended_when_interrupted():
        raise ModuleNotFoundError
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_ignored_interrupts_stay_ignored() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with ended_when_interrupted():
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    end_when_interrupted()
    assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN


def test_a_service_leaves_them_to_its_event_loop() -> None:
    end_when_interrupted()
    assert signal.getsignal(signal.SIGINT) is signal.SIG_DFL


def test_other_threads_change_nothing() -> None:
    seen: list[object] = []

    def load() -> None:
        with ended_when_interrupted():
            seen.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=load)
    thread.start()
    thread.join()
    assert seen == [signal.default_int_handler]
