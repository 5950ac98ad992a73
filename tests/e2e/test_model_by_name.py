"""`kvmesh up --model org/name`: one download for all processes, served by that name."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models

from kvmesh.cli.stack_state import CHECKOUT
from tests.hub_server import hub_server
from tests.unit.cli.tiny_folder import write_folder

NAME = "an-org/a-model"
ASK = """
import json, os, urllib.request
url = os.environ["KVMESH_URL"] + "/v1/"
body = {"model": "an-org/a-model", "prompt": [1, 2, 3], "max_tokens": 4, "return_token_ids": True}
head = {"content-type": "application/json"}
asked = urllib.request.Request(url + "completions", json.dumps(body).encode(), head)
for request in (url + "models", asked):
    print(json.dumps(json.load(urllib.request.urlopen(request))))
"""


@pytest.mark.timeout(180)
def test_a_stack_from_a_name(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "source", eos_token_id=None)
    words = {f"word{number}": number for number in range(64)}
    Tokenizer(models.WordLevel(words, unk_token="word0")).save(str(folder / "tokenizer.json"))
    (tmp_path / "ask.py").write_text(ASK)
    usual = {key: value for key, value in os.environ.items() if not key.startswith("KVMESH_")}
    with hub_server({NAME: folder}) as hub:
        given = {"HF_HOME": str(tmp_path / "cache"), "HF_ENDPOINT": hub.url}
        flags = ["--model", NAME, "--prefill", "1", "--decode", "1", "--port", "0"]
        flags += ["--num-blocks", "16", "--state-dir", str(tmp_path / "state")]
        run = f"{sys.executable} {tmp_path / 'ask.py'}"
        done = subprocess.run(
            [sys.executable, "-m", "kvmesh.cli", "up", *flags, "--run", run],
            cwd=CHECKOUT,
            env=usual | given,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        assert f'"id": "{NAME}"' in done.stdout
        assert '"token_ids": [' in done.stdout
        assert hub.files_sent().count("model.safetensors") == 1
