"""Runs of layers as one: on the CPU one native call computes all of them for a few rows.

Tests: tests/unit/engine/test_layer_stack.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby

from torch import Tensor

from kvmesh.engine.config import Rotation
from kvmesh.engine.layers import CallableMixer, GatedMlp, Layer, MixerLayer, Step
from kvmesh.kernels.host_layer import LayerParts, LayersCall, takes


@dataclass(frozen=True, slots=True)
class _Callable:
    """A layer that a native call can compute, with the data of that call."""

    layer: MixerLayer
    mixer: CallableMixer
    parts: LayerParts


class LayerStack:
    """Layers for one native call, whose mixers share rows and rope.

    Args:
        layers: at least one layer.
    """

    def __init__(self, layers: Sequence[_Callable]) -> None:
        self.layers = tuple(each.layer for each in layers)
        self._mixer = layers[0].mixer
        self._call = LayersCall([each.parts for each in layers])

    def run(
        self, x: Tensor, delta: Tensor | None, step: Step, keep: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """See `Layer.run`; `keep` applies to the last layer."""
        rest = self.layers
        rows = self._mixer.decode_rows(step) if takes(x) else None
        if rows is not None:
            count = len(rest) - (keep is not None)
            if count:
                delta = self._call.run(count, x, delta, rows, self._mixer.rope(step))
            rest = rest[count:]
        for layer in rest:
            x, delta = layer.run(x, delta, step, keep if layer is rest[-1] else None)
        assert delta is not None, "there is a layer"
        return x, delta


def stacked(layers: Iterable[Layer]) -> tuple[Layer, ...]:
    """Returns the layers; runs that one native call can compute become a `LayerStack`."""
    found: list[Layer] = []
    pairs = ((layer, _callable(layer)) for layer in layers)
    for reads, run in groupby(pairs, key=_reads):
        members = list(run)
        if reads is None:
            found += [layer for layer, _ in members]
        else:
            found.append(LayerStack([made for _, made in members if made is not None]))
    return tuple(found)


def _callable(layer: Layer) -> _Callable | None:
    if not isinstance(layer, MixerLayer):
        return None
    mixer, mlp = layer.mixer, layer.mlp
    if not isinstance(mixer, CallableMixer) or not isinstance(mlp, GatedMlp):
        return None
    if mixer.call is None or mlp.call is None:
        return None
    parts = LayerParts(mixer.call, mlp.call, layer.input_norm, layer.post_norm, layer.eps)
    return _Callable(layer, mixer, parts)


def _reads(pair: tuple[Layer, _Callable | None]) -> tuple[int, Rotation] | None:
    made = pair[1]
    return None if made is None else made.mixer.reads
