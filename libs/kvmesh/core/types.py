"""Frozen values that all services share. Messages become these at the edge (`rpc/convert.py`).

Owns no behaviour beyond arithmetic on its own fields. Tests: tests/unit/core/test_types.py.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NewType

from kvmesh.core.empty_spare import Origin
from kvmesh.core.fetch_reason import FetchReason
from kvmesh.core.health import NO_DEVICE_ERRORS, DeviceErrors
from kvmesh.core.kv_formats import KV_DTYPE_BYTES, OWN_ENGINE, OWN_ORDER
from kvmesh.core.kv_groups import PLAIN, KvGroups
from kvmesh.core.pace import NO_LIMIT_S, PaceRoom
from kvmesh.core.values import quick

WorkerId = NewType("WorkerId", str)
RequestId = NewType("RequestId", str)
BlockHash = NewType("BlockHash", bytes)
"""Hash of the parent hash and the block's tokens."""
BLOCK_HASH_BYTES = 16


class FinishReason(enum.Enum):
    """How a request ended; values are OpenAI's words."""

    __hash__ = object.__hash__  # `Enum.__hash__` is Python code and four times as slow

    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"
    ERROR = "error"


FINISH_WORDS = {reason: reason.value for reason in FinishReason}
"""`value` of each reason: as an attribute it is a slow Python call, needed twice per request."""


class RefusalReason(enum.Enum):
    """Why a service refused; the value is the machine-readable word that clients see."""

    BUSY = "busy"
    NO_BLOCKS = "no_blocks"
    NO_SLOTS = "no_slots"
    DRAINING = "draining"
    DEADLINE = "deadline"
    TOO_LONG = "too_long"
    STALE = "stale"
    NO_WORKERS = "no_workers"
    QUOTA = "quota"
    INVALID = "invalid"
    LOST = "lost"


class RouteCause(enum.Enum):
    """The reason that decided a route, in one word; operators and clients see the value."""

    __hash__ = object.__hash__  # `Enum.__hash__` is Python code and four times as slow

    PREFIX = "prefix"
    """The prefill worker holds the start of the prompt."""
    FETCH = "fetch"
    """The prefill worker fetches the start of the prompt from another one that holds it."""
    CHAIN = "chain"
    """Idle prefill workers compute the prompt together, each a part of it."""
    LOAD = "load"
    """No worker holds a prefix that counts, so the least loaded one is chosen."""
    ROTATION = "rotation"
    """The next worker in turn."""
    SHORT_PROMPT = "short_prompt"
    """Few tokens are left to compute and a decode worker computes them, so no KV has to move."""
    HELP = "help"
    """A decode worker would give the first token before any prefill worker."""
    LONG_PROMPT = "long_prompt"
    """So many tokens are left to compute that the remote cluster computes them."""
    REMOTE_DOWN = "remote_down"
    """Long enough for the remote cluster, which takes no prompts."""
    LOCAL_DOWN = "local_down"
    """Short enough for the local cluster, which takes no prompts."""
    ASKED = "asked"
    """The request demanded this placement."""
    NO_PAIR = "no_pair"
    """There is no pair of a prefill and a decode worker."""
    NO_SCHEDULER = "no_scheduler"
    """A gateway decided without a scheduler."""


class Role(enum.Enum):
    """Role of a worker: the work that the scheduler gives it."""

    __hash__ = object.__hash__  # `Enum.__hash__` is Python code and four times as slow

    PREFILL = "prefill"
    DECODE = "decode"
    HYBRID = "hybrid"
    SPARE = "spare"


class Placement(enum.Enum):
    """How prefill and decode of a request are placed."""

    __hash__ = object.__hash__  # `Enum.__hash__` is Python code and four times as slow

    AUTO = "auto"
    DISAGGREGATED = "disaggregated"
    AGGREGATED = "aggregated"


@dataclass(frozen=True, slots=True)
class Refusal:
    """A refusal with its reason.

    Attributes:
        work_done: whether computation had begun and was lost.
        retry_after_ms: milliseconds until a retry may succeed; 0 is unknown.
    """

    reason: RefusalReason
    message: str
    work_done: bool = False
    retry_after_ms: int = 0


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A TCP address."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"{self.host}:{self.port}"


