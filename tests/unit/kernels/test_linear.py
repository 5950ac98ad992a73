from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from kvmesh.kernels.linear import can_pack, make_linear


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("rows", [0, 1, 3, 40])
def test_product_is_that_of_the_plain_weight(rows: int, dtype: torch.dtype) -> None:
    x, weight, bias = (torch.randn(*shape).to(dtype) for shape in ((rows, 24), (56, 24), (56,)))
    product = make_linear(weight, bias)
    assert product.packed == can_pack(dtype)
    expected = functional.linear(x.float(), weight.float(), bias.float())
    tolerance = 1e-4 if dtype is torch.float32 else 5e-2
    torch.testing.assert_close(product(x).float(), expected, atol=tolerance, rtol=tolerance)


def test_a_packed_weight_is_a_copy() -> None:
    weight, x = torch.ones(32, 16), torch.ones(2, 16)
    product = make_linear(weight)
    if not product.packed:
        pytest.skip("this build packs nothing")
    weight.zero_()
    assert product(x).sum() == 2 * 32 * 16


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


def test_half_precision_stays_plain() -> None:
    assert not can_pack(torch.float16)
