from __future__ import annotations

import json
from typing import Any

from services.gateway.fronts.openapi import BODIES, LOAD, UNLOAD, openapi_page


def test_every_reference_has_a_schema() -> None:
    page = openapi_page("1.2.3")
    text = json.dumps(page)
    names = {part.partition('"')[0] for part in text.split("#/components/schemas/")[1:]}
    assert {"ChatBody", "CompletionBody", "ResponsesBody", "Error"} <= names
    assert names <= set(page["components"]["schemas"])
    assert page["info"]["version"] == "1.2.3"


def test_bodies_say_what_is_allowed() -> None:
    schemas = openapi_page("1")["components"]["schemas"]
    temperature = schemas["ChatBody"]["properties"]["temperature"]["anyOf"][0]
    assert (temperature["minimum"], temperature["maximum"]) == (0, 2)
    assert schemas["ChatBody"]["required"] == ["messages"]
    assert "return_tokens_as_token_ids" in schemas["CompletionBody"]["properties"]


def test_routes_that_want_a_key_say_so() -> None:
    paths = openapi_page("1")["paths"]
    wanting = {path for path, verbs in paths.items() if "401" in _responses(verbs)}
    assert wanting == {*BODIES, "/v1/models", "/tokenizer_info"}


def test_routes_for_adapters_are_there_where_they_are_open() -> None:
    closed, open_ = openapi_page("1"), openapi_page("1", adapter_changes=True)
    assert set(open_["paths"]) - set(closed["paths"]) == {LOAD, UNLOAD}
    assert set(open_["components"]["schemas"]["LoadBody"]["required"]) == {"lora_name", "lora_path"}
    assert list(_responses(open_["paths"][LOAD])["200"]["content"]) == ["text/plain"]


def _responses(verbs: dict[str, Any]) -> dict[str, Any]:
    (verb,) = verbs.values()
    responses: dict[str, Any] = verb["responses"]
    return responses
