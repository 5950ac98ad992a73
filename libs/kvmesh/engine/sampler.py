"""Chooses tokens from logits, batched, each row as if it were alone.

Order: changes by the request (`engine/logits.py`), then argmax for temperature 0, else temperature,
min_p, top_k, top_p (over the tokens that top_k left) and Gumbel-max. Filters keep ties, so no
choice depends on how a device sorts equal logits. Logprobs are those of the model's own logits.
Tests: tests/unit/engine/test_sampler.py.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from kvmesh.core.errors import StructureError
from kvmesh.core.types import SamplingParams, TokenLogprobs
from kvmesh.engine.logits import shape_row, shapes_row
from kvmesh.engine.noise import draw, stream_key
from kvmesh.engine.protocol import SampledToken, SequenceChunk
from kvmesh.kernels.upload import sent

# Number of best candidates that top_p examines before it sorts the whole vocabulary.
_TOP_P_CANDIDATES = 1024
_NOTHING_ALLOWED = "the request forbids every token that could come next"
# A smaller divisor would make logits infinite, and the first of several infinite ones would win.
_LEAST_DIVISOR = 1e-20
DAMAGED = -1
"""Token of a row whose logits contain NaN or infinity."""


def divisor_of(params: SamplingParams) -> float:
    """Returns the divisor of a row's logits: the temperature, or 1 for a greedy choice."""
    return max(params.temperature, _LEAST_DIVISOR) if params.temperature > 0 else 1.0


def is_plain_draw(chunk: SequenceChunk) -> bool:
    """Returns whether the token needs only logits, temperature and noise, and no logprobs."""
    params = chunk.sampling
    filters = params.temperature > 0 and (params.top_k > 0 or params.top_p < 1 or params.min_p > 0)
    return not (filters or params.num_logprobs >= 0 or shapes_row(chunk))


@dataclass(frozen=True, slots=True)
class Chosen:
    """The result of `choose`, still on the device.

    Attributes:
        tokens: [rows] int64, `DAMAGED` where the logits contained NaN or infinity.
        reported: rows whose log-probabilities are reported.
        logprobs: for these rows the token's own [reported], and the best tokens' values and ids,
            both [reported, best]; None if there are no such rows.
        errors: by row, why no token could be chosen.
        shaped: rows whose logits the request changes.
        best: [shaped] fp32, their highest logits, -inf where every token is forbidden; None if
            there are no such rows.
    """

    tokens: Tensor
    reported: list[int]
    logprobs: tuple[Tensor, Tensor, Tensor] | None
    errors: dict[int, str]
    shaped: list[int]
    best: Tensor | None


def sample(logits: Tensor, chunks: Sequence[SequenceChunk]) -> list[SampledToken]:
    """Chooses the token at position `end` of each chunk.

    Args:
        logits: [chunks, vocab], taken as fp32; those in fp32 are changed in place.

    Returns:
        One token per chunk, with `error` if its structure cannot continue or every token is
        forbidden.
    """
    return read_chosen(choose(logits.float(), chunks), chunks)


def choose(logits: Tensor, chunks: Sequence[SequenceChunk]) -> Chosen:
    """Variant of `sample` for logits in fp32 that never waits for tensor values on a device."""
    assert len(logits) == len(chunks)
    device = logits.device
    reported = [row for row, chunk in enumerate(chunks) if chunk.sampling.num_logprobs >= 0]
    told = raw = best = None
    if reported:
        told = sent(reported, torch.int64, device)
        raw = torch.log_softmax(logits.index_select(0, told), dim=-1)
    errors: dict[int, str] = {}
    shaped = [row for row, chunk in enumerate(chunks) if shapes_row(chunk)]
    own_best = None
    if shaped:  # taken before the request's changes, which may make logits infinite
        own_best = logits.index_select(0, sent(shaped, torch.int64, device)).amax(dim=-1)
    for row in shaped:
        try:
            shape_row(logits[row], chunks[row])
        except StructureError as error:
            errors[row] = str(error)
    if shaped:
        best = logits.index_select(0, sent(shaped, torch.int64, device)).amax(dim=-1)
    random = [row for row, chunk in enumerate(chunks) if chunk.sampling.temperature > 0]
    if random:
        params = [chunks[row].sampling for row in random]
        if len(random) == len(chunks):
            filter_rows(logits, params)
        else:
            rows = sent(random, torch.int64, device)
            logits.index_copy_(0, rows, filter_rows(logits.index_select(0, rows), params))
    keys = {row: stream_key(chunks[row].sampling.seed, chunks[row].end) for row in random}
    tokens = draw(logits, keys)
    fine = _chosen_from_numbers(logits, tokens)
    if own_best is not None:
        fine.index_copy_(0, sent(shaped, torch.int64, device), own_best < math.inf)
    tokens = torch.where(fine, tokens, DAMAGED)
    if raw is None or told is None:
        return Chosen(tokens, reported, None, errors, shaped, best)
    count = max(chunks[row].sampling.num_logprobs for row in reported)
    top = raw.topk(min(count, raw.shape[1]), dim=-1)
    own = raw.gather(1, tokens.index_select(0, told).clamp(min=0)[:, None])[:, 0]
    return Chosen(tokens, reported, (own, top.values, top.indices), errors, shaped, best)


