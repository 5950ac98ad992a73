"""Factors of long sequences are chosen once, by the longest that is served."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import LlamaConfig, Phi3Config

from tests.integration import family_configs
from tests.integration.families import WITH_A_LONG_ONE, Checkpoint
from tests.integration.family_shapes import LONG_ROPE, SHAPE
from tests.integration.test_transformers_equality import Homes, Stream, prompt_logprobs, run

ORIGINAL = 200
STRETCHED = LONG_ROPE | {"original_max_position_embeddings": ORIGINAL}
WHOLE = {name: STRETCHED[name] + [2.75, 40.0] for name in ("short_factor", "long_factor")}
CONFIGS: dict[str, Any] = {
    "phi3": Phi3Config(
        **(SHAPE | {"hidden_size": 96}),
        pad_token_id=0,
        bos_token_id=None,
        original_max_position_embeddings=ORIGINAL,
        rope_parameters=STRETCHED | {"partial_rotary_factor": 0.75},
    ),
    "llama": LlamaConfig(**SHAPE, rope_parameters=STRETCHED | WHOLE),
}


@pytest.fixture(scope="module", params=list(CONFIGS))
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(family_configs.CONFIGS, "longrope", CONFIGS[request.param])
        return Checkpoint("longrope", tmp_path_factory.mktemp("checkpoint"), WITH_A_LONG_ONE)


@pytest.mark.parametrize(("served", "which"), [(ORIGINAL, [0, 1, 2, 3]), (4096, [4, 5])])
@pytest.mark.parametrize("chunk", [19, 1000])
def test_tokens_on_both_sides_of_the_original_length(
    checkpoint: Checkpoint, served: int, which: list[int], chunk: int
) -> None:
    runner = checkpoint.runner(max_model_len=served)
    prompts = [checkpoint.prompts[number] for number in which]
    homes = Homes(runner).homes([len(prompt) for prompt in prompts])
    streams = [Stream(*pair) for pair in zip(prompts, homes, strict=True)]
    run(runner, streams, chunk)
    assert [stream.output for stream in streams] == [checkpoint.expected[each] for each in which]


@pytest.mark.parametrize(("served", "which"), [(ORIGINAL, 3), (4096, 4)])
def test_logits_on_both_sides_of_the_original_length(
    checkpoint: Checkpoint, served: int, which: int
) -> None:
    prompt = checkpoint.prompts[which]
    found = prompt_logprobs(checkpoint.runner(max_model_len=served), prompt)
    exact = checkpoint.prompt_logprobs(prompt, torch.float32)
    torch.testing.assert_close(found, exact, rtol=0, atol=5e-3)


def test_kv_of_other_rotations_is_never_shared(checkpoint: Checkpoint) -> None:
    found = {
        served: checkpoint.runner(max_model_len=served).spec.layout.model_fingerprint
        for served in (32, ORIGINAL, ORIGINAL + 1, None)
    }
    assert found[32] == found[ORIGINAL]
    assert found[ORIGINAL + 1] == found[None]
    assert found[ORIGINAL] != found[None]


def test_a_short_prompt_of_a_long_context_has_the_long_factors(checkpoint: Checkpoint) -> None:
    prompt = checkpoint.prompts[3]
    short, long = (
        prompt_logprobs(checkpoint.runner(max_model_len=served), prompt)
        for served in (ORIGINAL, 4096)
    )
    assert (short - long).abs().max() > 0.1
