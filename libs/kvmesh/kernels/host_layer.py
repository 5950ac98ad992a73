"""`layer.h` on torch tensors: layers, half a layer, or the head, in one call for a few rows.

The results equal those of separate calls bit for bit. A step of one row has hundreds of such calls,
and each costs as much to call as to run. Weights are passed as structures that are created once.
Tests: tests/unit/kernels/test_host_layer.py.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Self

import torch
from torch import Tensor

from kvmesh.kernels import host
from kvmesh.kernels.heads import HeadSpec, RopeRows
from kvmesh.kernels.linear import Linear

_P, _I, _F = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float


class _AttentionParts(ctypes.Structure):
    _fields_: ClassVar[Sequence[tuple[str, type]]] = [
        *((name, _P) for name in ("qkv", "qkv_bias", "output", "output_bias", "qk_norm", "sinks")),
        *((name, _I) for name in ("hidden", "heads", "window")),
        *((name, _F) for name in ("norm_eps", "scale", "cap")),
    ]


class _MlpParts(ctypes.Structure):
    _fields_: ClassVar[Sequence[tuple[str, type]]] = [
        *((name, _P) for name in ("gate_up", "gate_up_bias", "down", "down_bias")),
        *((name, _I) for name in ("hidden", "inner")),
    ]


class _DecodeRows(ctypes.Structure):
    _fields_: ClassVar[Sequence[tuple[str, type]]] = [
        *((name, _P) for name in ("slots", "tables", "lens")),
        *((name, _I) for name in ("rows", "table_stride", "dim", "layer_stride")),
        *((name, _I) for name in ("block_stride", "value_offset", "block_size", "kv_heads")),
    ]


class _LayerParts(ctypes.Structure):
    _fields_: ClassVar[Sequence[tuple[str, type]]] = [
        ("attention", _AttentionParts),
        ("mlp", _MlpParts),
        *((name, _P) for name in ("input_norm", "post_norm")),
        ("eps", _F),
        ("place", _I),
    ]


class _HeadParts(ctypes.Structure):
    _fields_: ClassVar[Sequence[tuple[str, type]]] = [
        *((name, _P) for name in ("norm", "head", "head_bias")),
        *((name, _I) for name in ("hidden", "vocab")),
        ("eps", _F),
    ]


def takes(x: Tensor) -> bool:
    """Returns whether these calls support the number of rows of `x`, [rows, hidden]."""
    return 0 < x.shape[0] <= host.most_rows(x.dtype)


class DecodeRows:
    """KV of sequences that compute one position each, during one step.

    Args:
        kv: the pool, which `host.has_attention` and `host.has_rope` accept.
        slots: [rows] int64, slots of the rows' own positions.
        tables: [rows, blocks] int64.
        lens: [rows] int64, number of positions including the row's own.
    """

    def __init__(self, kv: Tensor, slots: Tensor, tables: Tensor, lens: Tensor) -> None:
        self._kept = (kv, slots, tables, lens)
        self._kv = kv.data_ptr()
        self._layer_bytes = kv.stride(1) * kv.element_size()
        rows = (slots.data_ptr(), tables.data_ptr(), lens.data_ptr(), len(slots), tables.shape[1])
        self._rows = _DecodeRows(*rows, kv.shape[5], kv.stride(1), *host.pool_shape(kv))
        self.address = ctypes.addressof(self._rows)

    def kv_of(self, layer: int) -> int:
        """Returns the address of a layer in the pool."""
        return self._kv + layer * self._layer_bytes


class MlpCall:
    """`down(silu_and_mul(gate_up(x)))` in one call."""

    def __init__(self, gate_up: Linear, down: Linear) -> None:
        self._kept = (gate_up, down)
        hidden, inner = down.weight.shape[0], gate_up.weight.shape[0] // 2
        biases = _address(gate_up.bias), _address(down.bias)
        self.parts = _MlpParts(gate_up.panels, biases[0], down.panels, biases[1], hidden, inner)
        self._address = ctypes.addressof(self.parts)

    @classmethod
    def of(cls, gate_up: Linear, down: Linear) -> Self | None:
        """Returns the call; None if the weights lack the panel layout."""
        # Gates and ups must begin at a panel boundary.
        fits = gate_up.weight.shape[0] % (2 * host.PANEL) == 0
        return cls(gate_up, down) if gate_up.panels and down.panels and fits else None

    def run(self, x: Tensor) -> Tensor:
        """Maps contiguous [rows, hidden] to the same shape; only if `takes` accepts `x`."""
        assert x.is_contiguous()
        out = torch.empty_like(x)
        status = host.function_of("gated_mlp", x.dtype)(
            self._address, x.data_ptr(), out.data_ptr(), x.shape[0], torch.get_num_threads()
        )
        assert status == 0, "too many rows"
        return out


class AttentionCall:
    """Attention of decode rows with its projections in one call.

    Args:
        qkv: projection to [(heads + 2 * kv_heads) * head_dim].
        output: projection from [heads * head_dim].
        layer: index of the layer in the pool.
    """

    def __init__(
        self, qkv: Linear, output: Linear, spec: HeadSpec, head_dim: int, layer: int
    ) -> None:
        self._kept = (qkv, output, spec)
        heads = output.weight.shape[1] // head_dim
        self.parts = _AttentionParts(
            *(qkv.panels, _address(qkv.bias), output.panels, _address(output.bias)),
            *(_address(spec.qk_norm), _address(spec.sinks)),
            *(output.weight.shape[0], heads, spec.window),
            *(spec.norm_eps, spec.scale, spec.cap),
        )
        self._address = ctypes.addressof(self.parts)
        self.layer = layer

    @classmethod
    def of(
        cls, qkv: Linear, output: Linear, spec: HeadSpec, head_dim: int, layer: int
    ) -> Self | None:
        """Returns the call; None if the weights lack the panel layout."""
        if not (qkv.panels and output.panels):
            return None
        return cls(qkv, output, spec, head_dim, layer)

    def run(self, x: Tensor, rows: DecodeRows, rope: RopeRows) -> Tensor:
        """Projects rows, rotates their heads, writes their KV, attends, and projects back.

        Args:
            x: [rows, hidden], contiguous; `takes` must accept it.

        Returns:
            [rows, hidden].
        """
        assert x.is_contiguous()
        out = torch.empty_like(x)
        status = host.function_of("attention_layer", x.dtype)(
            self._address,
            rows.address,
            x.data_ptr(),
            rope.cos.data_ptr(),
            rope.signed_sin.data_ptr(),
            rows.kv_of(self.layer),
            out.data_ptr(),
            torch.get_num_threads(),
        )
        assert status == 0, "takes was not asked"
        return out


@dataclass(frozen=True, slots=True)
class LayerParts:
    """Norm, attention, norm and MLP of one layer.

    Attributes:
        input_norm, post_norm: [hidden], norms before attention and before the MLP.
        eps: epsilon of both norms.
    """

    attention: AttentionCall
    mlp: MlpCall
    input_norm: Tensor
    post_norm: Tensor
    eps: float

    def structure(self) -> _LayerParts:
        """Returns the structure that the library reads."""
        norms = self.input_norm.data_ptr(), self.post_norm.data_ptr(), self.eps
        return _LayerParts(self.attention.parts, self.mlp.parts, *norms, self.attention.layer)


class LayersCall:
    """Consecutive layers in one call; their heads have one size.

    Args:
        layers: at least one layer.
    """

    def __init__(self, layers: Sequence[LayerParts]) -> None:
        self._kept = tuple(layers)
        self._layers = (_LayerParts * len(layers))(*(layer.structure() for layer in layers))

    def run(
        self, count: int, x: Tensor, delta: Tensor | None, rows: DecodeRows, rope: RopeRows
    ) -> Tensor:
        """Adds `delta` and the layers' outputs to the stream, except the last MLP's output.

        Args:
            count: number of layers to compute, from the first on; at least one.
            x: [rows, hidden], contiguous, changed in place; `takes` must accept it.
            delta: same shape, contiguous, or None.

        Returns:
            [rows, hidden], the output of the last MLP.
        """
        assert 0 < count <= len(self._kept)
        assert x.is_contiguous()
        assert delta is None or delta.is_contiguous()
        out = torch.empty_like(x)
        status = host.function_of("decoder_layers", x.dtype)(
            ctypes.addressof(self._layers),
            count,
            rows.address,
            x.data_ptr(),
            _address(delta),
            rope.cos.data_ptr(),
            rope.signed_sin.data_ptr(),
            rows.kv_of(0),
            out.data_ptr(),
            torch.get_num_threads(),
        )
        assert status == 0, "takes was not asked"
        return out


class HeadCall:
    """The last norm and the head in one call.

    Args:
        norm: [hidden], contiguous.
        head: projection to [vocab], in panels.
    """

    def __init__(self, norm: Tensor, eps: float, head: Linear) -> None:
        self._kept = (norm, head)
        self._vocab = head.weight.shape[0]
        self._parts = _HeadParts(
            *(norm.data_ptr(), head.panels, _address(head.bias)), len(norm), self._vocab, eps
        )
        self._address = ctypes.addressof(self._parts)

    @classmethod
    def of(cls, norm: Tensor, eps: float, head: Linear) -> Self | None:
        """Returns the call; None if the head lacks the panel layout."""
        return cls(norm, eps, head) if head.panels else None

    def run(self, x: Tensor, delta: Tensor) -> Tensor:
        """Adds `delta` to the stream and computes the logits of its norm.

        Args:
            x: [rows, hidden], contiguous, changed in place; `takes` must accept it.
            delta: same shape, contiguous.

        Returns:
            [rows, vocab] fp32, with the precision of `x`.
        """
        assert x.is_contiguous()
        assert delta.is_contiguous()
        logits = x.new_empty(len(x), self._vocab, dtype=torch.float32)
        status = host.function_of("head_logits", x.dtype)(
            self._address,
            x.data_ptr(),
            delta.data_ptr(),
            logits.data_ptr(),
            len(x),
            torch.get_num_threads(),
        )
        assert status == 0, "takes was not asked"
        return logits


def _address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()
