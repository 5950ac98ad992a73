from __future__ import annotations

import torch

from kvmesh.engine.config import RopeConfig
from kvmesh.engine.rope import inverse_frequencies, resting_table, rope_table
from kvmesh.kernels import reference


def test_llama3_keeps_short_waves_and_stretches_long_ones() -> None:
    plain = inverse_frequencies(RopeConfig(10000.0), 64)
    scaled = inverse_frequencies(RopeConfig(10000.0, "llama3", 8.0, 1.0, 4.0, 256), 64)
    wavelengths = 2 * torch.pi / plain
    short, long = wavelengths < 256 / 4, wavelengths > 256
    torch.testing.assert_close(scaled[short], plain[short])
    torch.testing.assert_close(scaled[long], plain[long] / 8)
    between = ~short & ~long
    assert between.any()
    assert (scaled[between] < plain[between]).all()
    assert (scaled[between] > plain[between] / 8).all()


def test_dynamic_is_the_default_one_within_the_context() -> None:
    found = inverse_frequencies(RopeConfig(10000.0, "dynamic"), 16)
    torch.testing.assert_close(found, inverse_frequencies(RopeConfig(10000.0), 16))


def test_linear_divides_all() -> None:
    plain = inverse_frequencies(RopeConfig(10000.0), 16)
    torch.testing.assert_close(
        inverse_frequencies(RopeConfig(10000.0, "linear", 4.0), 16), plain / 4
    )


def test_proportional_turns_the_fastest_pairs_of_a_whole_head() -> None:
    plain = inverse_frequencies(RopeConfig(10000.0), 16)
    found = inverse_frequencies(RopeConfig(10000.0, "proportional", 2.0, share=0.3), 16)
    # 0.3 * 16 // 2
    torch.testing.assert_close(found[:2], plain[:2] / 2)
    assert found[2:].tolist() == [0.0] * 6


def test_table_holds_angles_of_positions() -> None:
    table = rope_table(RopeConfig(100.0), 4, 50, torch.float32, "cpu")
    assert table.cos.shape == (50, 1, 4)
    angle = torch.tensor(49 * 100.0**-0.5)
    torch.testing.assert_close(table.cos[49, 0, 1], angle.cos())
    torch.testing.assert_close(table.signed_sin[49, 0, 1], -angle.sin())
    torch.testing.assert_close(table.signed_sin[49, 0, 3], angle.sin())


def test_yarn_keeps_short_waves_stretches_long_ones_and_scales_the_table() -> None:
    rope = RopeConfig(1000.0, "yarn", 16.0, original_max_positions=256, truncate=False, scale=1.25)
    plain = inverse_frequencies(RopeConfig(1000.0), 64)
    scaled = inverse_frequencies(rope, 64)
    turns = 256 * plain / (2 * torch.pi)
    often, seldom = turns > rope.beta_fast, turns < rope.beta_slow
    assert often.any()
    assert seldom.any()
    torch.testing.assert_close(scaled[often], plain[often])
    torch.testing.assert_close(scaled[seldom], plain[seldom] / 16)
    table = rope_table(rope, 64, 8, torch.float32, "cpu")
    assert table.cos[0].flatten().tolist() == [1.25] * 64


def test_longrope_divides_each_frequency_and_scales_the_table() -> None:
    factors = (1.0, 2.0, 4.0, 8.0)
    rope = RopeConfig(1000.0, "longrope", scale=1.25, pair_factors=factors)
    plain = inverse_frequencies(RopeConfig(1000.0), 8)
    torch.testing.assert_close(inverse_frequencies(rope, 8), plain / torch.tensor(factors))
    table = rope_table(rope, 8, 8, torch.float32, "cpu")
    assert table.cos[0].flatten().tolist() == [1.25] * 8


def test_a_resting_table_leaves_all_positions_as_they_are() -> None:
    rows = resting_table(8, torch.bfloat16, "cpu").rows(torch.tensor([0, 7, 900_000]))
    x = torch.randn(3, 2, 8, generator=torch.Generator().manual_seed(1)).bfloat16()
    assert torch.equal(reference.apply_rope(x, rows.cos, rows.signed_sin), x)
