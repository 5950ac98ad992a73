from __future__ import annotations

from contextlib import ExitStack

import pytest

from kvmesh.policy.fair_share import Claim
from kvmesh.policy.groups import GroupKey
from services.gateway.request.lanes import MAX_LANES, Lanes

CHAT, DOC = (GroupKey("m", "f", scenario, "") for scenario in ("chat", "doc"))


async def test_a_crowd_before_one_group_keeps_nobody_from_another() -> None:
    lanes = Lanes()
    doc, chat = lanes.of(DOC), lanes.of(CHAT)
    with ExitStack() as waiting:
        for _ in range(80):
            doc.crowd.enter("t")
            waiting.enter_context(doc.turns.enter(Claim("t", 100))).missed()
        assert doc.turns.num_waiting == lanes.num_queued == lanes.num_waiting == 80
        assert chat.turns.num_waiting == 0
        turn = waiting.enter_context(chat.turns.enter(Claim("t", 100)))
        turn.missed()  # alone in its group it is the first, whatever waits elsewhere
        assert turn.allowed.is_set()
        assert chat.turns.pace(turn) == 1.0
    assert chat.crowd.wait_s("t") == 0.0


def test_groups_that_nobody_waits_for_are_not_kept_for_ever() -> None:
    lanes = Lanes()
    doc, chat = lanes.of(DOC), lanes.of(CHAT)
    doc.crowd.enter("t")
    for number in range(MAX_LANES):
        lanes.of(GroupKey("m", f"checkpoint {number}", "", ""))
    assert lanes.of(DOC) is doc
    assert lanes.of(CHAT) is not chat


def test_what_a_group_has_taken_is_no_estimate_of_another() -> None:
    lanes = Lanes()
    lanes.of(DOC).prefill_times.note(1000, 30.0)
    assert lanes.of(CHAT).prefill_times.expected_s(1000) == 0.0


def test_scenarios_that_nobody_looks_for_are_not_kept() -> None:
    lanes = Lanes()
    first, second = lanes.enter("made up"), lanes.enter("made up")
    assert first is second
    lanes.leave("made up")
    assert lanes.enter("made up") is first
    for _ in range(2):
        lanes.leave("made up")
    with pytest.raises(KeyError):
        lanes.leave("made up")
