"""Reads the head of a plain completion request for the fast path; aiohttp reads all other requests.

This reader never reports an error. It returns None for every request that is not exactly as most
clients send it (one length, no transfer coding, no unusual byte, no repeated header).
Pure. Tests: tests/unit/gateway/fronts/test_http_head.py.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from itertools import chain

from kvmesh.core.values import quick
from services.gateway.api.openai import Endpoint
from services.gateway.fronts.calls import PATHS

MAX_HEAD_BYTES = 8192
MAX_HEADERS = 64
"""Maximum number of headers.

It is below aiohttp's limit, so aiohttp refuses requests with too many.
"""

_REQUEST_LINES = {f"POST {path} HTTP/1.1".encode(): end for path, end in PATHS.items()}
_HEADER = re.compile(r"([!#-'*+\-.^_`|~0-9A-Za-z]+):([\t -~]*)\r\n")
_LENGTH = re.compile(r"[0-9]{1,12}")

_NOT_PLAIN = frozenset(
    {"transfer-encoding", "content-encoding", "expect", "upgrade", "trailer", "http2-settings"}
)


@quick
@dataclass(frozen=True, slots=True)
class PlainHead:
    """A plain request's head.

    Attributes:
        headers: by name in lower case.
        num_bytes: length of the head itself, including its empty line.
        num_body_bytes: length of the body that follows.
    """

    endpoint: Endpoint
    headers: dict[str, str]
    num_bytes: int
    num_body_bytes: int


def plain_head(data: bytes | bytearray) -> PlainHead | None:
    """Parses the head at the start of `data`; None if it is not plain, or not complete yet."""
    end = data.find(b"\r\n\r\n", 0, MAX_HEAD_BYTES)
    line_end = data.find(b"\r\n", 0, end + 2)
    if end < 0:
        return None
    endpoint = _REQUEST_LINES.get(bytes(data[:line_end]))
    if endpoint is None:
        return None
    lines = data[line_end + 2 : end + 2].decode("latin-1")
    found = _HEADER.findall(lines)
    # The headers found, with colons and line ends, must fill the whole head.
    if sum(map(len, chain.from_iterable(found))) + 3 * len(found) != len(lines):
        return None
    headers = {name.lower(): value.strip() for name, value in found}
    length = headers.get("content-length", "")
    if (
        len(headers) != len(found)
        or len(found) > MAX_HEADERS
        or not _NOT_PLAIN.isdisjoint(headers)
        or headers.get("connection", "keep-alive").lower() != "keep-alive"
        or "host" not in headers
        or not _LENGTH.fullmatch(length)
    ):
        return None
    return PlainHead(endpoint, headers, end + 4, int(length))
