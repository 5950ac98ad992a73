"""Options of config sections that several services have with different options.

All services may share one environment: `kvmesh up` passes it to its children, and an env file to
containers. So an environment variable for another service's option is no error, but one for an
option that no service has is. Tests: tests/unit/packaging/test_shared_sections.py.
"""

from __future__ import annotations

_LIMITS = (
    "ttft_deadline_ms",
    "ttft_tiers",
    "tpot_limit_ms",
    "itl_limit_ms",
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
"""Environment variables of all services' options, in the sections that differ between services."""
