"""What is wrong is said by `kvmesh up` in one line, at once, and before any process is started."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple
from urllib.parse import urlsplit

import pytest
import redis
import torch
from safetensors.torch import save_file

from kvmesh.cli.certs import main as make_certs
from kvmesh.cli.stack_state import CHECKOUT, hold_state
from tests.redis_server import redis_process
from tests.unit.cli.tiny_folder import write_folder

CPU_S = 4.0
"""Of one command, interpreter included; on an idle machine it takes no longer by the clock."""


class Place:
    """What a case may use: a good model folder, and things that last as long as the command."""

    def __init__(self, folder: Path, certs: Path, stack: ExitStack) -> None:
        self.folder = folder
        self.certs = certs
        self.model = write_folder(folder / "model")
        self.state = folder / "state"
        self._stack = stack

    def remove(self, name: str) -> None:
        (self.model / name).unlink()

    def write(self, name: str, text: str) -> None:
        (self.model / name).write_text(text)

    def change_config(self, **changes: object) -> None:
        config = json.loads((self.model / "config.json").read_text())
        self.write("config.json", json.dumps(config | changes))

    def listen(self) -> int:
        """A port that somebody listens on who says nothing."""
        server = self._stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        port: int = server.getsockname()[1]
        return port

    def locked_redis(self) -> int:
        """Port of a Redis of its own that asks for a password."""
        process = self._stack.enter_context(redis_process(self.folder))
        with redis.Redis.from_url(process.url) as client:
            client.config_set("requirepass", "right")
        port = urlsplit(process.url).port
        assert port is not None
        return port

    def hold(self) -> None:
        """As if a stack ran here."""
        self._stack.enter_context(hold_state(self.state))


class Case(NamedTuple):
    """One bad input.

    Attributes:
        said: pattern of the line.
        arrange: makes it bad; gives more flags.
    """

    said: str
    flags: tuple[str, ...] = ()
    env: Mapping[str, str] = MappingProxyType({})
    arrange: Callable[[Place], tuple[str, ...] | None] = lambda _place: None


def _truncate(place: Place) -> None:
    with (place.model / "model.safetensors").open("r+b") as file:
        file.truncate(2000)


def _only_bin(place: Place) -> None:
    (place.model / "model.safetensors").rename(place.model / "pytorch_model.bin")


def _other_tokenizer(place: Place) -> None:
    (place.model / "tokenizer.json").rename(place.model / "tokenizer.model")


def _lost_shard(place: Place) -> None:
    index = {"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}
    place.write("model.safetensors.index.json", json.dumps(index))
    (place.model / "model.safetensors").rename(place.model / "model-1.safetensors")


def _quantized(place: Place) -> None:
    weights = {"model.norm.weight": torch.ones(4).to(torch.float8_e4m3fn)}
    save_file(weights, place.model / "model.safetensors")


def _pointer(place: Place) -> None:
    place.write("model.safetensors", "version https://git-lfs.github.com/spec/v1\noid sha256:0\n")


def _tls(cert: str, key: str, ca: str = "") -> dict[str, str]:
    names = {"CERT": cert, "KEY": key, "CA": ca}
    return {f"KVMESH_DATA__TLS__{name}": f"CERTS/{file}" for name, file in names.items() if file}


def _empty(place: Place) -> tuple[str, ...]:
    (place.folder / "empty").mkdir()
    return ("--model", str(place.folder / "empty"))


def _under_a_file(place: Place) -> tuple[str, ...]:
    (place.folder / "file").touch()
    return ("--state-dir", str(place.folder / "file" / "state"))


def _taken(flag: str) -> Callable[[Place], tuple[str, ...]]:
    return lambda place: (flag, str(place.listen()))


def _silent_redis(place: Place) -> tuple[str, ...]:
    return ("--redis-url", f"redis://127.0.0.1:{place.listen()}")


def _locked_redis(place: Place) -> tuple[str, ...]:
    return ("--redis-url", f"redis://:wrong@127.0.0.1:{place.locked_redis()}/0")


CASES = {
    "unknown-flag": Case(r"did you mean --prefill\?", ("--prefil", "3")),
    "no-workers": Case("--decode: 0 is less than 1", ("--decode", "0")),
    "not-a-number": Case("--decode: 'x' is not a whole number", ("--decode", "x")),
    "no-port": Case("99999 is not a port", ("--port", "99999")),
    "no-time": Case("0 is not above 0", ("--start-timeout", "0")),
    "unknown-engine": Case("--engine: invalid choice", ("--engine", "tch")),
    "unknown-dtype": Case("--dtype: invalid choice", ("--dtype", "int8")),
    "flag-in-environment": Case("KVMESH_PORT: 'http' is not", env={"KVMESH_PORT": "http"}),
    "no-device": Case("'mps' is no device", ("--device", "mps")),
    "missing-device": Case("there is no CUDA device", ("--device", "cuda")),
    "device-out-of-range": Case("there is no CUDA device", ("--device", "cuda:99")),
    "other-host": Case("--host", ("--host", "192.0.2.1")),
    "taken-port": Case("is taken; choose another with --port", arrange=_taken("--port")),
    "taken-grpc-port": Case("another with --grpc-port", arrange=_taken("--grpc-port")),
    "taken-console-port": Case("another with --console-port", arrange=_taken("--console-port")),
    "redis-without-scheme": Case("is not redis://", ("--redis-url", "db:6379")),
    "redis-not-a-url": Case("redis://HOST:PORT", ("--redis-url", "redis://:sec/ret@host")),
    "redis-not-there": Case("nothing accepts", ("--redis-url", "redis://127.0.0.1:1")),
    "redis-socket-not-there": Case("nothing accepts", ("--redis-url", "unix:///no/redis.sock")),
    "redis-that-is-silent": Case("start it, or correct the URL", arrange=_silent_redis),
    "redis-wrong-password": Case("set KVMESH_REDIS__PASSWORD", arrange=_locked_redis),
    "state-under-a-file": Case("--state-dir", arrange=_under_a_file),
    "state-not-writable": Case("--state-dir", ("--state-dir", "/proc/self/state")),
    "state-held": Case("a stack runs already", arrange=Place.hold),
    "too-little-memory": Case("lower --num-blocks", ("--num-blocks", "100000000")),
    "no-command": Case("no-such-program", ("--run", "no-such-program --now")),
    "no-secret": Case("/no/secret", ("--secret-file", "/no/secret")),
    "no-folder": Case("is no folder; name a model", ("--model", "/no/model")),
    "offline": Case("HF_HUB_OFFLINE", ("--model", "an-org/a-model"), {"HF_HUB_OFFLINE": "1"}),
    "empty-folder": Case("lacks config.json", arrange=_empty),
    "broken-config": Case("not valid JSON", arrange=lambda at: at.write("config.json", "{")),
    "config-of-a-list": Case("JSON object", arrange=lambda at: at.write("config.json", "[]")),
    "unsupported-family": Case(
        "'bert' is not supported; .*docs/adding-a-model.md",
        arrange=lambda at: at.change_config(model_type="bert"),
    ),
    "mistyped-family": Case(
        "'lama' is not supported; llama", arrange=lambda at: at.change_config(model_type="lama")
    ),
    "no-family": Case("names no family", arrange=lambda at: at.change_config(model_type=None)),
    "quantized-config": Case(
        "quantization_config", arrange=lambda at: at.change_config(quantization_config={"bits": 4})
    ),
    "config-of-text": Case(
        "hidden_size must be a number", arrange=lambda at: at.change_config(hidden_size="wide")
    ),
    "no-tokenizer": Case("lacks tokenizer.json", arrange=lambda at: at.remove("tokenizer.json")),
    "template-with-a-mistake": Case(
        "chat template.*line 1.*copy or download",
        arrange=lambda place: place.write("chat_template.jinja", "{% for x in messages %}"),
    ),
    "other-tokenizer": Case("save_pretrained", arrange=_other_tokenizer),
    "broken-tokenizer": Case(
        "is no tokenizer", arrange=lambda at: at.write("tokenizer.json", "{}")
    ),
    "no-weights": Case("model.safetensors", arrange=lambda at: at.remove("model.safetensors")),
    "truncated-weights": Case(r"truncated, 2000 of \d+ bytes", arrange=_truncate),
    "weights-of-another-format": Case("pytorch_model.bin is not", arrange=_only_bin),
    "weights-that-are-a-pointer": Case("git lfs pull", arrange=_pointer),
    "missing-shard": Case("missing weight files: model-2", arrange=_lost_shard),
    "broken-index": Case(
        "not a valid weight index",
        arrange=lambda at: at.write("model.safetensors.index.json", "{"),
    ),
    "quantized-weights": Case("F8_E4M3", arrange=_quantized),
    "unknown-option": Case(
        r"did you mean KVMESH_ENGINE__NUM_BLOCKS\?", env={"KVMESH_ENGINE__NUM_BLOKS": "8"}
    ),
    "unknown-section": Case(
        r"did you mean KVMESH_ENGINE__NUM_BLOCKS\?", env={"KVMESH_ENGIN__NUM_BLOCKS": "8"}
    ),
    "unknown-twin": Case(r"did you mean KVMESH_PREFILL\?", env={"KVMESH_PREFIL": "1"}),
    "option-of-another-type": Case(
        "must be a number, got 'long'", env={"KVMESH_HTTP__STALL_TIMEOUT_S": "long"}
    ),
    "no-config-file": Case("/no/file.toml", env={"KVMESH_CONFIG": "/no/file.toml"}),
    "tls-of-services": Case("in plain text", env={"KVMESH_SERVER__TLS__CERT": "x.pem"}),
    "tls-file-missing": Case("data.tls.cert: .*cannot be read", env=_tls("none.pem", "none.key")),
    "tls-key-of-another": Case(
        "is not the key of the certificate", env=_tls("decode.pem", "prefill.key")
    ),
    "tls-files-swapped": Case("holds no certificate", env=_tls("decode.key", "decode.pem")),
    "tls-of-another-ca": Case(
        "would be refused by peers that trust data.tls.ca",
        env=_tls("decode.pem", "decode.key", "other/ca.pem"),
    ),
}


@pytest.fixture(scope="module")
def certs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Certificates of services, and of another CA in `other`."""
    folder = tmp_path_factory.mktemp("certs")
    for out in (folder, folder / "other"):
        assert make_certs(["--out", str(out)]) == 0
    return folder


