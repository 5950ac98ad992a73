from __future__ import annotations

from dataclasses import replace

import pytest

from kvmesh.core.kv_groups import KvGroups
from kvmesh.engine.config import HeadShape, LatentConfig, LinearConfig, ModelConfig, RopeConfig
from kvmesh.engine.kv_plan import KvPlace, kv_layout, plan_kv

DENSE = ModelConfig(
    family="x",
    vocab_size=8,
    hidden_size=64,
    intermediate_size=64,
    num_layers=6,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    rms_norm_eps=1e-6,
    rope=RopeConfig(1e4),
    max_position_embeddings=64,
    tie_word_embeddings=True,
    qkv_bias=False,
    output_bias=False,
    qk_norm=False,
    dtype="float32",
    eos_token_ids=frozenset(),
    attention_scale=1.0,
    windows=(0,) * 6,
)
LINEAR = LinearConfig(
    layers=frozenset({0, 1, 2, 4}),
    num_key_heads=2,
    num_value_heads=4,
    key_dim=16,
    value_dim=16,
    conv_kernel=4,
)


def test_a_model_of_one_kind_is_one_group_with_all_layers() -> None:
    plan = plan_kv(DENSE, "float32", 16)
    assert plan.groups == KvGroups()
    assert plan.places == tuple(KvPlace(0, layer) for layer in range(6))
    layout = kv_layout(DENSE, plan, dtype="float32", fingerprint="f")
    assert (layout.num_layers, layout.block_size) == (6, 16)


def test_groups_have_as_many_layers_as_the_rarest_kind() -> None:
    config = replace(DENSE, windows=(8, 8, 0, 8, 8, 8))
    plan = plan_kv(config, "float32", 16)
    assert plan.groups == KvGroups((0, 8, 8, 8, 8, 8))
    assert plan.block_layers == 1
    assert [place.group for place in plan.places] == [1, 2, 0, 3, 4, 5]
    halves = plan_kv(replace(DENSE, windows=(8, 0) * 3), "float32", 16)
    assert halves.groups == KvGroups((0, 8))
    assert [(place.group, place.slot) for place in halves.places] == [
        (1, 0),
        (0, 0),
        (1, 1),
        (0, 1),
        (1, 2),
        (0, 2),
    ]


@pytest.mark.parametrize(
    ("dtype", "asked", "block_size", "per_block"),
    [("float32", 16, 16, 1), ("float32", 64, 64, 5), ("float32", 8, 16, 1), ("float16", 8, 24, 1)],
)
def test_blocks_hold_whole_states(dtype: str, asked: int, block_size: int, per_block: int) -> None:
    # One state is (4 * 16 * 16 + 3 * 128) * 4 = 5632 bytes; an fp32 position of 2 layers 512.
    plan = plan_kv(replace(DENSE, linear=LINEAR), dtype, asked)
    assert (plan.block_size, plan.states_per_block) == (block_size, per_block)
    assert plan.groups == KvGroups((0,), -(-4 // plan.states_per_block))
    assert plan.places[3] == KvPlace(0, 0)
    assert plan.places[5] == KvPlace(0, 1)
    places = [plan.places[layer] for layer in (0, 1, 2, 4)]
    assert len({(place.group, place.slot) for place in places}) == 4
    assert max(place.slot for place in places) < plan.states_per_block


def test_a_latent_block_has_the_bytes_of_its_positions() -> None:
    latent = LatentConfig(0, rank=32, rope_dim=8, nope_dim=16, value_dim=16, interleaved=True)
    config = replace(DENSE, latent=latent)
    plan = plan_kv(config, "bfloat16", 16)
    layout = kv_layout(config, plan, dtype="bfloat16", fingerprint="f")
    assert layout.block_bytes == 6 * 16 * 40 * 2


@pytest.mark.parametrize(
    ("num_layers", "heads", "kv_heads", "full", "windowed_layers", "full_layers", "groups"),
    [
        # Those of Gemma 4 E2B behind whose last layers are readers, of 31B, and of 26B.
        (15, 256, 1, HeadShape(1, 512), 6, 3, (0, 8, 8)),
        (60, 256, 16, HeadShape(4, 512), 5, 10, (0,) + (8,) * 10),
        (30, 256, 8, HeadShape(2, 512), 3, 6, (0,) + (8,) * 9),
    ],
)
def test_blocks_have_more_of_the_layers_that_keep_less(
    num_layers: int,
    heads: int,
    kv_heads: int,
    full: HeadShape,
    windowed_layers: int,
    full_layers: int,
    groups: tuple[int, ...],
) -> None:
    each = 5 if num_layers == 15 else 6
    config = replace(
        DENSE,
        num_layers=num_layers,
        head_dim=heads,
        num_kv_heads=kv_heads,
        windows=tuple(8 if (layer + 1) % each else 0 for layer in range(num_layers)),
        full_heads=full,
    )
    plan = plan_kv(config, "bfloat16", 16)
    assert plan.groups == KvGroups(groups)
    assert plan.block_layers == windowed_layers
    assert plan.heads == (full,) + (HeadShape(kv_heads, heads),) * (len(groups) - 1)
    layout = kv_layout(config, plan, dtype="bfloat16", fingerprint="f")
    assert layout.block_bytes == full_layers * full.values * 16 * 2
    places = {(place.group, place.slot) for place in plan.places}
    assert len(places) == num_layers
    slots = {group: full_layers if group == 0 else windowed_layers for group in range(len(groups))}
    assert all(slot < slots[group] for group, slot in places)


def test_a_layer_that_reads_anothers_is_where_that_one_is() -> None:
    config = replace(DENSE, windows=(8, 0) * 3, kv_sources=(0, 1, 2, 3, 2, 3))
    plan = plan_kv(config, "float32", 16)
    assert plan.block_layers == 2
    assert plan.places[4:] == plan.places[2:4]
    assert len(set(plan.places)) == 4


def test_a_layer_that_mixes_nothing_keeps_nothing() -> None:
    config = replace(DENSE, linear=LINEAR, mlp_only=frozenset({3}))
    plan = plan_kv(config, "float32", 16)
    assert (plan.groups.windows, plan.block_layers) == ((0,), 1)
    assert plan.places[5] == KvPlace(0, 0)
