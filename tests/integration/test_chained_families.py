"""Tokens equal those of transformers, however many engines compute the prompt."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kvmesh.core.types import SamplingParams
from kvmesh.engine.runner import TorchRunner
from tests.integration.chained_engines import ChainedEngines
from tests.integration.families import FOR_ALL, NEW_TOKENS, Checkpoint
from tests.integration.family_configs import CONFIGS

GREEDY = SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS, ignore_eos=True)
SAMPLED = SamplingParams(temperature=0.9, top_p=0.9, seed=7, max_tokens=NEW_TOKENS, ignore_eos=True)


# What a family does inside of a layer is compared in test_transformers_equality.py; between engines
# only what its layers keep makes a difference.
@pytest.fixture(
    scope="module",
    params=[
        pytest.param(name, marks=[] if name in FOR_ALL else pytest.mark.long)
        for name in sorted(CONFIGS)
    ],
)
def checkpoint(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Checkpoint:
    return Checkpoint(request.param, tmp_path_factory.mktemp("checkpoint"), (250,))


@pytest.fixture(scope="module")
def runners(checkpoint: Checkpoint) -> Iterator[list[TorchRunner]]:
    made = [checkpoint.runner() for _ in range(3)]
    yield made
    for runner in made:
        runner.close()


def cuts_of(runner: TorchRunner, length: int, num_parts: int) -> list[int]:
    """Block boundaries; blocks of linear models are long."""
    size = runner.spec.layout.block_size
    cuts = {part * length // num_parts // size * size for part in range(1, num_parts)} - {0}
    assert cuts, f"blocks of {size} positions"
    return sorted(cuts)


@pytest.mark.parametrize("num_parts", [pytest.param(2, marks=pytest.mark.long), 3])
def test_a_chain_gives_the_tokens_of_transformers(
    checkpoint: Checkpoint, runners: list[TorchRunner], num_parts: int
) -> None:
    (prompt,), (expected,) = checkpoint.prompts, checkpoint.expected
    cuts = cuts_of(runners[0], len(prompt), num_parts)
    chain = ChainedEngines(runners[: len(cuts) + 1])
    assert chain.generate(prompt, cuts, GREEDY) == expected
    assert chain.num_copied == len(cuts) * len(runners[0].spec.stages)


def test_what_is_cached_in_a_part_is_not_computed(
    checkpoint: Checkpoint, runners: list[TorchRunner]
) -> None:
    """Each engine has seen a beginning of the prompt, the first one a longer one."""
    (prompt,), (expected,) = checkpoint.prompts, checkpoint.expected
    size = runners[0].spec.layout.block_size
    (cut,) = cuts_of(runners[0], len(prompt), 2)
    chain = ChainedEngines(runners[:2])
    primed = [(0, cut - size + 1), (1, size + 1)] if cut > size else []
    for number, length in primed:
        alone = ChainedEngines([runners[number]])
        alone.cores[0] = chain.cores[number]
        alone.generate(prompt[:length], [], GREEDY)
    before = [core.statistics().computed_tokens_total for core in chain.cores]
    assert chain.generate(prompt, [cut], GREEDY) == expected
    computed = [core.statistics().computed_tokens_total for core in chain.cores]
    assert computed[0] - before[0] <= cut
    if cut > 2 * size:
        assert computed[0] - before[0] < cut, "the first engine resumed what it had"


@pytest.mark.long
def test_sampled_tokens_are_those_of_one_engine(
    checkpoint: Checkpoint, runners: list[TorchRunner]
) -> None:
    (prompt,) = checkpoint.prompts
    cuts = cuts_of(runners[0], len(prompt), 3)
    expected = ChainedEngines(runners[:1]).generate(prompt, [], SAMPLED)
    assert ChainedEngines(runners[: len(cuts) + 1]).generate(prompt, cuts, SAMPLED) == expected
