from __future__ import annotations

import http.server
import json
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvmesh.cli.bench import main

EVENTS = (
    {"choices": [{"text": "a", "finish_reason": None}]},
    {"choices": [{"text": "b", "finish_reason": "length"}]},
    {"choices": [], "usage": {"prompt_tokens": 8, "completion_tokens": 2}},
)


class Handler(http.server.BaseHTTPRequestHandler):
    """Serves one model; refuses when the server says so."""

    server: Gateway

    def do_GET(self) -> None:
        self._answer(200, json.dumps({"data": [{"id": "m"}]}))

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        events = "".join(f"data: {json.dumps(event)}\n\n" for event in EVENTS)
        self._answer(self.server.status, events + "data: [DONE]\n\n")

    def _answer(self, status: int, body: str) -> None:
        self.send_response(status)
        self.send_header("content-length", str(len(body)))
        self.send_header("content-type", "application/json")
        self.end_headers()
        self.wfile.write(body.encode())

    def log_message(self, *arguments: object) -> None:
        pass


class Gateway(http.server.ThreadingHTTPServer):
    status = 200

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


@pytest.fixture
def gateway() -> Iterator[Gateway]:
    with Gateway(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def test_a_run_is_printed_and_saved(
    gateway: Gateway, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "results" / "serve.json"
    load = ["--requests", "5", "--rate", "0", "--input-tokens", "8", "--output-tokens", "2"]
    words = ["--goodput", "ttft:60000", "tpot:60000", "--save", str(file), "--seed", "3"]
    assert main(["serve", "--url", gateway.url, *load, *words]) == 0
    result = json.loads(file.read_text())
    assert (result["completed"], result["failed"], result["seed"]) == (5, 0, 3)
    assert (result["total_input_tokens"], result["total_output_tokens"]) == (40, 10)
    assert result["p99_ttft_ms"] > 0
    assert result["request_goodput"] == pytest.approx(result["request_throughput"])
    assert all(target["met"] for target in result["targets"])
    assert result["command"].startswith("python -m kvmesh.cli")
    assert [row["latency"] for row in result["rows"]] == ["TTFT", "TPOT", "ITL", "E2E"]
    assert result["machine"]["cores"] >= 1
    assert result["versions"]["python"]
    page = file.with_suffix(".md").read_text()
    assert "| errors | 0 | == 0 | yes |" in page
    assert "| TTFT |" in page
    shown = capsys.readouterr().out
    assert "5 completed, 0 refused, 0 errors" in shown
    assert "TPOT" in shown


def test_refusals_are_no_errors(gateway: Gateway, capsys: pytest.CaptureFixture[str]) -> None:
    gateway.status = 503
    assert main(["serve", "--url", gateway.url, "--requests", "2", "--rate", "0"]) == 0
    captured = capsys.readouterr()
    assert "0 completed, 2 refused" in captured.out
    assert "2 x 503" in captured.err


def test_errors_are_a_failure(gateway: Gateway, capsys: pytest.CaptureFixture[str]) -> None:
    gateway.status = 500
    assert main(["serve", "--url", gateway.url, "--requests", "2", "--rate", "0"]) == 1
    assert "2 errors" in capsys.readouterr().out


def test_a_limit_that_is_none(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["serve", "--goodput", "speed:1"])
    assert "ttft:MS" in capsys.readouterr().err
