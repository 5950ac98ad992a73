"""Checks a call against the served model: its name, context and vocabulary.

Pure. Tests: tests/unit/gateway/api/test_openai.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from kvmesh.core.errors import InvalidRequestError, ModelNotFoundError
from kvmesh.core.types import SamplingParams
from kvmesh.core.values import changed
from services.gateway.api.openai import ApiCall, TokenPrompt
from services.gateway.api.request_limits import check_limits
from services.gateway.config import LimitsConfig

_SEED_MASK = 2**64 - 1


@dataclass(frozen=True, slots=True)
class ServedNames:
    """Names that clients may use for a model.

    Attributes:
        model: names of the model, its own first.
        adapters: ids of LoRA adapters by name, each of which is the model with other weights.
    """

    model: tuple[str, ...]
    adapters: Mapping[str, str] = field(default_factory=dict)

    @property
    def every(self) -> tuple[str, ...]:
        """All names."""
        return (*self.model, *self.adapters)

    def adapter(self, name: str) -> str:
        """The id of the adapter of a name; empty for none.

        An empty name takes the model itself, and a name of the model hides an adapter's.

        Raises:
            ModelNotFoundError: no such adapter is served (any more).
        """
        if not name or name in self.model:
            return ""
        if name not in self.adapters:
            raise model_not_found(name, self.every)
        return self.adapters[name]


def model_not_found(name: str, known: Iterable[str]) -> ModelNotFoundError:
    """The error for a name that is not served."""
    return ModelNotFoundError(
        f"the model {name!r} does not exist here; served: {', '.join(known)}",
        "model",
        "model_not_found",
    )


def check_room(field: str, num_prompt_tokens: int, max_model_len: int) -> int:
    """The number of tokens that can be generated after a prompt.

    Args:
        field: the prompt's field, for errors.

    Raises:
        InvalidRequestError: there is room for none.
    """
    room = max_model_len - num_prompt_tokens
    if room < 1:
        raise InvalidRequestError(
            f"{field}: the prompt has {num_prompt_tokens} tokens; allowed are at most "
            f"{max_model_len - 1} (context of {max_model_len} with one token to generate)",
            field,
            "context_length_exceeded",
        )
    return room


def check_call(call: ApiCall, limits: LimitsConfig, vocab_size: int) -> None:
    """Checks everything about a call that does not need its prompts' tokens.

    Raises:
        InvalidRequestError: names the field and what is allowed.
    """
    check_limits(call, limits)
    sampling = call.sampling
    if sampling.logit_bias:
        check_known((token_id for token_id, _ in sampling.logit_bias), vocab_size, "logit_bias")
    if sampling.allowed_token_ids:
        check_known(sampling.allowed_token_ids, vocab_size, "allowed_token_ids")
    for prompt in call.prompts:
        if isinstance(prompt, TokenPrompt):  # the tokenizer makes the ids of other prompts
            check_known(prompt.token_ids, vocab_size, call.prompt_field)


def check_prompt(call: ApiCall, num_tokens: int, max_model_len: int) -> SamplingParams:
    """Checks that one prompt of a call fits the model.

    Args:
        num_tokens: number of tokens of the prompt.
        max_model_len: longest sequence in tokens.

    Returns:
        Sampling parameters of the prompt's choices, final except for the seed.

    Raises:
        InvalidRequestError: it is empty, or does not fit the context together with max_tokens.
    """
    field_name = call.prompt_field
    if not num_tokens:
        raise InvalidRequestError(f"{field_name} must hold at least one token", field_name)
    room = check_room(field_name, num_tokens, max_model_len)
    # 0 asks only for the echo of the prompt, but the engine generates at least one token.
    max_tokens = room if call.max_tokens is None else max(call.max_tokens, 1)
    if max_tokens > room:
        raise InvalidRequestError(
            f"{call.max_tokens_field}: {max_tokens} tokens after a prompt of {num_tokens} "
            f"do not fit the context of {max_model_len}; allowed are at most {room}",
            call.max_tokens_field,
            "context_length_exceeded",
        )
    return changed(
        call.sampling,
        max_tokens=max_tokens,
        min_tokens=min(call.sampling.min_tokens, max_tokens),
    )


def check_embeds(model: str, engines: Sequence[str]) -> None:
    """Checks that a model's workers compute embeddings.

    Args:
        engines: names of their engines if none of them does.

    Raises:
        InvalidRequestError: none of them does.
    """
    if not engines:
        return
    todo = "run workers with --engine.kind vllm for it"
    if "vllm" in engines:
        todo = "vllm computes them here for models that take the last token of a causal prompt"
    raise InvalidRequestError(
        f"model: {model} is served by the engine {' and '.join(engines)}, which computes no "
        f"embeddings of it; {todo}",
        "model",
        "embeddings_not_supported",
    )


def choice_sampling(sampling: SamplingParams, seed: int, choice: int) -> SamplingParams:
    """Final sampling parameters of one choice.

    Args:
        sampling: parameters of the choice's prompt.
        seed: the call's seed, or a random one if the call has none.
        choice: its number; choices of one prompt get seeds seed, seed + 1, …
    """
    return changed(sampling, seed=(seed + choice) & _SEED_MASK)


def check_known(token_ids: Iterable[int], vocab_size: int, field_name: str) -> None:
    """Checks that token ids are in the vocabulary.

    Raises:
        InvalidRequestError: an id is outside.
    """
    highest = max(token_ids, default=0)
    if highest >= vocab_size:
        raise InvalidRequestError(
            f"{field_name}: token id {highest} is outside the vocabulary (0 to {vocab_size - 1})",
            field_name,
        )
