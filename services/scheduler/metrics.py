"""Metrics of the scheduler; the table with meanings is in README.md."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache

from prometheus_client import Counter, Gauge

from kvmesh.core.types import Role
from kvmesh.policy.groups import GroupKey
from kvmesh.policy.offload_route import OffloadPlan
from kvmesh.telemetry.batch_histogram import BatchHistogram

ROUTE_SECONDS = BatchHistogram(
    "kvmesh_scheduler_route_seconds",
    "Time to make a route plan, the prefix lookup included",
    buckets=(0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1),
)
ROUTES = Counter(
    "kvmesh_scheduler_routes",
    "Route decisions; outcome is `plan` or the reason of the refusal",
    ("outcome", "placement"),
)
ROUTE_CAUSES = Counter(
    "kvmesh_scheduler_route_causes", "Route plans by what decided them", ("policy", "cause")
)
PREFIX_LOOKUPS = Counter(
    "kvmesh_scheduler_prefix_lookups",
    "Routes by how they came to know who holds leading blocks, or why they do not",
    ("outcome",),
)
INDEX_BLOCKS = Gauge("kvmesh_scheduler_index_blocks", "Hashes that the prefix index knows")
DECISION_SECONDS = BatchHistogram(
    "kvmesh_scheduler_decision_seconds",
    "Time to decide a route once the prefix matches are known",
    buckets=(0.00005, 0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.05),
)
JOINT_REQUESTS = Counter(
    "kvmesh_scheduler_joint_requests",
    "Requests by what became of them among those that they were decided with",
    ("reason",),
)
JOINT_HELD_SECONDS = BatchHistogram(
    "kvmesh_scheduler_joint_held_seconds",
    "Time that a route waited for others to be decided with it",
    buckets=(0.0001, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1),
)
JOINT_SAVED_TOKENS = Counter(
    "kvmesh_scheduler_joint_saved_tokens",
    "Tokens by which first tokens are to come sooner than if each had been decided on alone",
)
THRESHOLD_TOKENS = Gauge(
    "kvmesh_scheduler_threshold_tokens",
    "Uncached tokens above which prompts go to the remote cluster",
    ("model",),
)
PATH_TOKEN_SECONDS = Gauge(
    "kvmesh_scheduler_path_token_seconds",
    "Measured time for a token's KV to travel from one cluster to another",
    ("model", "source", "target"),
)
LOAD_SCORE = Gauge(
    "kvmesh_scheduler_load_score",
    "Mean load score of a side: 1 is full, more waits",
    ("model", "cluster", "scenario", "side"),
)
ROLE_CHANGES = Counter(
    "kvmesh_scheduler_role_changes",
    "Role changes: switches for some cycles and reallocations",
    ("kind", "reason", "outcome"),
)
SUBSTITUTES = Counter(
    "kvmesh_scheduler_substitutes",
    "Places of lost and ejected workers: by what they were to be filled, and what came of it",
    ("cluster", "scenario", "step", "outcome"),
)
SCALE_STEPS = Counter(
    "kvmesh_scheduler_scale_steps",
    "Advice to add or remove a worker",
    ("model", "cluster", "scenario", "role", "step"),
)
WORKERS = Gauge(
    "kvmesh_scheduler_workers",
    "Live workers",
    ("model", "checkpoint", "scenario", "cluster", "role"),
)
CONNECTING_WORKERS = Gauge(
    "kvmesh_scheduler_connecting_workers",
    "Workers without new requests because peers are not connected to them",
    ("state",),
)
EMPTY_SPARES = Gauge(
    "kvmesh_scheduler_empty_spares", "Workers that wait without a model", ("cluster",)
)
WORKER_HEALTH = Gauge("kvmesh_scheduler_worker_health", "Live workers by level", ("health",))
HEALTH_CHANGES = Counter(
    "kvmesh_scheduler_health_changes",
    "Changes of a worker's level of health",
    ("cluster", "health", "reason"),
)
WORKERS_LOST = Counter(
    "kvmesh_scheduler_workers_lost", "Workers removed without a goodbye", ("cause",)
)
STORE_FAILURES = Counter(
    "kvmesh_scheduler_store_failures", "Calls to the durable registry that failed"
)


def note_joint(plans: Sequence[OffloadPlan]) -> None:
    """Counts decisions that were made together."""
    choices = [plan.joint for plan in plans if plan.joint is not None]
    for choice in choices:
        JOINT_REQUESTS.labels(choice.reason.value).inc()
    # Decisions are made by volume, so first tokens may come later than with single decisions.
    JOINT_SAVED_TOKENS.inc(max([0.0, *(choice.saved_tokens for choice in choices)]))


def show_workers(counts: Mapping[tuple[GroupKey, Role], int]) -> None:
    """Shows the number of workers by labels and role; 0 for roles that are not there.

    Groups that differ only in what no label says are counted together.
    """
    shown: dict[tuple[str, str, str, str], dict[Role, int]] = {}
    for (group, role), count in counts.items():
        labels = (group.model, group.checkpoint, group.scenario, group.cluster)
        by_role = shown.setdefault(labels, dict.fromkeys(Role, 0))
        by_role[role] += count
    for labels, by_role in shown.items():
        for role, count in by_role.items():
            WORKERS.labels(*labels, role.value).set(count)


@lru_cache(maxsize=256)
def planned(placement: str, policy: str, cause: str) -> tuple[Counter, Counter]:
    """The two counters of a plan.

    Cached: finding a counter by its labels takes 2 us for each route.
    """
    return ROUTES.labels("plan", placement), ROUTE_CAUSES.labels(policy, cause)
