"""Inputs of a static decode step: fixed buffers, filled on the host, sent in one copy.

The buffer starts with one line of `max_batch` numbers per kind of row data. The used parts of the
block tables follow without gaps; the device spreads them over tables of fixed strides. Rows beyond
a batch point to the spare block. Tests: tests/unit/engine/test_static_inputs.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kvmesh.core.kv_groups import KvGroups
from kvmesh.engine.noise import key_halves, stream_key
from kvmesh.engine.protocol import SequenceChunk
from kvmesh.engine.sampler import divisor_of
from kvmesh.kernels.static_decode import GroupRows
from kvmesh.kv.groups import first_visible, num_blocks_of

# Lines of row data; two more per token group follow, and two per block of a state.
_TOKEN, _POSITION, _LOW, _HIGH, _IS_RANDOM, _TEMPERATURE, _FRESH, _PICKED = range(8)
_FIRST_GROUP_LINE = 8

_Numbers = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class InputShape:
    """Bounds of a static step.

    Attributes:
        max_batch: maximum number of rows.
        max_tokens: maximum length of a sequence.
        spare_block: block that is never allocated: rows beyond a batch write there.
    """

    max_batch: int
    max_tokens: int
    block_size: int
    groups: KvGroups
    spare_block: int

    @property
    def table_widths(self) -> tuple[int, ...]:
        """Maximum number of blocks that a query sees, per token group."""
        whole = num_blocks_of(self.max_tokens, self.block_size)
        return tuple(
            min(whole, num_blocks_of(window, self.block_size) + 1) if window else whole
            for window in self.groups.windows
        )

    @property
    def num_lines(self) -> int:
        """Number of lines before the tables."""
        return _FIRST_GROUP_LINE + 2 * len(self.groups.windows) + 2 * self.groups.state_blocks


class RowPlaces:
    """Assigns rows to sequences; a sequence keeps its row while the batch has it.

    A row that stays with its sequence keeps its block table, which is long to write.
    """

    def __init__(self) -> None:
        self._rows: list[int] = []

    def assign(self, sequence_ids: Sequence[int]) -> list[int]:
        """Assigns rows 0 to `len(sequence_ids)` to the sequences, one each."""
        count = len(sequence_ids)
        wanted = set(sequence_ids)
        kept = {
            sequence: row for row, sequence in enumerate(self._rows[:count]) if sequence in wanted
        }
        free = iter(sorted(set(range(count)) - set(kept.values())))
        rows = [kept[each] if each in kept else next(free) for each in sequence_ids]
        self._rows = [0] * count
        for row, sequence in zip(rows, sequence_ids, strict=True):
            self._rows[row] = sequence
        return rows


class StaticInputs:
    """The input buffers, on the host and on a device.

    Args:
        device: device of the step; on "cpu" the copy stays within the host.
    """

    def __init__(self, shape: InputShape, device: str) -> None:
        self.shape = shape
        self._front = shape.num_lines * shape.max_batch
        size = self._front + shape.max_batch * sum(shape.table_widths)
        pinned = device != "cpu"
        self._staged = torch.zeros(size, dtype=torch.int64, pin_memory=pinned)
        self._values = self._staged.numpy()
        self._lines = self._values[: self._front].reshape(shape.num_lines, shape.max_batch)
        self._device = torch.zeros(size, dtype=torch.int64, device=device)
        self._device_lines = self._device[: self._front].view(shape.num_lines, shape.max_batch)
        spare = shape.spare_block
        self._tables = [
            torch.full((shape.max_batch, width), spare, dtype=torch.int64, device=device)
            for width in shape.table_widths
        ]
        self._host_tables = [
            np.full((shape.max_batch, width), spare, dtype=np.int64) for width in shape.table_widths
        ]
        # The table written to each row, which is written again only when it changes.
        self._written: list[list[Sequence[int]]] = [[()] * shape.max_batch for _ in self._tables]
        self._places = RowPlaces()
        self._widths = [1] * len(self._tables)
        self._fill_spare(range(shape.max_batch))

    # --- host --------------------------------------------------------------------------------

    def fill(self, chunks: Sequence[SequenceChunk], bucket: int) -> list[int]:
        """Writes a batch; makes the rest of the bucket's rows spare.

        Args:
            chunks: chunks of one token, at most `bucket`, at most `max_tokens` long.

        Returns:
            The row of each chunk.
        """
        assert len(chunks) <= bucket <= self.shape.max_batch
        rows = self._places.assign([chunk.sequence_id for chunk in chunks])
        lines = self._lines
        ordered = np.asarray(rows)
        ends = [chunk.end for chunk in chunks]
        lines[_TOKEN, ordered] = [chunk.token_ids[chunk.start] for chunk in chunks]
        lines[_POSITION, ordered] = [chunk.start for chunk in chunks]
        lines[_FRESH, ordered] = [
            chunk.state is not None and not chunk.state.source for chunk in chunks
        ]
        self._fill_sampling(chunks, ordered)
        for group in range(len(self._tables)):
            self._fill_group(group, chunks, rows, ends)
        self._fill_states(chunks, ordered)
        self._fill_spare(range(len(chunks), bucket))
        return rows

    def _fill_sampling(self, chunks: Sequence[SequenceChunk], rows: _Numbers) -> None:
        lines = self._lines
        randoms = [chunk.sampling.temperature > 0 for chunk in chunks]
        halves = [
            key_halves(stream_key(chunk.sampling.seed, chunk.end)) if random else (0, 0)
            for chunk, random in zip(chunks, randoms, strict=True)
        ]
        lines[_LOW, rows] = [low for low, _ in halves]
        lines[_HIGH, rows] = [high for _, high in halves]
        lines[_IS_RANDOM, rows] = randoms
        lines[_TEMPERATURE].view(np.float64)[rows] = [
            divisor_of(chunk.sampling) for chunk in chunks
        ]

    def _fill_group(
        self, group: int, chunks: Sequence[SequenceChunk], rows: list[int], ends: list[int]
    ) -> None:
        size, window = self.shape.block_size, self.shape.groups.windows[group]
        written, tables = self._written[group], self._host_tables[group]
        slots, lens, longest = [], [], 1
        for chunk, row, end in zip(chunks, rows, ends, strict=True):
            first = first_visible(window, chunk.start, size)
            table = chunk.tables[group][first : num_blocks_of(end, size)]
            if table != written[row]:
                tables[row, : len(table)] = table
                written[row] = table
            longest = max(longest, len(table))
            lens.append(end - first * size)
            slots.append(table[-1] * size + (end - 1) % size)
        line = _FIRST_GROUP_LINE + 2 * group
        self._lines[line, rows], self._lines[line + 1, rows] = slots, lens
        self._widths[group] = longest

    def _fill_states(self, chunks: Sequence[SequenceChunk], rows: _Numbers) -> None:
        if not self.shape.groups.state_blocks:
            return
        live, source = self._state_lines()
        states = [chunk.state for chunk in chunks]
        live[:, rows] = np.asarray([s.live for s in states if s is not None]).T
        # Without a source state the live one is read, then cleared (`_FRESH`).
        source[:, rows] = np.asarray([s.source or s.live for s in states if s is not None]).T

    def _fill_spare(self, rows: range) -> None:
        """Makes rows compute unused results: token 0, alone in the spare block."""
        if not rows:
            return
        shape, lines = self.shape, self._lines
        some = slice(rows.start, rows.stop)
        lines[:, some] = 0
        lines[_FRESH, some] = 1
        lines[_TEMPERATURE].view(np.float64)[some] = 1.0
        for group, tables in enumerate(self._host_tables):
            line = _FIRST_GROUP_LINE + 2 * group
            lines[line, some] = shape.spare_block * shape.block_size
            lines[line + 1, some] = 1
            tables[some, 0] = shape.spare_block
            self._written[group][some] = [()] * len(rows)
        for state in self._state_lines():
            state[:, some] = shape.spare_block

    def _state_lines(self) -> tuple[_Numbers, _Numbers]:
        first = _FIRST_GROUP_LINE + 2 * len(self._tables)
        shape = self.shape
        both = self._lines[first:].reshape(2, shape.groups.state_blocks, shape.max_batch)
        return both[0], both[1]

    def pick(self, rows: Sequence[int]) -> Tensor:
        """Returns [len(rows)] int64 on the device, filled by `send`: rows to sample one by one."""
        self._lines[_PICKED, : len(rows)] = rows
        return self._device_lines[_PICKED, : len(rows)]

    def send(self, bucket: int) -> None:
        """Copies the filled lines and tables to the device, in one asynchronous transfer."""
        end = self._front
        for tables, width in zip(self._host_tables, self._widths, strict=True):
            part = self._values[end : end + bucket * width].reshape(bucket, width)
            np.copyto(part, tables[:bucket, :width])
            end += bucket * width
        self._device[:end].copy_(self._staged[:end], non_blocking=True)
        begin = self._front
        for into, width in zip(self._tables, self._widths, strict=True):
            sent = self._device[begin : begin + bucket * width]
            into[:bucket, :width].copy_(sent.view(bucket, width))
            begin += bucket * width

    # --- device ------------------------------------------------------------------------------

    def token_ids(self, bucket: int) -> Tensor:
        """Returns [bucket] int64."""
        return self._device_lines[_TOKEN, :bucket]

    def positions(self, bucket: int) -> Tensor:
        """Returns [bucket] int64."""
        return self._device_lines[_POSITION, :bucket]

    def group(self, group: int, bucket: int) -> GroupRows:
        """Returns the rows of a token group."""
        line = _FIRST_GROUP_LINE + 2 * group
        return GroupRows(
            slots=self._device_lines[line, :bucket],
            lens=self._device_lines[line + 1, :bucket],
            tables=self._tables[group][:bucket],
        )

    def states(self, bucket: int) -> tuple[Tensor, Tensor, Tensor]:
        """Returns `live`, `source` and `fresh` of `StaticStates`."""
        first = _FIRST_GROUP_LINE + 2 * len(self._tables)
        lines = self._device_lines[first:, :bucket]
        both = lines.view(2, self.shape.groups.state_blocks, bucket)
        return both[0].T, both[1].T, self._device_lines[_FRESH, :bucket] != 0

    def sampling(self, bucket: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Returns temperatures [bucket, 1] fp32, then `low`, `high`, `is_random` of `draw_rows`."""
        lines = self._device_lines
        temperature = lines[_TEMPERATURE, :bucket].view(torch.float64).float()[:, None]
        low, high, is_random = lines[_LOW : _IS_RANDOM + 1, :bucket].to(torch.int32)
        return temperature, low, high, is_random