def read_chosen(chosen: Chosen, chunks: Sequence[SequenceChunk]) -> list[SampledToken]:
    """Waits for the device and converts the result of `choose`."""
    tokens = [sampled(token) for token in chosen.tokens.tolist()]
    if chosen.logprobs is not None:
        own, values, ids = (each.tolist() for each in chosen.logprobs)
        for place, row in enumerate(chosen.reported):
            count = chunks[row].sampling.num_logprobs
            told = TokenLogprobs(
                own[place], tuple(ids[place][:count]), tuple(values[place][:count])
            )
            tokens[row] = replace(tokens[row], logprobs=told)
    errors = chosen.errors
    if chosen.best is not None:
        shaped = zip(chosen.shaped, chosen.best.tolist(), strict=True)
        errors = {row: _NOTHING_ALLOWED for row, best in shaped if best == -math.inf} | errors
    for index, message in errors.items():
        tokens[index] = SampledToken(tokens[index].token_id, error=message)
    return tokens


def marked(logits: Tensor, drawn: Tensor) -> Tensor:
    """Returns the drawn tokens, `DAMAGED` in rows whose logits contain NaN or infinity.

    Args:
        logits: [rows, vocab] fp32, the model's own.
        drawn: [rows] int64.
    """
    return torch.where(_chosen_from_numbers(logits, drawn), drawn, DAMAGED)


def _chosen_from_numbers(logits: Tensor, drawn: Tensor) -> Tensor:
    """Returns whether a row's highest logit is a finite number or -inf; [rows] bool.

    On a CPU argmax draws any NaN or infinity, so the drawn logit suffices. Never waits.
    """
    if looks_at_values(logits):
        highest = logits.gather(1, drawn[:, None])[:, 0]
    else:
        highest = logits.amax(dim=-1)
    return highest < math.inf


def sampled(token: int) -> SampledToken:
    """Converts one token of `marked`."""
    return SampledToken(0, damaged=True) if token == DAMAGED else SampledToken(token)


