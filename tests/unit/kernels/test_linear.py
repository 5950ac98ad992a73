from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from kvmesh.kernels import host
from kvmesh.kernels.linear import can_pack, make_linear

# The first one compiles: seconds alone, and a minute on a machine that is busy.
pytestmark = pytest.mark.timeout(240)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("rows", [0, 1, 2, 4, 6, 7, 12, 19, 40, 65])
# The last is deeper than what is multiplied at once, and no multiple of it.
@pytest.mark.parametrize(("outputs", "inputs"), [(56, 24), (128, 96), (64, 2192)])
@pytest.mark.parametrize("has_bias", [False, True])
def test_product_is_that_of_the_plain_weight(
    has_bias: bool, outputs: int, inputs: int, rows: int, dtype: torch.dtype
) -> None:
    # Products of about 1, whatever the depth.
    x = torch.randn(rows, inputs).to(dtype)
    weight = (torch.randn(outputs, inputs) / inputs**0.5).to(dtype)
    bias = torch.randn(outputs).to(dtype) if has_bias else None
    product = make_linear(weight, bias)
    assert product.packed or product.panels or not can_pack(dtype)
    expected = functional.linear(x.float(), weight.float(), None if bias is None else bias.float())
    tolerance = 1e-4 if dtype is torch.float32 else 5e-2
    torch.testing.assert_close(product(x).float(), expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("inputs", [96, 2192])
def test_a_few_rows_give_what_each_gives_alone(inputs: int, dtype: torch.dtype) -> None:
    product = make_linear(torch.randn(128, inputs).to(dtype))
    if not product.panels:
        pytest.skip("weights are not read in panels here")
    x = torch.randn(host.most_rows(dtype), inputs).to(dtype)
    alone = [product(x[row : row + 1]) for row in range(len(x))]
    for rows in range(1, len(x) + 1):
        assert torch.equal(product(x[:rows]), torch.cat(alone[:rows]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_rows_by_the_hundred_give_what_each_gives_alone(dtype: torch.dtype) -> None:
    weight = torch.randn(192, 320).to(dtype)
    product = make_linear(weight, torch.randn(192).to(dtype))
    if product.packed or not product.panels:
        pytest.skip("many rows are computed by oneDNN here")
    x, before = torch.randn(333, 320).to(dtype), torch.get_num_threads()
    alone = torch.cat([product(x[row : row + 1]) for row in range(len(x))])
    try:
        for threads in (1, 3, 16):
            torch.set_num_threads(threads)
            for rows in (65, 128, 300, 333):
                assert torch.equal(product(x[:rows]), alone[:rows])
            assert torch.equal(product(x[:, :].T.contiguous().T), alone), "columns first"
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_panels_do_not_depend_on_the_threads(dtype: torch.dtype) -> None:
    weight = torch.randn(128, 96).to(dtype)
    x, before = torch.randn(40, 96).to(dtype), torch.get_num_threads()
    made = []
    try:
        for threads in (1, 24):
            torch.set_num_threads(threads)
            product = make_linear(weight)
            assert torch.get_num_threads() == threads
            made.append((bool(product.panels), product(x), product(x[:1])))
    finally:
        torch.set_num_threads(before)
    (one, *by_one), (many, *by_many) = made
    assert one == many
    for out, other in zip(by_one, by_many, strict=True):
        torch.testing.assert_close(out, other)


def test_a_packed_weight_is_a_copy() -> None:
    weight, x = torch.ones(64, 16), torch.ones(2, 16)
    product = make_linear(weight)
    if not (product.packed or product.panels):
        pytest.skip("this build packs nothing")
    weight.zero_()
    assert product(x).sum() == 2 * 64 * 16


def test_without_the_private_operators_weights_stay_plain(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.ops, "mkldnn", object())
    can_pack.cache_clear()
    try:
        weight = torch.ones(32, 16)
        product = make_linear(weight)
        assert product.weight is weight
        assert product(torch.ones(2, 16)).sum() == 2 * 32 * 16
    finally:
        can_pack.cache_clear()


def test_a_layout_that_is_not_known_is_left_to_onednn(monkeypatch: pytest.MonkeyPatch) -> None:
    def other_order(weight: torch.Tensor) -> torch.Tensor:
        return weight.flip(0)

    monkeypatch.setattr(host, "in_panels", other_order)
    monkeypatch.setattr(host, "takes_any_rows", lambda _: False)
    assert make_linear(torch.randn(128, 96)).panels == 0


def test_half_precision_stays_plain() -> None:
    assert not can_pack(torch.float16)
