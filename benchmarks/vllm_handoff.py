"""The time from a first token to the second one where KV is handed over between them.

It may take one and a half times what its bytes take over loopback TCP, and a step of decode.
"""

from __future__ import annotations

import itertools
import json
import random
import socket
import statistics
import threading
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass

from benchmarks.bench_process import HOST
from benchmarks.vllm_systems import SERVED

TIMES_TCP = 1.5
_NEW_TOKENS = 16
_VOCAB = 4000
_BUFFER = 4 << 20


@dataclass(frozen=True, slots=True)
class Handoff:
    """Medians in milliseconds.

    Attributes:
        gap: first to second token.
        step: between later tokens.
        tcp: as many bytes as all of the prompt's KV over loopback TCP.
    """

    gap: float
    step: float
    tcp: float

    @property
    def bound(self) -> float:
        """What the gap may be."""
        return TIMES_TCP * self.tcp + self.step


def measure(url: str, num_tokens: int, num_bytes: int, count: int, seed: int) -> Handoff:
    """Streams answers to prompts one after the other, each handed over from prefill to decode.

    Args:
        num_tokens: of a prompt.
        num_bytes: of its KV.
        count: prompts; two more come first, which are not counted.

    Raises:
        ValueError: an answer was not handed over, or its tokens came together.
    """
    draw = random.Random(seed)
    gaps, steps = [], []
    for number in range(count + 2):
        prompt = [draw.randrange(5, _VOCAB) for _ in range(num_tokens)]
        times = list(_token_times(url, prompt))
        if len(times) != _NEW_TOKENS:
            raise ValueError(f"{len(times)} events for {_NEW_TOKENS} tokens")
        between = [(b - a) * 1e3 for a, b in itertools.pairwise(times)]
        if number >= 2:
            gaps.append(between[0])
            steps += between[1:]
    return Handoff(statistics.median(gaps), statistics.median(steps), tcp_ms(num_bytes, count))


def _token_times(url: str, prompt: list[int]) -> Iterator[float]:
    body = {
        "model": SERVED,
        "prompt": prompt,
        "max_tokens": _NEW_TOKENS,
        "ignore_eos": True,
        "temperature": 0,
        "stream": True,
        "return_token_ids": True,
    }
    headers = {"Content-Type": "application/json", "x-kvmesh-placement": "disaggregated"}
    request = urllib.request.Request(
        f"{url}/v1/completions", json.dumps(body).encode(), headers, method="POST"
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        if answer.headers["x-kvmesh-placement"] != "disaggregated":
            raise ValueError(f"it was {answer.headers['x-kvmesh-placement']}")
        for line in answer:
            now = time.monotonic()
            if line.startswith(b"data: {"):
                for choice in json.loads(line[6:])["choices"]:
                    yield from [now] * len(choice.get("token_ids") or ())


def tcp_ms(num_bytes: int, count: int) -> float:
    """Milliseconds for so many bytes over loopback and one byte back; the median."""
    with socket.create_server((HOST, 0)) as server:
        receiver = threading.Thread(target=_receive, args=(server, num_bytes), daemon=True)
        receiver.start()
        data = memoryview(bytearray(num_bytes))
        found = []
        with socket.create_connection(server.getsockname()) as sender:
            for _ in range(count + 2):
                started = time.monotonic()
                sender.sendall(data)
                sender.recv(1)
                found.append((time.monotonic() - started) * 1e3)
        receiver.join()
    return statistics.median(found[2:])


def _receive(server: socket.socket, num_bytes: int) -> None:
    connection, _ = server.accept()
    taken = memoryview(bytearray(num_bytes))
    with connection:
        while True:
            left = num_bytes
            while left:
                got = connection.recv_into(taken[num_bytes - left :], min(left, _BUFFER))
                if not got:
                    return
                left -= got
            connection.sendall(b"1")
