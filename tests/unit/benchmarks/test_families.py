from __future__ import annotations

from benchmarks.families import targets
from benchmarks.random_families import FAMILIES, LAYERS


def test_a_family_counts_by_its_slowest_cell() -> None:
    rows = [
        {"family": "qwen2", "ratio": 2.0, "same token": None},
        {"family": "qwen3", "ratio": 1.3, "same token": None},
        {"family": "qwen2", "ratio": 1.1, "same token": None},
    ]
    assert [(target.value, target.met) for target in targets(rows)] == [(1.1, False), (1.3, True)]


def test_other_tokens_than_those_of_transformers_miss_a_target() -> None:
    rows = [{"family": "qwen2", "ratio": 2.0, "same token": same} for same in (True, None, False)]
    assert [(target.value, target.met) for target in targets(rows)] == [(2.0, True), (1, False)]
    assert targets(rows[:2])[-1].met


def test_hybrids_have_layers_of_both_kinds() -> None:
    # Granite 4 wants its layers named even where all are of one kind.
    others = [values for label, (_, values) in FAMILIES.items() if label != "granite4"]
    kinds = [values["layer_types"] for values in others if "layer_types" in values]
    assert len(kinds) >= 6
    assert all(len(types) == LAYERS and len(set(types)) >= 2 for types in kinds)
