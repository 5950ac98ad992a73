"""References within a schema are followed where their target is certain."""

from __future__ import annotations

from typing import Any

import pytest

from kvmesh.engine.schema_refs import References

ITEM = {"type": "null"}
ROOT: dict[str, Any] = {"$id": "root", "$defs": {"a/b~": {"allOf": [True, ITEM]}}, "": 1}


@pytest.mark.parametrize(
    ("ref", "target"),
    [("#", ROOT), ("#/", 1), ("#/$defs/a~1b~0/allOf/1", ITEM), ("#/$defs/a~1b~0/allOf/0", True)],
)
def test_pointers_within_the_document_are_followed(ref: str, target: Any) -> None:
    assert References(ROOT).target(ref) == (True, target)


@pytest.mark.parametrize(
    "ref",
    [
        *("#/$defs/c", "#/$defs/a~1b~0/allOf/2", "#/$defs/a~1b~0/allOf/01", "#/$id/0"),
        *("#anchor", "root#/$defs", "#/%24defs", "", 7, None, ["#"]),
    ],
)
def test_all_others_are_not(ref: Any) -> None:
    assert References(ROOT).target(ref) == (False, None)


@pytest.mark.parametrize("part", [{"$id": "x"}, {"items": [{"id": "x"}]}])
def test_a_part_with_an_id_has_references_of_its_own(part: Any) -> None:
    assert References({"$defs": {"part": part}}).target("#") == (False, None)


@pytest.mark.parametrize("part", [{"properties": {"$id": ITEM, "id": ITEM}}, {"id": 7}])
def test_properties_named_id_are_no_ids(part: Any) -> None:
    root = {"$defs": {"part": part}}
    assert References(root).target("#/$defs/part") == (True, part)
