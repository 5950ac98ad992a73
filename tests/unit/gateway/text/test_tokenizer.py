from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import decoders, models

from kvmesh.core.errors import CheckpointError, InvalidRequestError
from services.gateway.text.tokenizer import (
    THREAD_THRESHOLD_TOKENS,
    ChatTemplate,
    TextTokenizer,
    load_tokenizer,
)
from tests.unit.gateway.tiny_model import EOS, write_model

MESSAGES = [{"role": "user", "content": "hi"}]


def test_chat_template_of_a_folder(tokenizer: TextTokenizer) -> None:
    text = tokenizer.chat.render(MESSAGES)
    assert text == "<|start|>user\nhi<|end|>\n<|start|>assistant\n"
    assert tokenizer.chat.render(MESSAGES, add_generation_prompt=False).endswith("<|end|>\n")


async def test_special_tokens_in_rendered_text_are_single_ids(tokenizer: TextTokenizer) -> None:
    token_ids = await tokenizer.encode("<|start|>a<|end|>", add_special_tokens=False)
    assert token_ids[0] == 0
    assert token_ids[-1] == EOS


async def test_many_tokens_are_decoded_the_way_that_lets_others_run(
    tokenizer: TextTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    class OnlyBatches:
        """A tokenizer whose other ways hold the interpreter's lock to the end."""

        decode_batch = staticmethod(tokenizer.fast.decode_batch)

    text = "block " * THREAD_THRESHOLD_TOKENS
    token_ids = await tokenizer.encode(text, add_special_tokens=False)
    assert token_ids == tuple(tokenizer.fast.encode(text).ids)
    monkeypatch.setattr(tokenizer, "fast", OnlyBatches())
    assert await tokenizer.decode(token_ids) == text


def test_token_bytes_are_exact_for_parts_of_characters(tokenizer: TextTokenizer) -> None:
    for text in ("ab ö 🙂", "the mesh"):
        token_ids = tokenizer.fast.encode(text).ids
        assert b"".join(tokenizer.token_bytes(token) for token in token_ids) == text.encode()
    assert tokenizer.token_bytes(EOS) == b"<|end|>"


def test_token_bytes_keep_spaces_that_decoders_strip() -> None:
    words = ["<unk>", "true", "\u2581true", "\u2581", "\u2581\u2581", "<0xC3>", "<0xB6>"]
    vocab = {word: token_id for token_id, word in enumerate(words)}
    fast = tokenizers.Tokenizer(models.BPE(vocab, [], unk_token="<unk>", byte_fallback=True))
    # As in the files of Llama 2 and Mistral.
    strip = decoders.Strip(" ", 1, 0)
    fast.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), strip]
    )
    read = TextTokenizer(fast, ChatTemplate("", {})).token_bytes
    found = [read(token_id) for token_id in range(1, len(words))]
    assert found == [b"true", b" true", b" ", b"  ", b"\xc3", b"\xb6"]


def test_a_mark_for_a_space_may_stand_for_itself() -> None:
    fast = tokenizers.Tokenizer(models.WordLevel({"\u2581": 0}, unk_token="\u2581"))
    read = TextTokenizer(fast, ChatTemplate("", {})).token_bytes
    assert read(0) == "\u2581".encode()


_JSON = '{"a": 1, "b": "\\u00e9"}'


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("{{ bos_token }}{{ messages[0]['content'] }}", "<s>hi"),
        (
            "{% for m in messages %}{% if m.role == 'user' %}x{% break %}{% endif %}{% endfor %}",
            "x",
        ),
        ("{{ messages[0] | tojson }}", '{"role": "user", "content": "hi"}'),
        ("{{ {'b': 'é', 'a': 1} | tojson(ensure_ascii=True, sort_keys=True) }}", _JSON),
        ("{% generation %}{{ messages[0].role }}{% endgeneration %}.", "user."),
        ("{{ flag }}", "True"),
    ],
)
def test_template_features(source: str, expected: str) -> None:
    template = ChatTemplate(source, {"bos_token": "<s>"})
    assert template.render(MESSAGES, arguments={"flag": True}) == expected


def test_template_has_the_time() -> None:
    assert ChatTemplate("{{ strftime_now('%Y') }}", {}).render(MESSAGES).isdigit()


