"""One release of vLLM is known by heart; another is refused by name, before anything is loaded."""

from __future__ import annotations

from dataclasses import dataclass, field
from importlib import import_module

import pytest

from kvmesh.core.errors import ConfigError


@dataclass
class Message:
    known: int
    new_and_required: int
    new_with_default: int = 0
    new_and_made: list[int] = field(default_factory=list)


def test_vllm_wants_what_we_give_it() -> None:
    output = import_module("kvmesh.engine.vllm_output")
    assert output.unknown_fields() == []


def test_a_field_that_is_required_or_gone_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    output = import_module("kvmesh.engine.vllm_output")
    given = ((Message, frozenset({"known", "gone"})),)
    assert output.unknown_fields(given) == ["Message.gone", "Message.new_and_required"]
    internals = import_module("kvmesh.engine.vllm_internals")
    monkeypatch.setattr(internals, "unknown_fields", lambda: ["Message.new_and_required"])
    with pytest.raises(ConfigError, match=r"Message\.new_and_required"):
        internals.VllmExecutor(None, None)
