from __future__ import annotations

import pytest

from kvmesh.core.types import Endpoint, KvLayout, Reservation, SamplingParams, WorkerId


@pytest.mark.parametrize(
    ("dtype", "size"), [("float32", 4), ("float16", 2), ("bfloat16", 2), ("float8_e5m2", 1)]
)
def test_a_block_holds_keys_and_values_of_all_layers(dtype: str, size: int) -> None:
    layout = KvLayout("m", dtype, block_size=16, num_layers=3, num_kv_heads=2, head_dim=8)
    assert layout.block_bytes == 3 * 2 * 16 * 2 * 8 * size


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(presence_penalty=0.1),
        SamplingParams(frequency_penalty=-0.1),
        SamplingParams(repetition_penalty=1.1),
    ],
)
def test_each_penalty_counts(params: SamplingParams) -> None:
    assert params.has_penalties
    assert not SamplingParams().has_penalties


def test_a_printed_reservation_keeps_its_secret() -> None:
    endpoint = Endpoint("h", 4)
    reservation = Reservation(1, WorkerId("w"), 2, 3, b"hunter2", endpoint, 5, 6, 7)
    assert "hunter2" not in repr(reservation)
    assert str(endpoint) == "h:4"
