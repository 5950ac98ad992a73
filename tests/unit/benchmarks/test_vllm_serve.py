"""A mesh over vLLM beside `vllm serve`: what is said of the loads."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from benchmarks.result import Row
from benchmarks.vllm_handoff import Handoff, measure, tcp_ms
from benchmarks.vllm_serve import AT_ONCE, KILLED, LOADS, OVERLOAD, REUSED, row_of, starts, targets
from benchmarks.vllm_systems import ONE, RANKS, TWO, VLLM, Served, moves

EVENT = b'data: {"choices": [{"token_ids": [%d], "text": ""}]}\n\n'


def row(load: str, system: str, **changes: float | None) -> Row:
    (of,) = [each for each in LOADS if each.name == load]
    found = {
        "completed": of.num_prompts,
        "failed": 0,
        "duration": 10.0,
        "output_throughput": 100.0,
        "request_goodput": of.num_prompts / 10,
        "median_ttft_ms": 50.0,
        "p99_ttft_ms": 90.0,
        "median_tpot_ms": 9.0,
        "longest_pause": 0.5,
        "moved_after_s": None,
    }
    return row_of(of, system, found | changes)


def test_what_is_good_is_a_share_of_all_that_was_asked() -> None:
    assert row(OVERLOAD.name, VLLM)["good"] == 1.0
    half = OVERLOAD.num_prompts / 20
    assert row(OVERLOAD.name, VLLM, request_goodput=half)["good"] == 0.5
    assert row(OVERLOAD.name, VLLM, request_goodput=half, duration=5.0)["good"] == 0.25
    assert row(KILLED.name, VLLM, completed=0, request_goodput=None)["good"] == 0.0


def test_targets_compare_with_the_bare_server() -> None:
    rows = [
        row(AT_ONCE.name, VLLM),
        row(AT_ONCE.name, ONE.name, output_throughput=89.0),
        row(OVERLOAD.name, VLLM, request_goodput=1.0),
        row(OVERLOAD.name, ONE.name, request_goodput=2.0),
        row(REUSED.name, VLLM),
        row(REUSED.name, ONE.name, median_ttft_ms=56.0),
        row(KILLED.name, TWO.name),
        row(KILLED.name, RANKS.name, failed=1, moved_after_s=2.9),
    ]
    slow_handoff = Handoff(gap=26.0, step=10.0, tcp=10.0)
    met = [each.met for each in targets(rows, slow_handoff)]
    assert met == [False, True, False, True, False, True, False]
    assert targets([], Handoff(gap=25.0, step=10.0, tcp=10.0))[-1].met
    assert [each.met for each in targets([], None)] == [None] * 7


def test_every_load_is_for_systems_that_there_are(tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("systems")
    known = set(starts(folder, "float32", folder, folder))
    assert all(load.systems <= known for load in LOADS)
    assert LOADS[-1] is KILLED  # a server that was killed answers no other load
    assert list(folder.iterdir()) == []


@pytest.fixture
def handed_over() -> Iterator[str]:
    """A server that pauses behind the first token."""
    go_on = threading.Event()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            self.send_response(200)
            self.send_header("x-kvmesh-placement", self.headers["x-kvmesh-placement"])
            self.end_headers()
            for token in range(16):
                self.wfile.write(EVENT % token)
                self.wfile.flush()
                if token == 0:
                    go_on.wait(0.05)
            self.wfile.write(b"data: [DONE]\n\n")

        def log_message(self, *_words: object) -> None: ...

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def test_the_first_gap_of_a_stream_is_the_handoff(handed_over: str) -> None:
    found = measure(handed_over, num_tokens=3, num_bytes=1 << 20, count=3, seed=0)
    assert found.gap >= 45
    assert found.step < found.gap
    assert 0 < found.tcp < found.gap


class Stack:
    """A gateway's metrics, and a process of it that computes."""

    def __init__(self) -> None:
        self.texts = ["# TYPE kvmesh_gateway_moves counter\n"]

    def __enter__(self) -> Stack:
        stack = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self.send_response(200)
                self.end_headers()
                texts = stack.texts
                self.wfile.write((texts.pop(0) if len(texts) > 1 else texts[0]).encode())

            def log_message(self, *_words: object) -> None: ...

        self._server = HTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever)
        self._thread.start()
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        return self

    def __exit__(self, *_error: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def test_streams_are_moved_when_the_gateway_counts_one(monkeypatch: pytest.MonkeyPatch) -> None:
    killed: list[str] = []
    monkeypatch.setattr(Served, "kill_engine", lambda self: killed.append(self.name))
    with Stack() as stack:
        served = Served("mesh", stack.url, [], "")
        assert moves(stack.url) == 0
        counts = "# TYPE kvmesh_gateway_moves counter\n%s"
        line = 'kvmesh_gateway_moves_total{reason="%s"} 2.0\n'
        stack.texts = [counts % "", counts % "", counts % (line % "lost" + line % "late")]
        taken = served.moved_after_s()
        assert taken is not None
        assert 0 < taken < 5
        assert moves(stack.url) == 4
        stack.texts = ["vllm:something 3\n"]
        assert served.moved_after_s() is None, "it does not count them"
    assert killed == ["mesh", "mesh"]


def test_bytes_over_tcp_take_time() -> None:
    assert tcp_ms(64 << 20, 3) > tcp_ms(1 << 16, 3)
