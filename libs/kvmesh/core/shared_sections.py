"""Options in sections that several services have, each with others of its own.

All services may have one environment: `kvmesh up` gives it to its children, an env file to
containers. There the name of an option that only another service has is no mistake, while a name
that no service has still is one. Tests: tests/unit/packaging/test_shared_sections.py.
"""

from __future__ import annotations

_LIMITS = (
    "ttft_deadline_ms",
    "tpot_limit_ms",
    "request_timeout_s",
    "prefill_timeout_s",
    "stall_s",
    "max_moves",
    "max_choices",
    "max_prompts",
    "max_stop",
    "max_stop_chars",
    "max_sequences",
    "max_prompt_chars",
    "lookup_timeout_s",
    "max_lookups",
    "probe_interval_s",
)
_REDIS = ("url", "password", "key_prefix", "timeout_s", "password_file")

SHARED_OPTIONS = frozenset(
    f"KVMESH_{section}__{name.upper()}"
    for section, names in (("LIMITS", _LIMITS), ("REDIS", _REDIS))
    for name in names
)
"""Environment names that are known to some service, in sections that differ between services."""