@dataclass(frozen=True, slots=True)
class HostRoute:
    """How processes of the same host reach a worker's data channel.

    Attributes:
        host_id: identity of the running host; routes of another host are useless.
        socket_path: Unix socket over which memory is shared.
    """

    host_id: str
    socket_path: str


class StructureKind(enum.Enum):
    """The language in which a structure is written."""

    JSON_SCHEMA = "json_schema"
    REGEX = "regex"
    LARK = "lark"
    """A context-free grammar in Lark's notation."""


@dataclass(frozen=True, slots=True)
class Structure:
    """Required structure of the generated text, written in the language `kind`."""

    kind: StructureKind
    text: str


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How tokens are chosen and when generation ends.

    Attributes:
        temperature: 0 is greedy.
        top_k: 0 keeps all tokens.
        seed: key of the random numbers, together with the token's position in the sequence.
        max_tokens: counted from the end of the client's prompt.
        num_logprobs: top log-probabilities per token; -1 returns none, 0 the chosen token's only.
        logit_bias: pairs of a token and the value added to its logit.
        allowed_token_ids: the only tokens that may be chosen; empty allows all.
        bad_words: token sequences that are not generated.
        num_prompt_logprobs: same as `num_logprobs`, for the prompt; its KV is then always computed.
        structure: required structure of the text; None is free text.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int = 0
    max_tokens: int = 16
    min_tokens: int = 0
    ignore_eos: bool = False
    stop_token_ids: tuple[int, ...] = ()
    num_logprobs: int = -1
    logit_bias: tuple[tuple[int, float], ...] = ()
    allowed_token_ids: tuple[int, ...] = ()
    bad_words: tuple[tuple[int, ...], ...] = ()
    num_prompt_logprobs: int = -1
    structure: Structure | None = None

    @property
    def has_penalties(self) -> bool:
        """Whether choosing a token needs the tokens before it."""
        return (self.presence_penalty, self.frequency_penalty, self.repetition_penalty) != (0, 0, 1)


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log-probabilities of one token, the top ones best first.

    Attributes:
        rank: rank of the token among all by log-probability, from 1; 0 is not given.
    """

    logprob: float
    top_ids: tuple[int, ...] = ()
    top_logprobs: tuple[float, ...] = ()
    rank: int = 0


@dataclass(frozen=True, slots=True)
class SequenceSpec:
    """The sequence that a worker is asked to work on.

    Attributes:
        token_ids: the client's prompt, then tokens generated before (a stream that moved).
        num_prompt_tokens: number of these tokens that are the client's prompt.
        root_hash: parent of the first block hash; it covers model, tenant salt and adapter.
        fingerprint: checkpoint that all its tokens come from; empty: any.
        adapter: id of the LoRA adapter whose weights are added; empty: none.
        embedding: leading dimensions wanted of the prompt's embedding; 0: all; -1: no embedding.
    """

    token_ids: tuple[int, ...]
    num_prompt_tokens: int
    sampling: SamplingParams
    root_hash: BlockHash
    fingerprint: str = ""
    adapter: str = ""
    embedding: int = -1


@dataclass(frozen=True, slots=True)
class KvLayout:
    """Shape of KV memory: `(num_blocks, layers, 2, block_size, kv_heads, head_dim)` (FlowKV eq. 5).

    Two workers transfer KV only if all fields are equal.

    Attributes:
        num_kv_heads: KV heads per layer in this tensor-parallel part.
        order: order of the axes; see `kvmesh.core.kv_formats`.
        tp_rank: index of this part of the heads, of `tp_size` parts.
    """

    model_fingerprint: str
    dtype: str
    block_size: int
    num_layers: int
    num_kv_heads: int
    head_dim: int
    engine: str = OWN_ENGINE
    order: str = OWN_ORDER
    tp_rank: int = 0
    tp_size: int = 1

    @property
    def block_bytes(self) -> int:
        """Bytes of one block: all layers, keys and values, one contiguous range."""
        values = self.num_layers * 2 * self.block_size * self.num_kv_heads * self.head_dim
        return values * KV_DTYPE_BYTES[self.dtype]


@dataclass(frozen=True, slots=True)
class Reservation:
    """Blocks on a decode worker that one prefill may write.

    Attributes:
        generation: attempt number; writers with an older one are refused.
        capability: secret that admits writes.
        num_cached_blocks: leading blocks that the worker already holds; they are not sent.
        num_blocks: number of blocks to write, in order, after the cached ones.
        lease_ms: milliseconds after which the reservation ends without renewal.
        host_route: route for senders on the same host; None: by network only.
        run_lengths: lengths of the runs of consecutive ids to write (FlowKV 3.3); empty: not given.
    """

    reservation_id: int
    worker_id: WorkerId
    incarnation: int
    generation: int
    capability: bytes = field(repr=False)
    data_endpoint: Endpoint
    num_cached_blocks: int
    num_blocks: int
    lease_ms: int
    host_route: HostRoute | None = None
    run_lengths: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class WorkerInfo:
    """Properties of a worker, fixed for one incarnation.

    Attributes:
        scenario: scenario that its P/D group serves; empty: any.
        publishes: whether a kvmanager knows its blocks; if not, no prefix is found there.
        missing_native: native libraries that it runs without, which makes it slower.
        pair_share: see `ModelRunner.pair_share`.
        adapters, embeds: ids of its LoRA adapters, and whether it computes embeddings.
        shared_cores: names the cores that it shares with other workers; empty: it has its own.
    """

    worker_id: WorkerId
    incarnation: int
    role: Role
    cluster: str
    control_endpoint: Endpoint
    data_endpoint: Endpoint
    model: str
    layout: KvLayout
    max_model_len: int
    prefill_slots: int
    decode_slots: int
    num_blocks: int
    scenario: str = ""
    publishes: bool = True
    missing_native: tuple[str, ...] = ()
    origin: Origin = Origin()
    pair_share: float = 0.0
    adapters: tuple[str, ...] = ()
    embeds: bool = False
    groups: KvGroups = PLAIN
    shared_cores: str = ""


@dataclass(frozen=True, slots=True)
class WorkerLoad:
    """A worker's present load: the indicators of FlowKV appendix B.2, and totals.

    Attributes:
        prefill_sending: number of `prefill_active` that are computed and whose KV is not sent yet.
        pending_tokens: prompt tokens that are accepted and not computed.
        budget_used: tokens of the last step as a fraction of its budget.
        compute_used: fraction of the last second in steps with prompts, which are compute-bound.
        memory_bandwidth_used: fraction of it in pure decode steps, which are memory-bound.
        sent_bytes_total: KV bytes that left this worker since its start.
        sending_bytes: KV bytes that wait to be sent or are in flight.
        sending_s_total: seconds since its start with KV in flight over TCP.
        step_age_s, step_expected_s: age of the running step, and usual seconds of such; 0: none.
        slowdown: time of the latest steps over the usual time of such steps; 0: not known.
        room: room for requests with a TPOT limit.
        damaged_total: sequences for which the engine computed logits that are not numbers.
        host_token_s, disk_token_s: seconds to bring up a token's KV from that tier; 0: not known.
        device: errors that its device reports.
    """

    prefill_active: int = 0
    decode_running: int = 0
    decode_reserved: int = 0
    decode_preempted: int = 0
    blocks_free: int = 0
    draining: bool = False
    prefill_tokens_total: int = 0
    decode_tokens_total: int = 0
    prefill_sending: int = 0
    pending_tokens: int = 0
    budget_used: float = 0.0
    compute_used: float = 0.0
    memory_bandwidth_used: float = 0.0
    sent_bytes_total: int = 0
    sending_bytes: int = 0
    sending_s_total: float = 0.0
    step_age_s: float = 0.0
    step_expected_s: float = 0.0
    slowdown: float = 0.0
    room: PaceRoom = PaceRoom()
    damaged_total: int = 0
    host_token_s: float = 0.0
    disk_token_s: float = 0.0
    device: DeviceErrors = NO_DEVICE_ERRORS


@dataclass(frozen=True, slots=True)
class PrefixSource:
    """A worker from which the prefill worker fetches a prefix, because it holds or computes it.

    Attributes:
        num_blocks: number of leading blocks that it is said to hold.
        computes: whether it does not hold them but computes them at the same time, layer by layer.
        upstream: the worker that computes the beginning of these blocks for it in the same way.
        before_load: whether it delivers them sooner than the reader's own tiers.
    """

    worker_id: WorkerId
    incarnation: int
    control_endpoint: Endpoint
    num_blocks: int
    computes: bool = False
    upstream: PrefixSource | None = None
    before_load: bool = False


@dataclass(frozen=True, slots=True)
class Candidate:
    """A worker to try for a request.

    Attributes:
        source: the worker that it fetches a prefix from before it computes the prompt.
        fetch: why it fetches or not; only known by the service that decided.
        saved_tokens: computed tokens by which the fetch brings its first token sooner; likewise.
        host_tokens, disk_tokens: those of `cached_tokens` that lie in that tier.
        load_tokens: computed tokens by which bringing these up delays its first token; likewise.
    """

    worker_id: WorkerId
    incarnation: int
    control_endpoint: Endpoint
    cached_tokens: int = 0
    source: PrefixSource | None = None
    fetch: FetchReason = FetchReason.NOBODY
    saved_tokens: float = 0.0
    host_tokens: int = 0
    disk_tokens: int = 0
    load_tokens: float = 0.0


@dataclass(frozen=True, slots=True)
class RouteQuery:
    """A gateway's question to the scheduler: where to run a request.

    Attributes:
        num_tokens: tokens to prefill, including generated ones of a moved stream.
        avoid: workers that just failed or refused this request.
        waiting: number of the gateway's requests that look for workers now.
        waiting_reserved: those of them that wait for prefill, with a reservation or behind one.
        waiting_remote: those of these that wait for the remote cluster's prefill workers.
        lost, unanswered: workers of `avoid` that lost work of it, or do not answer the gateway.
        fingerprint, adapter: checkpoint and LoRA adapter that it needs; empty: any, none.
        tpot_s: longest mean time per token that the client accepts.
    """

    request_id: RequestId
    model: str
    num_tokens: int
    max_new_tokens: int
    block_hashes: Sequence[BlockHash] = ()
    scenario: str = ""
    avoid: frozenset[WorkerId] = frozenset()
    ttft_budget_ms: int = 0
    placement: Placement = Placement.AUTO
    waiting: int = 0
    waiting_reserved: int = 0
    waiting_remote: int = 0
    lost: frozenset[WorkerId] = frozenset()
    unanswered: frozenset[WorkerId] = frozenset()
    fingerprint: str = ""
    tpot_s: float = NO_LIMIT_S
    adapter: str = ""


@dataclass(frozen=True, slots=True)
class RoutePlan:
    """Where to run a request, and why.

    Attributes:
        prefill: candidates in the order in which they are tried.
        decode: candidates in that order; empty when aggregated (the prefill worker decodes).
        cache_known: whether it was known which workers hold a prefix.
        reason, cause: in a sentence and in a word.
        remote: whether the prefill workers are those of the remote cluster.
    """

    placement: Placement
    prefill: tuple[Candidate, ...]
    decode: tuple[Candidate, ...]
    cache_known: bool
    reason: str
    policy: str
    cause: RouteCause = RouteCause.LOAD
    remote: bool = False


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts of a finished generation; thinking counts as reasoning and as completion."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    reasoning_tokens: int = 0


# Not a decorator: mypyc does not compile a class with an unknown decorator to a native class.
_OFTEN_MADE = (Candidate, Endpoint, PrefixSource, RoutePlan, RouteQuery, SamplingParams)
for _often_made in (*_OFTEN_MADE, SequenceSpec, Usage, WorkerLoad):
    quick(_often_made)
