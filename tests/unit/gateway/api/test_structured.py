from __future__ import annotations

from typing import Any

import pytest

from kvmesh.core.errors import InvalidRequestError
from services.gateway.api.structured import json_schema


def test_a_schema_that_is_nested_too_deep_is_the_callers_error() -> None:
    schema: dict[str, Any] = {}
    for _ in range(10_000):
        schema = {"items": schema}
    with pytest.raises(InvalidRequestError, match="too deep"):
        json_schema(schema)
