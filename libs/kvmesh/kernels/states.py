"""States of linear layers in a step: read from blocks of the pool, updated, written back.

Tests: tests/unit/kernels/test_linear_states.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from kvmesh.kernels.upload import sent


@dataclass(frozen=True, slots=True)
class SequenceState:
    """Blocks of one sequence's state.

    Attributes:
        live: block that receives the state after the sequence's rows.
        source: block that holds the state before them; empty at the beginning of a sequence.
        saves: numbers of leading rows, each with the blocks for the state after them.
    """

    live: Sequence[int]
    source: Sequence[int]
    saves: Sequence[tuple[int, Sequence[int]]] = ()


class Recurrence(Protocol):
    """The computation of a linear layer between its projections, bound to the rows' inputs."""

    def step(self, rows: slice, states: Tensor) -> tuple[Tensor, Tensor]:
        """Computes one row of each of several sequences.

        Args:
            states: [rows, values] fp32.

        Returns:
            [rows, ...] and the states after.
        """
        ...

    def scan(self, rows: slice, state: Tensor) -> tuple[Tensor, Tensor]:
        """Computes successive rows of one sequence.

        Args:
            state: [values] fp32.

        Returns:
            [rows, ...] and the state after the last.
        """
        ...


@dataclass(frozen=True, slots=True)
class StatePlaces:
    """Places of one layer's states of several sequences.

    Attributes:
        field: [blocks, values] fp32, the layer's part of the pool's blocks; changed in place.
        source, live: [rows] int64, blocks that hold the states before and after; no row's source
            is another row's live block.
        fresh: [rows] bool, rows whose state before is zero, whatever the source holds.
    """

    field: Tensor
    source: Tensor
    live: Tensor
    fresh: Tensor

    def read(self, first: int = 0) -> Tensor:
        """Returns a copy of the states before, starting with value `first`."""
        states = self.field[:, first:][self.source]
        return states.masked_fill_(self.fresh[:, None], 0)

    def write(self, states: Tensor, first: int = 0) -> None:
        """Writes the states after, starting with value `first`."""
        self.field[:, first:][self.live] = states


@runtime_checkable
class PlacedRecurrence(Protocol):
    """A recurrence that reads and writes states in place, on a device."""

    def step_in_place(self, rows: slice, places: StatePlaces) -> Tensor:
        """Variant of `Recurrence.step` in place; returns [rows, ...]."""
        ...


def carried(recurrence: Recurrence, rows: slice, places: StatePlaces) -> Tensor:
    """Computes one row of each of several sequences, [rows, ...], and writes their states back."""
    if places.field.is_cuda and isinstance(recurrence, PlacedRecurrence):
        return recurrence.step_in_place(rows, places)
    out, states = recurrence.step(rows, places.read())
    places.write(states)
    return out


class States(Protocol):
    """The states of one step."""

    def run(self, part: int, slot: int, values: int, recurrence: Recurrence) -> Tensor:
        """Runs one layer's recurrence over the rows.

        Args:
            part: index of the state's block that holds the layer.
            slot: place of the layer in that block.
            values: number of values of the layer's state.

        Returns:
            [rows, ...] of the recurrence.
        """
        ...


class StateWatch(Protocol):
    """Told of each layer's states in a step."""

    def before_states(self, part: int, slot: int) -> None:
        """Called before the step reads the states in front of its rows."""
        ...

    def after_states(self, part: int, slot: int) -> None:
        """Called after the step has written the states behind its rows."""
        ...


class StepStates:
    """The states of a step that is planned from lists.

    Args:
        sequences: sequences of the step, those with one row first.
        query_starts: first row of each, then the number of rows.
        num_decode: number of leading sequences that have exactly one row.
        pool: [num_blocks, block bytes / 4] fp32; changed in place.
        watch: told of each layer.
    """

    def __init__(
        self,
        sequences: Sequence[SequenceState],
        query_starts: Sequence[int],
        num_decode: int,
        pool: Tensor,
        watch: StateWatch | None = None,
    ) -> None:
        self._watch = watch
        self._sequences = sequences
        self._starts = query_starts
        self._num_decode = num_decode
        self._pool = pool
        decoding = sequences[:num_decode]

        def on_device(values: object) -> Tensor:
            return sent(values, torch.int64, pool.device)

        # Made here: within a step, a host copy would wait for the layers before.
        if decoding:
            self._live = on_device([each.live for each in decoding])
            # Without a source state the live one is read, then cleared (`fresh`).
            self._source = on_device([each.source or each.live for each in decoding])
            self._fresh = sent([not each.source for each in decoding], torch.bool, pool.device)
            saves = [(i, blocks) for i, each in enumerate(decoding) for _, blocks in each.saves]
            self._save_rows = on_device([row for row, _ in saves])
            self._save_blocks = on_device([blocks for _, blocks in saves]) if saves else None

    def run(self, part: int, slot: int, values: int, recurrence: Recurrence) -> Tensor:
        """See `States.run`."""
        if self._watch is not None:
            self._watch.before_states(part, slot)
        field = self._pool[:, slot * values : (slot + 1) * values]
        outs = []
        if self._num_decode:
            live = self._live[:, part]
            places = StatePlaces(field, self._source[:, part], live, self._fresh)
            outs.append(carried(recurrence, slice(0, self._num_decode), places))
            if self._save_blocks is not None:
                field[self._save_blocks[:, part]] = field[live[self._save_rows]]
        for index in range(self._num_decode, len(self._sequences)):
            outs += self._scan(index, part, field, recurrence)
        if self._watch is not None:
            self._watch.after_states(part, slot)
        return outs[0] if len(outs) == 1 else torch.cat(outs)

    def _scan(self, index: int, part: int, field: Tensor, recurrence: Recurrence) -> list[Tensor]:
        sequence = self._sequences[index]
        first, end = self._starts[index], self._starts[index + 1]
        state = field[sequence.source[part]] if sequence.source else torch.zeros_like(field[0])
        outs = []
        begin = first
        # Rows are split where the state is to be saved.
        cuts = {first + rows: blocks[part] for rows, blocks in sequence.saves}
        for cut in sorted({*cuts, end}):
            out, state = recurrence.scan(slice(begin, cut), state)
            outs.append(out)
            if cut in cuts:
                field[cuts[cut]] = state
            begin = cut
        field[sequence.live[part]] = state
        return outs
