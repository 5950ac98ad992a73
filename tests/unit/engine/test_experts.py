from __future__ import annotations

import torch

from kvmesh.engine.experts import GroupRoute


def test_experts_come_from_the_best_groups_and_weights_leave_the_bias_out() -> None:
    # Groups of two: the third has the best expert, but the first two have the better pairs.
    logits = torch.tensor([[1.0, 1.0, 0.9, 0.9, 2.0, -9.0, -5.0, -5.0]])
    bias = torch.zeros(8)
    bias[3] = 0.4
    route = GroupRoute(top_k=2, num_groups=4, top_groups=2, normalize=False, scale=2.0, bias=bias)
    weights, experts = route(logits)
    assert experts.tolist()[0][0] == 3
    assert experts.tolist()[0][1] in (0, 1)
    torch.testing.assert_close(weights, torch.sigmoid(logits.gather(1, experts)) * 2.0)


def test_without_a_bias_groups_count_by_their_best_expert() -> None:
    logits = torch.tensor([[1.0, 1.0, 0.9, 0.9, 2.0, -9.0, -5.0, -5.0]])
    route = GroupRoute(top_k=2, num_groups=4, top_groups=1, normalize=True, scale=1.0)
    weights, experts = route(logits)
    assert experts.tolist() == [[4, 5]]
    torch.testing.assert_close(weights.sum(), torch.tensor(1.0))


def test_biased_softmax_scores() -> None:
    logits = torch.tensor([[1.0, 0.9, 0.0, -1.0]])
    bias = torch.tensor([0.0, -1.0, 0.0, 0.0])
    route = GroupRoute(
        top_k=2, num_groups=1, top_groups=1, normalize=False, scale=1.0, bias=bias, is_softmax=True
    )
    weights, experts = route(logits)
    assert experts.tolist() == [[0, 2]]
    torch.testing.assert_close(weights, torch.softmax(logits, -1)[:, [0, 2]])
