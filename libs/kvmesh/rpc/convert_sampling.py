"""Converts sampling parameters and log-probabilities to messages and back.

Clients need this part of `rpc/convert.py` too. Tests: tests/unit/rpc/test_convert.py.
"""

from __future__ import annotations

from kvmesh.core.errors import ProtocolError
from kvmesh.core.types import SamplingParams, Structure, StructureKind, TokenLogprobs
from kvmesh.v1 import types_pb2

_STRUCTURES: dict[StructureKind, types_pb2.StructureKind.ValueType] = {
    StructureKind.JSON_SCHEMA: types_pb2.STRUCTURE_KIND_JSON_SCHEMA,
    StructureKind.REGEX: types_pb2.STRUCTURE_KIND_REGEX,
    StructureKind.LARK: types_pb2.STRUCTURE_KIND_LARK,
}
_STRUCTURES_BACK = {number: kind for kind, number in _STRUCTURES.items()}


def sampling_params_to_proto(sampling: SamplingParams) -> types_pb2.SamplingParams:
    """SamplingParams as a message."""
    message = types_pb2.SamplingParams()
    fill_sampling_params(message, sampling)
    return message


def fill_sampling_params(message: types_pb2.SamplingParams, sampling: SamplingParams) -> None:
    """Writes SamplingParams into an empty message, which may be part of another message."""
    message.temperature = sampling.temperature
    message.top_p = sampling.top_p
    message.top_k = sampling.top_k
    message.min_p = sampling.min_p
    message.presence_penalty = sampling.presence_penalty
    message.frequency_penalty = sampling.frequency_penalty
    message.repetition_penalty = sampling.repetition_penalty
    message.seed = sampling.seed
    message.max_tokens = sampling.max_tokens
    message.min_tokens = sampling.min_tokens
    message.ignore_eos = sampling.ignore_eos
    message.num_logprobs = sampling.num_logprobs
    if sampling.stop_token_ids:
        message.stop_token_ids.extend(sampling.stop_token_ids)
    if sampling.allowed_token_ids:
        message.allowed_token_ids.extend(sampling.allowed_token_ids)
    for token_id, bias in sampling.logit_bias:
        message.logit_bias.add(token_id=token_id, bias=bias)
    for word in sampling.bad_words:
        message.bad_words.add(token_ids=word)
    if sampling.num_prompt_logprobs >= 0:
        message.num_prompt_logprobs = sampling.num_prompt_logprobs
    if sampling.structure is not None:
        message.structure.kind = _STRUCTURES[sampling.structure.kind]
        message.structure.text = sampling.structure.text


def sampling_params_from_proto(message: types_pb2.SamplingParams) -> SamplingParams:
    """SamplingParams from a message.

    Raises:
        ProtocolError: a structure of an unknown kind.
    """
    return SamplingParams(
        temperature=message.temperature,
        top_p=message.top_p,
        top_k=message.top_k,
        min_p=message.min_p,
        presence_penalty=message.presence_penalty,
        frequency_penalty=message.frequency_penalty,
        repetition_penalty=message.repetition_penalty,
        seed=message.seed,
        max_tokens=message.max_tokens,
        min_tokens=message.min_tokens,
        ignore_eos=message.ignore_eos,
        stop_token_ids=tuple(message.stop_token_ids),
        num_logprobs=message.num_logprobs,
        logit_bias=tuple((entry.token_id, entry.bias) for entry in message.logit_bias),
        allowed_token_ids=tuple(message.allowed_token_ids),
        bad_words=tuple(tuple(word.token_ids) for word in message.bad_words),
        num_prompt_logprobs=(
            message.num_prompt_logprobs if message.HasField("num_prompt_logprobs") else -1
        ),
        structure=_structure_from_proto(message),
    )


def _structure_from_proto(message: types_pb2.SamplingParams) -> Structure | None:
    if not message.HasField("structure"):
        return None
    kind = _STRUCTURES_BACK.get(message.structure.kind)
    if kind is None:
        raise ProtocolError("unknown_enum", f"structure kind {message.structure.kind}")
    return Structure(kind, message.structure.text)


def token_logprobs_to_proto(logprobs: TokenLogprobs) -> types_pb2.TokenLogprobs:
    """TokenLogprobs as a message."""
    return types_pb2.TokenLogprobs(
        logprob=logprobs.logprob,
        top_ids=logprobs.top_ids,
        top_logprobs=logprobs.top_logprobs,
        rank=logprobs.rank,
    )


def token_logprobs_from_proto(message: types_pb2.TokenLogprobs) -> TokenLogprobs:
    """TokenLogprobs from a message."""
    return TokenLogprobs(
        message.logprob, tuple(message.top_ids), tuple(message.top_logprobs), message.rank
    )
