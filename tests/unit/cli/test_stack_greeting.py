"""What `kvmesh up` says when its stack is ready."""

from __future__ import annotations

import shlex
from dataclasses import replace
from pathlib import Path

import pytest

from kvmesh.cli.stack import StackPaths, StackPlan
from kvmesh.cli.stack_greeting import greeting
from kvmesh.core.types import Endpoint

HTTP = Endpoint("127.0.0.1", 8000)
PLAN = StackPlan((), HTTP, Endpoint("127.0.0.1", 8001), "m", has_chat=True)
PATHS = StackPaths(Path("root"), Path("state"), Path("python"), None)


def said(plan: StackPlan, *, has_keys: bool = False) -> str:
    return "\n".join(greeting(plan, PATHS, has_keys=has_keys))


def test_a_model_without_a_template_is_asked_for_completions_and_says_why() -> None:
    text = said(replace(PLAN, has_chat=False))
    assert "/v1/completions " in text
    assert "chats are refused: the model has no chat template" in text


def test_a_model_with_a_template_is_asked_in_a_chat() -> None:
    text = said(PLAN)
    assert "/v1/chat/completions " in text
    assert "refused" not in text


@pytest.mark.parametrize("has_keys", [False, True])
def test_the_command_is_one_that_a_shell_reads(has_keys: bool) -> None:
    line = next(line for line in said(PLAN, has_keys=has_keys).splitlines() if "curl" in line)
    assert shlex.split(line)[:2] == ["curl", "-N"]
    assert ("$KVMESH_API_KEY" in line) is has_keys
    assert ("export KVMESH_API_KEY" in said(PLAN, has_keys=has_keys)) is has_keys
