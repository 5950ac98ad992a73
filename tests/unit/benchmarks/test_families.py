from __future__ import annotations

from benchmarks.families import targets
from benchmarks.random_families import FAMILIES, LAYERS


def test_a_family_counts_by_its_slowest_cell() -> None:
    rows = [
        {"family": "qwen2", "ratio": 2.0},
        {"family": "qwen3", "ratio": 1.3},
        {"family": "qwen2", "ratio": 1.1},
    ]
    assert [(target.value, target.met) for target in targets(rows)] == [(1.1, False), (1.3, True)]


def test_hybrids_have_layers_of_both_kinds() -> None:
    kinds = [values["layer_types"] for _, values in FAMILIES.values() if "layer_types" in values]
    assert len(kinds) >= 6
    assert all(len(types) == LAYERS and len(set(types)) == 2 for types in kinds)
