from __future__ import annotations

import json

from services.gateway.openapi import openapi_page


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