def filter_rows(logits: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    """Applies the temperature, then sets tokens excluded by min_p, top_k and top_p to -inf.

    Args:
        logits: [rows, vocab] fp32; changed in place and returned.
    """
    logits /= _column(logits, [divisor_of(p) for p in params])
    if any(p.min_p > 0 for p in params):
        # -inf is no bound at all, which is the meaning of min_p 0; math.log(0) would raise.
        bounds = [math.log(p.min_p) if p.min_p > 0 else -math.inf for p in params]
        lowest = logits.amax(dim=-1, keepdim=True) + _column(logits, bounds)
        logits.masked_fill_(logits < lowest, -math.inf)
    filtered = [row for row, p in enumerate(params) if p.top_k > 0 or p.top_p < 1]
    if filtered:
        some = [params[row] for row in filtered]
        if len(filtered) == len(params):
            return logits.masked_fill_(logits < top_threshold(logits, some), -math.inf)
        rows = sent(filtered, torch.int64, logits.device)
        lowest = torch.full_like(logits[:, :1], -math.inf)
        lowest.index_copy_(0, rows, top_threshold(logits.index_select(0, rows), some))
        logits.masked_fill_(logits < lowest, -math.inf)
    return logits


def top_threshold(logits: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    """Returns the lowest logit that top_k and top_p keep.

    top_p keeps the fewest best tokens whose probabilities, renormalised after top_k, reach it.

    Args:
        logits: [rows, vocab] fp32.

    Returns:
        [rows, 1] fp32.
    """
    vocab_size = logits.shape[1]
    if not looks_at_values(logits):
        # Whether a few candidates suffice depends on values, so a device takes all or top_k of
        # them.
        limits = [p.top_k or vocab_size for p in params]
        return _threshold_among(logits, params, min(max(limits), vocab_size))[0]
    wanted = max(p.top_k or _TOP_P_CANDIDATES for p in params)
    lowest, mass = _threshold_among(logits, params, min(wanted, vocab_size))
    complete = wanted >= vocab_size
    enough = [
        complete or p.top_k > 0 or reached for p, reached in zip(params, mass.tolist(), strict=True)
    ]
    rest = [row for row, known in enumerate(enough) if not known]
    if rest:
        lowest[rest], _ = _threshold_among(logits[rest], [params[row] for row in rest], vocab_size)
    return lowest


def looks_at_values(logits: Tensor) -> bool:
    """Returns whether control flow may depend on values; on a device that would mean to wait."""
    return logits.device.type == "cpu"


def _threshold_among(
    logits: Tensor, params: Sequence[SamplingParams], num_candidates: int
) -> tuple[Tensor, Tensor]:
    """Computes `top_threshold` from the best candidates, and whether they reach top_p [rows]."""
    vocab_size = logits.shape[1]
    values = _best_values(logits, num_candidates)
    top_k = sent([[p.top_k or vocab_size] for p in params], torch.int64, logits.device)
    places = torch.arange(num_candidates, device=logits.device)
    values = values.masked_fill(places >= top_k, -math.inf)
    norm = values.logsumexp(dim=-1, keepdim=True)
    limited = [p.top_k > 0 for p in params]
    if num_candidates < vocab_size and not all(limited):
        everything = logits.logsumexp(dim=-1, keepdim=True)
        norm = torch.where(top_k < vocab_size, norm, everything)
    reached = (values - norm).exp_().cumsum(dim=-1)
    # Rounding may take a sum past 1 before the end; top_p 1 keeps all the same.
    top_p = _column(logits, [p.top_p if p.top_p < 1 else math.inf for p in params])
    # A token is kept if those before it do not reach top_p; top_k's last one ends the row.
    kept = (reached < top_p).sum(dim=-1, keepdim=True)
    last = torch.minimum(kept.clamp_(max=num_candidates - 1), top_k - 1)
    return values.gather(1, last), reached[:, -1] >= top_p[:, 0]


def _best_values(logits: Tensor, count: int) -> Tensor:
    """Returns the `count` highest values of each row, descending."""
    if count < logits.shape[1] or not looks_at_values(logits):
        return logits.topk(count, dim=-1).values
    # NumPy sorts values only, several times as fast as topk, which also carries indexes.
    return torch.from_numpy(-np.sort(-logits.numpy(), axis=-1))


def score_tokens(logits: Tensor, token_ids: Sequence[int], num_top: int) -> list[TokenLogprobs]:
    """Returns log-probabilities and ranks of given tokens, such as those of a prompt.

    Args:
        logits: [rows, vocab] fp32.
        token_ids: one per row.
        num_top: number of best tokens to report per row.
    """
    raw = torch.log_softmax(logits, dim=-1)
    given = sent(token_ids, torch.int64, logits.device)[:, None]
    own = raw.gather(1, given)
    ranks = (raw > own).sum(dim=-1).tolist()
    best = raw.topk(min(num_top, raw.shape[1]), dim=-1)
    rows = zip(own[:, 0].tolist(), ranks, best.indices.tolist(), best.values.tolist(), strict=True)
    return [
        TokenLogprobs(logprob, tuple(ids), tuple(values), rank + 1)
        for logprob, rank, ids, values in rows
    ]


def _column(like: Tensor, values: Sequence[float]) -> Tensor:
    return sent(values, torch.float32, like.device)[:, None]
