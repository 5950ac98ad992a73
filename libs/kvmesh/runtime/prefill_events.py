"""Messages to a gateway about a prompt that this worker has accepted.

Tests: tests/integration/test_worker.py, tests/integration/test_progress_reports.py.
"""

from __future__ import annotations

from kvmesh.core.types import Refusal
from kvmesh.engine.sequence import Emission
from kvmesh.rpc.convert import finish_reason_to_proto, refusal_to_proto
from kvmesh.rpc.convert_sampling import token_logprobs_to_proto
from kvmesh.runtime.prefill_attempt import PrefillAttempt
from kvmesh.v1 import prefill_service_pb2 as pb


def progress(attempt: PrefillAttempt) -> pb.PrefillEvent:
    """The prompt makes progress."""
    event = _event(attempt)
    event.progress.SetInParent()
    return event


def first_token(attempt: PrefillAttempt, emission: Emission) -> pb.PrefillEvent:
    """The prompt was computed."""
    assert attempt.sequence is not None
    event = _event(attempt)
    first = event.first_token
    first.token_id = emission.token_id
    first.finish_reason = finish_reason_to_proto(emission.finish_reason)
    first.cached_tokens = attempt.sequence.num_cached
    if emission.logprobs is not None:
        first.logprobs.CopyFrom(token_logprobs_to_proto(emission.logprobs))
    first.prompt_logprobs.extend(
        token_logprobs_to_proto(entry) for entry in emission.prompt_logprobs
    )
    first.error = emission.error
    first.embedding = emission.embedding
    return event


def handed_off(attempt: PrefillAttempt) -> pb.PrefillEvent:
    """The KV is complete at the decode worker."""
    event = _event(attempt)
    event.handed_off.bytes = attempt.sent_bytes
    event.handed_off.calls = attempt.sent_calls
    return event


def failed(attempt: PrefillAttempt, refusal: Refusal) -> pb.PrefillEvent:
    """The prompt was lost."""
    event = _event(attempt)
    told = Refusal(refusal.reason, refusal.message, True, refusal.retry_after_ms)
    event.failed.CopyFrom(refusal_to_proto(told))
    return event


def _event(attempt: PrefillAttempt) -> pb.PrefillEvent:
    return pb.PrefillEvent(request_id=attempt.request_id, attempt=attempt.attempt)
