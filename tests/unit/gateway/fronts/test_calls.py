from __future__ import annotations

import json

import pytest

from kvmesh.core.errors import InvalidRequestError
from services.gateway.fronts.calls import parse_json

BODY = {"prompt": "ü \N{GRINNING FACE}", "n": 1}


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16-le", "utf-16", "utf-32"])
@pytest.mark.parametrize("ensure_ascii", [False, True])
def test_json_is_read_in_each_of_its_encodings(encoding: str, ensure_ascii: bool) -> None:
    text = json.dumps(BODY, ensure_ascii=ensure_ascii)
    assert parse_json(text.encode(encoding)) == BODY
    assert parse_json(f" {text}".encode(encoding)) == BODY


@pytest.mark.parametrize("encoding", ["utf-8", "utf-16-le", "utf-16", "utf-32"])
@pytest.mark.parametrize("body", ['{"a": "\ud800"}', ' {"a": "\ud800"}', '{"\udfff": 1}'])
@pytest.mark.parametrize("escaped", [False, True])
def test_half_a_character_is_no_text_however_it_is_written(
    encoding: str, body: str, escaped: bool
) -> None:
    text = json.dumps(json.loads(body), ensure_ascii=escaped)
    with pytest.raises(InvalidRequestError) as bad:
        parse_json(text.encode(encoding, "surrogatepass"))
    assert bad.value.code == "bad_json"


@pytest.mark.parametrize("raw", [b"", b"{", b'{"a":' * 5000, b'{"a": "\xff"}', b"{}\0"])
def test_what_is_no_json_is_said_to_be_none(raw: bytes) -> None:
    with pytest.raises(InvalidRequestError):
        parse_json(raw)