@contextmanager
def place_of(folder: Path, certs: Path) -> Iterator[Place]:
    with ExitStack() as stack:
        yield Place(folder, certs, stack)


@pytest.mark.parametrize("name", CASES)
def test_it_is_said_in_one_line_and_nothing_starts(name: str, tmp_path: Path, certs: Path) -> None:
    case = CASES[name]
    usual = {key: value for key, value in os.environ.items() if not key.startswith("KVMESH_")}
    given = {key: value.replace("CERTS", str(certs)) for key, value in case.env.items()}
    env = usual | {"CUDA_VISIBLE_DEVICES": "", "HF_HOME": str(tmp_path / "hub")} | given
    with place_of(tmp_path, certs) as place:
        more = case.arrange(place) or ()
        flags = ["--port", "0", "--model", str(place.model), "--state-dir", str(place.state)]
        argv = [sys.executable, "-m", "kvmesh.cli", "up", *flags, *case.flags, *more]
        before = os.times()
        done = subprocess.run(
            argv, env=env, cwd=CHECKOUT, capture_output=True, text=True, timeout=50, check=False
        )
        after = os.times()
    assert done.returncode == 2, done.stderr
    [line] = done.stderr.splitlines()
    assert line.startswith("kvmesh up: ")
    assert re.search(case.said, line), line
    assert len(line) < 400
    assert "Error(" not in line
    assert "sec/ret" not in line
    assert done.stdout == ""
    assert not (place.state / "logs").exists()
    used = after.children_user + after.children_system
    assert used - before.children_user - before.children_system < CPU_S


def test_there_are_as_many_as_are_promised() -> None:
    assert len(CASES) >= 40
