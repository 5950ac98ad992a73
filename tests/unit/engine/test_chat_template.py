"""Chat templates of model folders: found in either file, and compiled."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvmesh.core.errors import CheckpointError
from kvmesh.engine.chat_template import read_chat_template
from kvmesh.engine.template_sandbox import compile_chat_template

NAMED = [{"name": "tools", "template": "t"}, {"name": "default", "template": "d"}]


@pytest.mark.parametrize(
    ("name", "text", "source"),
    [
        ("chat_template.jinja", "{{ messages }}", "{{ messages }}"),
        (
            "tokenizer_config.json",
            json.dumps({"chat_template": "{{ messages }}"}),
            "{{ messages }}",
        ),
        ("tokenizer_config.json", json.dumps({"chat_template": NAMED}), "d"),
        ("tokenizer_config.json", json.dumps({"chat_template": [1, {}]}), ""),
        ("tokenizer_config.json", json.dumps({"chat_template": None}), ""),
        ("tokenizer_config.json", '{"model_max_length": 5}', ""),
        ("config.json", "{}", ""),
    ],
)
def test_a_template_may_be_in_either_file(
    tmp_path: Path, name: str, text: str, source: str
) -> None:
    (tmp_path / name).write_text(text)
    assert read_chat_template(tmp_path) == source


def test_its_own_file_comes_first(tmp_path: Path) -> None:
    (tmp_path / "chat_template.jinja").write_text("own")
    (tmp_path / "tokenizer_config.json").write_text("{")
    assert read_chat_template(tmp_path) == "own"


def test_settings_that_are_no_json_are_named(tmp_path: Path) -> None:
    (tmp_path / "tokenizer_config.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"tokenizer_config\.json: not valid JSON"):
        read_chat_template(tmp_path)


@pytest.mark.parametrize("source", ["a\n{% if x %}", "a\n{{ x | nothing_like_it }}"])
def test_what_is_no_jinja_is_told_with_its_line(source: str) -> None:
    with pytest.raises(CheckpointError, match="line 2"):
        compile_chat_template(source)
