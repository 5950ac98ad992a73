from __future__ import annotations

from typing import Any

import pytest

from kvmesh.core.errors import InvalidRequestError
from services.gateway.api.structured import check_structure, json_schema


@pytest.mark.parametrize("depth", [200, 2_000, 10_000, 200_000])
def test_a_schema_that_is_nested_too_deep_is_the_callers_error(depth: int) -> None:
    """Either `json.dumps` refuses it or the grammar compiler; newer Pythons write more levels."""
    schema: dict[str, Any] = {}
    for _ in range(depth):
        schema = {"items": schema}
    with pytest.raises(InvalidRequestError, match=r"too deep|recursion limit"):
        check_structure(json_schema(schema), "response_format")
