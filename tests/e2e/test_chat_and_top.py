"""`kvmesh chat` and `kvmesh top` as a user runs them, against a real mesh."""

from __future__ import annotations

import asyncio
import io
import json
import signal
import sys
from typing import Any

import pytest

from kvmesh.cli.__main__ import main
from tests.mesh_child import ROOT
from tests.mesh_processes import Mesh
from tests.waiting import until

pytestmark = pytest.mark.timeout(120)

AT_A_TERMINAL = """
import runpy, signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)
sys.argv[0] = "kvmesh"
runpy.run_module("kvmesh.cli", run_name="__main__")
"""
"""Ctrl-C counts, though whoever runs the tests in the background may ignore it."""


async def kvmesh(*arguments: str) -> int:
    """Runs a command; it has an event loop of its own."""
    return await asyncio.to_thread(main, list(arguments))


async def test_one_question(fake_mesh: Mesh, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ("--url", fake_mesh.url, "--max-tokens", "12", "--temperature", "0")
    assert await kvmesh("chat", *flags, "--prompt", "What is os.path?") == 0
    streamed = capsys.readouterr().out
    assert await kvmesh("chat", *flags, "--prompt", "What is os.path?", "--json") == 0
    answer = json.loads(capsys.readouterr().out)
    assert streamed == answer["content"] + "\n"
    assert answer["usage"]["completion_tokens"] == 12
    assert answer["finish_reason"] == "length"
    await fake_mesh.idle()


async def test_lines_from_a_pipe_are_one_conversation(
    fake_mesh: Mesh, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def asked(lines: str) -> list[dict[str, Any]]:
        monkeypatch.setattr(sys, "stdin", io.StringIO(lines))
        assert await kvmesh("chat", "--url", fake_mesh.url, "--max-tokens", "5", "--json") == 0
        lines = capsys.readouterr().out
        return [json.loads(line) for line in lines.splitlines() if line.startswith("{")]

    first, second = await asked("one\n\ntwo\n")
    assert second["usage"]["prompt_tokens"] > first["usage"]["prompt_tokens"] + 5
    alone, undone = await asked("one\n/undo\ntwo\n/exit\nnot asked\n")
    assert alone["usage"]["prompt_tokens"] == first["usage"]["prompt_tokens"]
    assert undone["usage"]["prompt_tokens"] < second["usage"]["prompt_tokens"]


async def test_ctrl_c_stops_an_answer_and_not_the_conversation(fake_mesh: Mesh) -> None:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", AT_A_TERMINAL, "chat", "--url", fake_mesh.url),
        *("--max-tokens", "3000"),
        cwd=ROOT,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(b"talk on\n")
    assert await process.stdout.read(1)
    process.send_signal(signal.SIGINT)
    await fake_mesh.idle()  # the server stopped, too
    process.stdin.write(b"/stats\n/exit\n")
    process.stdin.close()
    rest = (await process.stdout.read()).decode(errors="replace")
    assert "[stopped]" in rest
    assert "first token" in rest
    assert await process.wait() == 0


async def test_ctrl_c_at_the_only_question_is_an_exit_code(fake_mesh: Mesh) -> None:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", AT_A_TERMINAL, "chat", "--url", fake_mesh.url),
        *("--max-tokens", "3000", "--prompt", "talk on"),
        cwd=ROOT,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    assert process.stdout is not None
    first = await process.stdout.read(1)
    process.send_signal(signal.SIGINT)
    rest, said = await process.communicate()
    assert process.returncode == 130
    answer = (first + rest).decode().removesuffix("\n")
    assert said.decode().splitlines() == [
        f"kvmesh chat: the answer is cut off after {len(answer)} characters",
        "kvmesh chat: stopped",
    ]
    await fake_mesh.idle()


async def test_failures_are_exit_codes(fake_mesh: Mesh, capsys: pytest.CaptureFixture[str]) -> None:
    assert await kvmesh("chat", "--url", "http://127.0.0.1:1", "--prompt", "x") == 1
    assert "no gateway answers" in capsys.readouterr().err
    flags = ("--url", fake_mesh.url, "--model", "another", "--prompt", "x")
    assert await kvmesh("chat", *flags) == 1
    assert "another" in capsys.readouterr().err
    assert await kvmesh("top", "--once", "--scheduler", "127.0.0.1:1", "--timeout", "0.2") == 1
    assert "no scheduler answers" in capsys.readouterr().err


async def test_top_sees_the_mesh_at_work(
    fake_mesh: Mesh, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ("--once", "--json", "--interval", "0.5", "--url", fake_mesh.url)
    secret = ("--secret-file", str(fake_mesh.secret_file))
    scheduler = ("--scheduler", fake_mesh["scheduler"].address, *secret)
    talk = asyncio.create_task(
        kvmesh("chat", "--url", fake_mesh.url, "--max-tokens", "1500", "--prompt", "talk on")
    )

    async def busy() -> bool:
        capsys.readouterr()
        assert await kvmesh("top", *flags, *scheduler) == 0
        lines = [line for line in capsys.readouterr().out.splitlines() if '"fresh"' in line]
        seen = json.loads(lines[-1][lines[-1].index('{"fresh"') :])
        rate = sum(each["decode_tokens_s"] for each in seen["workers"])
        return bool(seen["gateway"]["requests_open"] == 1 and seen["gateway"]["tokens_s"] and rate)

    await until(busy, "top sees the request")
    assert await talk == 0
    await fake_mesh.idle()
