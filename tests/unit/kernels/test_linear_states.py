from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from kvmesh.kernels.lightning_reference import lightning_scan, lightning_step
from kvmesh.kernels.linear_reference import causal_conv, delta_scan, delta_step, l2_normalize
from kvmesh.kernels.mamba_reference import mamba_scan, mamba_step
from kvmesh.kernels.states import SequenceState, StepStates
from tests.unit.kernels.no_copies import no_copies

Inputs = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]


def inputs(positions: int, channels: int, *, strength: float = 1.0) -> tuple[Inputs, Tensor]:
    """q, k, v, decay, beta of 3 heads with keys of 8 and values of 6; and a state."""
    torch.manual_seed(positions)
    q, k = (l2_normalize(torch.randn(positions, 3, 8)) for _ in range(2))
    v = torch.randn(positions, 3, 6)
    decay = -strength * torch.rand(positions, 3, channels)
    return (q, k, v, decay, torch.rand(positions, 3)), torch.randn(3, 8, 6)


@pytest.mark.parametrize("channels", [1, 8])
@pytest.mark.parametrize("positions", [1, 15, 16, 64, 65, 150])
def test_a_scan_equals_its_steps(positions: int, channels: int) -> None:
    rows, state = inputs(positions, channels)
    found, last = delta_scan(*rows, state)
    after = state[None]
    for position in range(positions):
        q, k, v, decay, beta = (x[position : position + 1] for x in rows)
        out, after = delta_step(q, k, v, decay, beta, after)
        torch.testing.assert_close(found[position], out[0], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(last, after[0], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("channels", [1, 8])
def test_a_scan_is_as_exact_as_its_steps_where_some_positions_forget_all(channels: int) -> None:
    """Sums of decays are large then, and what lies between two neighbours is small."""
    (q, k, v, decay, beta), state = inputs(128, channels)
    forgets = torch.rand(decay.shape) < 0.5
    decay = torch.where(forgets, 400.0 * decay, 0.02 * decay)
    found, last = delta_scan(q, k, v, decay, beta, state)
    after = state[None]
    for position in range(128):
        row = slice(position, position + 1)
        out, after = delta_step(q[row], k[row], v[row], decay[row], beta[row], after)
        torch.testing.assert_close(found[position], out[0], rtol=1e-5, atol=5e-6)
    torch.testing.assert_close(last, after[0], rtol=1e-5, atol=5e-6)


@pytest.mark.parametrize("channels", [1, 8])
def test_a_state_that_is_forgotten_at_once_stays_finite(channels: int) -> None:
    rows, state = inputs(130, channels, strength=200.0)
    out, last = delta_scan(*rows, state)
    assert out.isfinite().all()
    assert last.isfinite().all()


@pytest.mark.parametrize("positions", [1, 127, 129, 300])
def test_a_lightning_scan_equals_its_steps(positions: int) -> None:
    (q, k, v, _, _), state = inputs(positions, 1)
    slopes = torch.tensor([2.0, 0.5, 1e-6])
    found, last = lightning_scan(q, k, v, slopes, state)
    after = state[None]
    for position in range(positions):
        row = slice(position, position + 1)
        out, after = lightning_step(q[row], k[row], v[row], slopes, after)
        torch.testing.assert_close(found[position], out[0], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(last, after[0], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("strength", [1.0, 200.0])
@pytest.mark.parametrize("positions", [1, 63, 65, 150])
def test_a_scan_of_mamba_equals_its_steps(positions: int, strength: float) -> None:
    torch.manual_seed(positions)
    q, k = torch.randn(2, positions, 2, 8)
    v, state = torch.randn(positions, 6, 5), torch.randn(6, 8, 5)
    decay = -strength * torch.rand(positions, 6)
    found, last = mamba_scan(q, k, v, decay, state)
    after = state[None]
    for position in range(positions):
        row = slice(position, position + 1)
        # Each group of queries and keys is that of three heads in a row.
        own_q, own_k = (x[position].repeat_interleave(3, dim=0) for x in (q, k))
        wanted = after[0] * decay[position].exp()[:, None, None]
        wanted = wanted + torch.einsum("hk,hv->hkv", own_k, v[position])
        out, after = mamba_step(q[row], k[row], v[row], decay[row], after)
        torch.testing.assert_close(after[0], wanted)
        torch.testing.assert_close(out[0], torch.einsum("hk,hkv->hv", own_q, wanted))
        torch.testing.assert_close(found[position], out[0], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(last, after[0], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("cut", [0, 1, 2, 7, 20])
def test_a_convolution_goes_on_where_it_was_cut(cut: int) -> None:
    torch.manual_seed(cut)
    x, taps = torch.randn(20, 5), torch.randn(4, 5)
    whole = functional.conv1d(x.T[None], taps.T[:, None], padding=3, groups=5)[0, :, :20].T
    first, before = causal_conv(x[:cut], torch.zeros(3, 5), taps)
    second, _ = causal_conv(x[cut:], before, taps)
    torch.testing.assert_close(torch.cat([first, second]), whole)


class Sum:
    """A recurrence whose state is the sum of the rows, and which gives it back for each row."""

    def __init__(self, rows: Tensor) -> None:
        self.rows = rows

    def step(self, rows: slice, states: Tensor) -> tuple[Tensor, Tensor]:
        after = states + self.rows[rows]
        return after, after

    def scan(self, rows: slice, state: Tensor) -> tuple[Tensor, Tensor]:
        sums = state + self.rows[rows].cumsum(0)
        return sums, sums[-1]


def test_states_are_read_carried_on_saved_and_written_back() -> None:
    pool = torch.full((12, 8), torch.nan)
    pool[9, 4:6] = torch.tensor([100.0, 200.0])  # a state to go on from
    pool[8, 4:6] = torch.tensor([10.0, 20.0])
    sequences = [
        SequenceState(live=[0, 1], source=[7, 8], saves=[(1, [2, 3])]),
        SequenceState(live=[4, 5], source=[]),
        SequenceState(live=[6, 9], source=[6, 9], saves=[(2, [10, 11])]),
    ]
    rows = torch.arange(10.0).view(5, 2)
    states = StepStates(sequences, [0, 1, 2, 5], 2, pool)
    with no_copies():  # all that the host knows is on the device before the first layer
        out = states.run(1, 2, 2, Sum(rows))
    assert out.tolist() == [[10, 21], [2, 3], [104, 205], [110, 212], [118, 221]]
    assert pool[1, 4:6].tolist() == pool[3, 4:6].tolist() == [10, 21]
    assert pool[5, 4:6].tolist() == [2, 3]
    assert pool[9, 4:6].tolist() == [118, 221]
    assert pool[11, 4:6].tolist() == [110, 212]
    assert pool[8, 4:6].tolist() == [10, 20]
    # Nothing else was written.
    assert int(pool.isfinite().sum()) == 12