@pytest.mark.parametrize(
    "source",
    [
        "{{ raise_exception('roles must alternate') }}",
        "{{ messages.append(1) }}",  # the sandbox does not let templates change values
        "{{ messages.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages + 1 }}",
    ],
)
def test_template_refuses(source: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        ChatTemplate(source, {}).render(MESSAGES)
    assert caught.value.param == "messages"


def test_model_without_template() -> None:
    with pytest.raises(InvalidRequestError, match="no chat template"):
        ChatTemplate("", {}).render(MESSAGES)


def test_broken_template_is_found_at_start() -> None:
    with pytest.raises(CheckpointError, match="compiled"):
        ChatTemplate("{% if %}", {})


def test_template_in_tokenizer_config(tmp_path: Path) -> None:
    write_model(tmp_path)
    (tmp_path / "chat_template.jinja").unlink()
    settings: dict[str, Any] = {
        "bos_token": {"content": "<b>"},
        "chat_template": [{"name": "default", "template": "{{ bos_token }}!"}],
    }
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    assert load_tokenizer(tmp_path).chat.render(MESSAGES) == "<b>!"


def test_clients_are_told_known_settings_and_no_paths(tmp_path: Path) -> None:
    write_model(tmp_path)
    settings = {
        "eos_token": {"content": "<|end|>", "special": True},
        "model_max_length": 512,
        "name_or_path": "/home/somebody/model",
        "special_tokens_map_file": "/home/somebody/map.json",
        "token": "hub-token",
    }
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    info = load_tokenizer(tmp_path).info
    assert set(info) == {"eos_token", "model_max_length", "chat_template"}
    assert info["eos_token"] == "<|end|>"


def test_sampling_defaults_only_when_asked_for(model_folder: Path) -> None:
    assert load_tokenizer(model_folder).sampling_defaults == {}
    loaded = load_tokenizer(model_folder, use_generation_config=True)
    assert loaded.sampling_defaults == {"temperature": 0.25, "top_k": 7}
    assert loaded.max_model_len == 512


async def test_prompts_are_neither_cut_nor_filled_up_as_in_training(tmp_path: Path) -> None:
    made = write_model(tmp_path)
    made.enable_truncation(3)
    made.enable_padding(length=9)
    made.save(str(tmp_path / "tokenizer.json"))
    loaded = load_tokenizer(tmp_path)
    assert len(await loaded.encode("the mesh moves blocks", add_special_tokens=True)) > 3
    assert len(await loaded.encode("a", add_special_tokens=True)) == 1


def test_folder_without_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"tokenizer\.json is missing"):
        load_tokenizer(tmp_path)


def test_malformed_file(tmp_path: Path) -> None:
    write_model(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"config\.json"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize(
    "source",
    [
        "{% for i in range(10**9) %}x{% endfor %}",
        "{{ messages[0].content.split('') }}",
        "{{ 1 / (messages|length - 1) }}",
        "{{ messages[0].content.index('z') }}",
        "{{ '{1}'.format(messages[0].content) }}",
        "{% for a, b in [[1, 2, 3]] %}{% endfor %}",
        "{{ ''.__class__.__mro__ }}",
        "{{ cycler.__init__.__globals__ }}",
        "{% include '/etc/passwd' %}",
        "{% import '/etc/passwd' as x %}",
        "{{ messages.append(1) }}",
        "{{ messages|tojson(indent='x') }}{{ cycler|tojson }}",
    ],
)
def test_a_template_reaches_nothing_and_what_fails_in_it_is_the_callers_error(source: str) -> None:
    with pytest.raises(InvalidRequestError, match="does not accept these messages"):
        ChatTemplate(source, {}).render(MESSAGES)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("tokenizer.json", "{}"),
        ("tokenizer.json", "[" * 100_000),
        ("tokenizer_config.json", "[]"),
        ("tokenizer_config.json", "[" * 100_000),
        ("config.json", "\0"),
        ("config.json", "\udcff"),  # a byte that is no UTF-8
        ("chat_template.jinja", "\udcff"),
    ],
)
def test_files_that_are_none_are_named(name: str, text: str, tmp_path: Path) -> None:
    write_model(tmp_path)
    (tmp_path / name).write_text(text, errors="surrogateescape")
    with pytest.raises(CheckpointError, match=name):
        load_tokenizer(tmp_path)
