"""Changes to one row of logits before a token is chosen, according to the request.

Order: bias, tokens that are not allowed, penalties, minimum length, structure. The structure comes
last and wins: other settings must not break a text that has to follow a structure.
Tests: tests/unit/engine/test_logits.py.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import numpy as np
import torch
from torch import Tensor

from kvmesh.engine.protocol import SequenceChunk
from kvmesh.kernels.upload import sent


def shape_row(row: Tensor, chunk: SequenceChunk) -> None:
    """Applies all settings of the chunk's request; `row` is changed in place.

    Args:
        row: [vocab] fp32.

    Raises:
        StructureError: the structure cannot continue.
    """
    sampling = chunk.sampling
    if sampling.logit_bias:
        add_bias(row, sampling.logit_bias)
    if sampling.allowed_token_ids:
        keep_only(row, sampling.allowed_token_ids)
    if sampling.bad_words:
        forbid_words(row, chunk)
    if sampling.has_penalties:
        apply_penalties(row, chunk)
    if chunk.constraint is not None:
        _follow_structure(row, chunk)
    elif _is_too_short(chunk):
        forbid_stop(row, chunk)


def shapes_row(chunk: SequenceChunk) -> bool:
    """Returns whether `shape_row` changes anything."""
    sampling = chunk.sampling
    return bool(
        sampling.logit_bias
        or sampling.allowed_token_ids
        or sampling.bad_words
        or sampling.has_penalties
        or chunk.constraint is not None
        or _is_too_short(chunk)
    )


def _is_too_short(chunk: SequenceChunk) -> bool:
    return chunk.end - chunk.num_prompt_tokens < chunk.sampling.min_tokens


def add_bias(row: Tensor, bias: Iterable[tuple[int, float]]) -> None:
    """Adds numbers to the logits of single tokens; ignores unknown tokens.

    Args:
        row: [vocab] fp32, changed in place.
    """
    for token_id, value in bias:
        if token_id < len(row):
            row[token_id] += value


def keep_only(row: Tensor, token_ids: Iterable[int]) -> None:
    """Makes all other tokens impossible.

    Args:
        row: [vocab] fp32, changed in place.
    """
    kept = _ids(token_ids, row)
    values = row[kept]
    row.fill_(-math.inf)
    row[kept] = values


def forbid_words(row: Tensor, chunk: SequenceChunk) -> None:
    """Makes tokens impossible that would complete a bad word in the output.

    Args:
        row: [vocab] fp32, changed in place.
    """
    output = list(chunk.token_ids[chunk.num_prompt_tokens : chunk.end])
    last = [
        word[-1]
        for word in chunk.sampling.bad_words
        if len(word) <= len(output) + 1 and list(word[:-1]) == output[len(output) + 1 - len(word) :]
    ]
    row.index_fill_(0, _ids(last, row), -math.inf)


def apply_penalties(row: Tensor, chunk: SequenceChunk) -> None:
    """Lowers the logits of tokens that occurred; `row` is changed in place.

    Repetition counts prompt and output, presence and frequency only the output.

    Args:
        row: [vocab] fp32.

    Source: repetition as in CTRL, arXiv 1909.05858 §4.1; the others as in OpenAI's API.
    """
    params = chunk.sampling
    tokens = np.asarray(chunk.token_ids[: chunk.end], dtype=np.int64)
    # Counted on the host: the number of distinct tokens is a shape that a device would wait for.
    if params.repetition_penalty != 1.0:
        seen = sent(np.unique(tokens), torch.int64, row.device)
        scores = row[seen]
        factor = params.repetition_penalty
        row[seen] = torch.where(scores > 0, scores / factor, scores * factor)
    if params.presence_penalty or params.frequency_penalty:
        output, counts = np.unique(tokens[chunk.num_prompt_tokens :], return_counts=True)
        times = sent(counts, torch.int64, row.device)
        penalties = params.presence_penalty + params.frequency_penalty * times
        row.index_add_(0, sent(output, torch.int64, row.device), penalties, alpha=-1)


def forbid_stop(row: Tensor, chunk: SequenceChunk) -> None:
    """Makes tokens impossible that would end the sequence; `row` is changed in place.

    Args:
        row: [vocab] fp32.
    """
    row.index_fill_(0, _ids(_stops(chunk), row), -math.inf)


def _stops(chunk: SequenceChunk) -> set[int]:
    stops = set(chunk.sampling.stop_token_ids)
    return stops if chunk.sampling.ignore_eos else stops | chunk.eos_token_ids


def _follow_structure(row: Tensor, chunk: SequenceChunk) -> None:
    """Keeps tokens with which the structure can continue or end."""
    assert chunk.constraint is not None
    allowed = chunk.constraint.allowed(chunk.token_ids[chunk.num_prompt_tokens : chunk.end])
    mask = sent(allowed, torch.bool, row.device)
    row.masked_fill_(~mask, -math.inf)
    if _is_too_short(chunk):
        unended = row.clone()
        forbid_stop(unended, chunk)
        # If only end tokens remain the text is complete, so they stay allowed.
        row.copy_(torch.where(torch.isinf(unended).all(), row, unended))
    # If bias or bad words forbid all tokens of the structure, the structure wins.
    nothing = torch.isinf(row).all()
    row.masked_fill_(mask & nothing, 0.0)


def _ids(token_ids: Iterable[int], row: Tensor) -> Tensor:
    """Returns the ids within the vocabulary, [ids] int64."""
    return sent(_known(token_ids, row), torch.int64, row.device)


def _known(token_ids: Iterable[int], row: Tensor) -> list[int]:
    return sorted({token_id for token_id in token_ids if 0 <= token_id < len(row)})
