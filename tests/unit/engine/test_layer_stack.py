"""Layers in one call, and what that call leaves to the layers one by one."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kvmesh.engine.attention import SelfAttention
from kvmesh.engine.config import Rotation
from kvmesh.engine.kv_plan import KvPlace
from kvmesh.engine.layer_stack import LayerStack, stacked
from kvmesh.engine.layers import GatedMlp, Layer, MixerLayer, Step, StepMemory
from kvmesh.kernels import host
from kvmesh.kernels.dispatch import HostAttention
from kvmesh.kernels.heads import HeadSpec, RopeRows
from kvmesh.kernels.host_layer import LayersCall
from kvmesh.kernels.layer_ops import silu_and_mul
from kvmesh.kernels.linear import Linear, make_linear
from kvmesh.kernels.plan import RaggedBatch
from tests.native import needs_host_library

HIDDEN, INNER, HEADS, KV_HEADS, DIM, BLOCK_SIZE = 128, 192, 4, 2, 32, 16
pytestmark = needs_host_library


def linear(outputs: int, inputs: int) -> Linear:
    made = make_linear(torch.randn(outputs, inputs) / inputs**0.5)
    if not made.panels:
        pytest.skip("weights are not read in panels here")
    return made


def layer(
    slot: int, *, group: int = 0, rotation: Rotation = Rotation.USUAL, scaled: bool = False
) -> MixerLayer:
    mixer = SelfAttention(
        linear((HEADS + 2 * KV_HEADS) * DIM, HIDDEN),
        linear(HIDDEN, HEADS * DIM),
        HeadSpec(DIM**-0.5),
        KvPlace(group, slot),
        DIM,
        rotation,
        has_factors=scaled,
    )
    mlp = GatedMlp(linear(2 * INNER, HIDDEN), linear(HIDDEN, INNER), silu_and_mul)
    return MixerLayer(torch.rand(HIDDEN), mixer, torch.rand(HIDDEN), mlp, 1e-5)


def made_step(rows: list[int], slots: int, seed: int) -> Step:
    """Sequences that compute so many positions each, of forty."""
    lens = [40] * len(rows)
    tables = [[3 * index, 3 * index + 1, 3 * index + 2] for index in range(len(rows))]
    starts = [sum(rows[:index]) for index in range(len(rows) + 1)]
    batch = RaggedBatch(starts, lens, tables, rows.count(1), BLOCK_SIZE)
    generator = torch.Generator().manual_seed(seed)
    shape = (3 * len(rows), slots, 2, BLOCK_SIZE, KV_HEADS, DIM)
    kv = torch.randn(shape, generator=generator)
    cos, sin = (torch.rand(sum(rows), 1, DIM, generator=generator) for _ in range(2))
    return Step(
        StepMemory(attention=(HostAttention(batch, kv),)), {Rotation.USUAL: RopeRows(cos, sin)}
    )


def run_all(
    layers: tuple[Layer, ...], x: Tensor, step: Step, keep: Tensor | None
) -> tuple[Tensor, Tensor]:
    delta: Tensor | None = None
    for each in layers:
        x, delta = each.run(x, delta, step, keep if each is layers[-1] else None)
    assert delta is not None
    return x, delta


def test_neighbours_that_read_the_same_are_one() -> None:
    local = layer(1, rotation=Rotation.LOCAL)
    scaled = layer(0, scaled=True)
    layers: list[Layer] = [layer(0), layer(1), local, layer(2), scaled, layer(3, group=1)]
    found = stacked(layers)
    sizes = [len(each.layers) if isinstance(each, LayerStack) else 0 for each in found]
    assert sizes == [2, 1, 1, 0, 1]
    assert found[3] is scaled
    flat = [each.layers if isinstance(each, LayerStack) else (each,) for each in found]
    assert [one for each in flat for one in each] == layers


@pytest.mark.parametrize("keep", [None, [2, 0]], ids=["all rows", "two rows"])
@pytest.mark.parametrize("num_layers", [1, 3])
def test_a_stack_gives_what_its_layers_give(
    num_layers: int, keep: list[int] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts: list[int] = []
    run = LayersCall.run

    def counted(self: LayersCall, count: int, *rest: object) -> Tensor:
        counts.append(count)
        return run(self, count, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(LayersCall, "run", counted)
    layers = tuple(layer(slot) for slot in range(num_layers))
    (stack,) = stacked(layers)
    kept = None if keep is None else torch.tensor(keep)
    # Decode rows, a prompt's chunk beside them, and more rows than one call takes.
    most = host.most_rows(torch.float32)
    for rows, in_one in (([1, 1, 1], True), ([1, 1, 5], False), ([1] * (most + 1), False)):
        x = torch.randn(sum(rows), HIDDEN)
        expected = run_all(layers, x.clone(), made_step(rows, num_layers, seed=4), kept)
        found = stack.run(x.clone(), None, made_step(rows, num_layers, seed=4), kept)
        for one, other in zip(found, expected, strict=True):
            assert torch.equal(one, other)
        by_call = num_layers - (keep is not None) if in_one else 0
        assert counts == ([by_call] if by_call else [])
        counts.clear()
