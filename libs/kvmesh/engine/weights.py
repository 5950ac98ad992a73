"""Tensors of a checkpoint folder: which files hold them, their identity, and reading them.

Tests: tests/unit/engine/test_weights.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import safetensors
import torch
from torch import Tensor

from kvmesh.core.errors import CheckpointError
from kvmesh.engine.config import ModelConfig, RowFactors
from kvmesh.engine.kv_plan import KvPlace
from kvmesh.engine.weight_files import find_weight_files, identity_of, open_weights
from kvmesh.kernels.linear import Linear, make_linear

_OLDER_NAMES = (
    ("language_model.model.", "model.language_model."),
    ("language_model.lm_head.", "lm_head."),
    *((f"{name}.", f"transformer.{name}.") for name in ("wte", "wpe", "h", "ln_f")),
    ("decoder.", "model.decoder."),
)


class WeightFiles:
    """The safetensors files of a folder, open for reading while the context is entered."""

    def __init__(self, folder: Path, names: tuple[tuple[str, str], ...] = ()) -> None:
        """Finds the files; reads none yet.

        Args:
            names: parts of usual names and what the files have for them, replaced in this order.

        Raises:
            CheckpointError: no weights, a malformed index, or a shard that is not there.
        """
        self.paths = find_weight_files(folder)
        self._handles: list[Any] = []
        self._owner: dict[str, tuple[Any, str]] = {}
        self._names = names

    def __enter__(self) -> WeightFiles:
        for path in self.paths:
            handle = open_weights(path, "pt")
            self._handles.append(handle)
            names = handle.keys()
            self._owner |= {_newer_name(name): (handle, name) for name in names}
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._owner.clear()
        self._handles.clear()

    def has(self, name: str) -> bool:
        """Whether a tensor of this name is in the files."""
        return self._own_name(name) in self._owner

    def shape(self, name: str) -> tuple[int, ...]:
        """Of one tensor.

        Raises:
            CheckpointError: it is missing.
        """
        handle, stored_name = self._found(name)
        return tuple(handle.get_slice(stored_name).get_shape())

    def _own_name(self, name: str) -> str:
        for usual, own in self._names:
            name = name.replace(usual, own)
        return name

    def read(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """One tensor in host memory, in the file's dtype.

        Raises:
            CheckpointError: it is missing, truncated or of another shape.
        """
        handle, stored_name = self._found(name)
        name = self._own_name(name)
        try:
            tensor: Tensor = handle.get_tensor(stored_name)
        except safetensors.SafetensorError as error:
            raise CheckpointError(f"tensor {name} cannot be read: {error}") from error
        if tuple(tensor.shape) != shape:
            raise CheckpointError(
                f"tensor {name} has shape {tuple(tensor.shape)}, config.json says {shape}"
            )
        return tensor

    def _found(self, name: str) -> tuple[Any, str]:
        name = self._own_name(name)
        if name not in self._owner:
            raise CheckpointError(f"{self.paths[0].parent}: tensor {name} is missing")
        return self._owner[name]

    def read_rows(
        self, parts: list[tuple[str, int]], columns: int | None, dtype: torch.dtype, device: str
    ) -> Tensor:
        """Several matrices (or vectors) stacked by rows into one, so that one product serves all.

        Args:
            parts: names and numbers of rows.
            columns: of each matrix; None for vectors.
        """
        rows = sum(count for _, count in parts)
        tail = () if columns is None else (columns,)
        out = torch.empty((rows, *tail), dtype=dtype, device=device)
        first = 0
        for name, count in parts:
            out[first : first + count].copy_(self.read(name, (count, *tail)))
            first += count
        return out


def _newer_name(name: str) -> str:
    """What a tensor of an older file is called now."""
    for older, newer in _OLDER_NAMES:
        if name.startswith(older):
            return newer + name.removeprefix(older)
    return name


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """Reads the tensors of one layer, named from `model.layers.N` on.

    Attributes:
        place: of the layer's KV.
        prefix: of the decoder's tensors.
        state_place: of its state, where it carries one.
        factors: see `RowFactors`.

    All methods raise CheckpointError when a tensor is missing or of another shape.
    """

    files: WeightFiles
    layer: int
    dtype: torch.dtype
    device: str
    place: KvPlace
    prefix: str = "model"
    state_place: KvPlace | None = None
    factors: RowFactors = ()

    def has(self, name: str) -> bool:
        """Whether the layer has a tensor of this name."""
        return self.files.has(self._full(name))

    def shape(self, name: str) -> tuple[int, ...]:
        """Of one tensor as the files have it."""
        return self.files.shape(self._full(name))

    def stacked(self, parts: list[tuple[str, int]], columns: int | None = None) -> Tensor:
        """See `WeightFiles.read_rows`."""
        named = [(self._full(name), count) for name, count in parts]
        rows = self.files.read_rows(named, columns, self.dtype, self.device)
        if self.factors:
            first = 0
            for name, count in parts:
                self._multiply(name, rows[first : first + count])
                first += count
        return rows

    def _multiply(self, name: str, rows: Tensor) -> None:
        """Multiplies what was read of a tensor, in place."""
        first = 0
        for count, factor in dict(self.factors).get(name, ()):
            run = rows[first : first + count] if count else rows
            run.copy_(run.float() * factor)
            first += count

    def vector(self, name: str, size: int, offset: float = 0.0) -> Tensor:
        """[size], with an offset added before it is rounded."""
        values = self.files.read(self._full(name), (size,)).float() + offset
        return values.to(self.device, self.dtype)

    def tensor(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """One tensor of any shape."""
        return self.files.read(self._full(name), shape).to(self.device, self.dtype)

    def transposed_or_not(self, name: str, shape: tuple[int, int, int]) -> Tensor:
        """One tensor whose last two axes some files have the other way round."""
        first, rows, columns = shape
        other_way = (first, columns, rows)
        if rows != columns and self.files.shape(self._full(name)) == other_way:
            return self.tensor(name, other_way).transpose(1, 2).contiguous()
        return self.tensor(name, shape)

    def exact(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """One tensor in fp32 whatever the model computes in, for what a rounding would shift."""
        return self.files.read(self._full(name), shape).to(self.device, torch.float32)

    def linear(self, name: str, rows: int, columns: int, bias: Tensor | None = None) -> Linear:
        """A product with the [rows, columns] matrix of this name."""
        return make_linear(self.stacked([(name, rows)], columns), bias)

    def _full(self, name: str) -> str:
        return f"{self.prefix}.layers.{self.layer}.{name}"


def fingerprint(config: ModelConfig, paths: tuple[Path, ...], dtype: str) -> str:
    """Short identity of a model whose KV may be exchanged: same weights, same computation dtype."""
    return identity_of(f"{config!r} {dtype}", paths)
