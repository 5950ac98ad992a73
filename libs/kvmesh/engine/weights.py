"""Tensors of a checkpoint folder: names, fingerprint, and reading.

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
            names: pairs of a usual name's part and the files' part for it, replaced in this order.

        Raises:
            CheckpointError: there are no weights, the index is malformed, or a shard is missing.
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
        """Returns whether the files have a tensor of this name."""
        return self._own_name(name) in self._owner

    def shape(self, name: str) -> tuple[int, ...]:
        """Returns the shape of one tensor.

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
        """Reads one tensor into host memory, in the file's dtype.

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
        """Reads matrices (or vectors) stacked by rows, so that one matrix product serves all.

        Args:
            parts: names and numbers of rows.
            columns: number of columns of each matrix; None for vectors.
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
    """Returns the present name of an older file's tensor."""
    for older, newer in _OLDER_NAMES:
        if name.startswith(older):
            return newer + name.removeprefix(older)
    return name


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """Reads the tensors of one layer, named from `model.layers.N` on.

    Attributes:
        place: place of the layer's KV.
        prefix: name prefix of the decoder's tensors.
        state_place: place of the layer's state, if it carries one.
        factors: see `RowFactors`.

    All methods raise CheckpointError if a tensor is missing or of another shape.
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
        """Returns whether the layer has a tensor of this name."""
        return self.files.has(self._full(name))

    def shape(self, name: str) -> tuple[int, ...]:
        """Returns the shape of one tensor in the files."""
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
        """Multiplies rows of a tensor by its factors, in place."""
        first = 0
        for count, factor in dict(self.factors).get(name, ()):
            run = rows[first : first + count] if count else rows
            run.copy_(run.float() * factor)
            first += count

    def vector(self, name: str, size: int, offset: float = 0.0) -> Tensor:
        """Reads a vector [size]; adds the offset before rounding."""
        values = self.files.read(self._full(name), (size,)).float() + offset
        return values.to(self.device, self.dtype)

    def tensor(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """Reads one tensor of any shape."""
        return self.files.read(self._full(name), shape).to(self.device, self.dtype)

    def transposed_or_not(self, name: str, shape: tuple[int, int, int]) -> Tensor:
        """Reads one tensor whose last two axes some files swap."""
        first, rows, columns = shape
        other_way = (first, columns, rows)
        if rows != columns and self.files.shape(self._full(name)) == other_way:
            return self.tensor(name, other_way).transpose(1, 2).contiguous()
        return self.tensor(name, shape)

    def exact(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """Reads one tensor in fp32, whatever dtype the model computes in."""
        return self.files.read(self._full(name), shape).to(self.device, torch.float32)

    def linear(self, name: str, rows: int, columns: int, bias: Tensor | None = None) -> Linear:
        """Reads a [rows, columns] matrix as a linear projection."""
        return make_linear(self.stacked([(name, rows)], columns), bias)

    def _full(self, name: str) -> str:
        return f"{self.prefix}.layers.{self.layer}.{name}"


def fingerprint(config: ModelConfig, paths: tuple[Path, ...], dtype: str) -> str:
    """Returns a short identity; KV may be exchanged between workers with equal ones."""
    return identity_of(f"{config!r} {dtype}", paths)
