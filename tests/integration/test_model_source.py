"""A model by its name: from the cache, else from a hub, else a line that says what to do."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from kvmesh.core.errors import CheckpointError
from kvmesh.engine.model_source import find_model, is_hub_name, served_name
from tests.hub_server import COMMIT, Hub, hub_server
from tests.unit.cli.tiny_folder import write_folder
from tests.unit.engine.tiny_checkpoint import tensors

NAME = "an-org/a-model"
FIND = """
import sys
from kvmesh.core.errors import KvMeshError
from kvmesh.engine.model_source import find_model
try:
    print(find_model(sys.argv[1], has_weights=sys.argv[2] == "all"))
except KvMeshError as error:
    sys.exit(f"refused: {error}")
"""


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[Hub]:
    folder = write_folder(tmp_path / "source")
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    (folder / "pytorch_model.bin").write_bytes(bytes(5000))
    (folder / "consolidated.safetensors").write_bytes(bytes(5000))
    (folder / "onnx").mkdir()
    (folder / "onnx" / "config.json").write_text("{}")
    other = write_folder(tmp_path / "other", model_type="bert")
    with hub_server({NAME: folder, "an-org/bert": other}) as served:
        yield served


def found(
    hub: Hub, cache: Path, name: str = NAME, parts: str = "all", **env: str
) -> subprocess.CompletedProcess[str]:
    """What a process of its own says, since the package reads its variables when it is loaded."""
    usual = {key: value for key, value in os.environ.items() if not key.startswith("HF_")}
    given = {"HF_HOME": str(cache), "HF_ENDPOINT": hub.url, "HF_HUB_DOWNLOAD_TIMEOUT": "5"} | env
    argv = [sys.executable, "-c", FIND, name, parts]
    return subprocess.run(
        argv, env=usual | given, capture_output=True, text=True, check=False, timeout=50
    )


def refusal(done: subprocess.CompletedProcess[str]) -> str:
    assert done.returncode == 1
    [line] = [line for line in done.stderr.splitlines() if line.startswith("refused: ")]
    assert "Traceback" not in done.stderr
    assert done.stderr.endswith(f"{line}\n")
    return line


def test_a_model_is_downloaded_once_and_only_what_is_needed(hub: Hub, tmp_path: Path) -> None:
    first = found(hub, tmp_path / "cache")
    folder = Path(first.stdout.strip())
    assert folder.name == COMMIT, first.stderr
    names = ["chat_template.jinja", "config.json", "model.safetensors", "tokenizer.json"]
    assert sorted(hub.files_sent()) == names
    assert sorted(path.name for path in folder.iterdir()) == names
    weights = hub.models[NAME] / "model.safetensors"
    assert (folder / "model.safetensors").read_bytes() == weights.read_bytes()
    hub.asked.clear()
    again = found(hub, tmp_path / "cache")
    assert (again.stdout, hub.asked) == (first.stdout, [])


def test_text_alone_needs_no_weights_and_who_computes_gets_them_later(
    hub: Hub, tmp_path: Path
) -> None:
    text = found(hub, tmp_path, parts="text")
    assert text.returncode == 0, text.stderr
    assert "model.safetensors" not in hub.files_sent()
    assert found(hub, tmp_path).returncode == 0
    assert hub.files_sent().count("model.safetensors") == 1


def pad(folder: Path) -> None:
    """Makes weights larger than the pieces that the package writes, of 10 MB."""
    weights = tensors() | {"pad": torch.zeros(6 << 20)}
    save_file(weights, folder / "model.safetensors")


def test_a_download_that_was_cut_goes_on_where_it_ended(hub: Hub, tmp_path: Path) -> None:
    pad(hub.models[NAME])
    hub.cuts = 1
    done = found(hub, tmp_path)
    assert done.returncode == 0, done.stderr
    ranges = [asked for _, path, asked in hub.asked if "model.safetensors" in path]
    assert any(each.startswith("bytes=") and each != "bytes=0-" for each in ranges)


def test_a_hub_that_goes_away_is_one_line_and_the_next_run_goes_on(
    hub: Hub, tmp_path: Path
) -> None:
    pad(hub.models[NAME])
    hub.cuts = 1000
    assert f"{NAME} cannot be downloaded" in refusal(found(hub, tmp_path))
    hub.cuts = 0
    hub.asked.clear()
    done = found(hub, tmp_path)
    assert done.returncode == 0, done.stderr
    assert hub.files_sent() == ["model.safetensors"]


def test_a_revision(hub: Hub, tmp_path: Path) -> None:
    done = found(hub, tmp_path, f"{NAME}@{COMMIT}")
    assert done.stdout.strip().endswith(COMMIT), done.stderr
    said = refusal(found(hub, tmp_path, f"{NAME}@nowhere"))
    assert "has no such revision" in said


def test_a_wrong_name(hub: Hub, tmp_path: Path) -> None:
    said = refusal(found(hub, tmp_path, "an-org/a-modle"))
    assert f"an-org/a-modle is no folder here and no model at {hub.url}" in said


def test_a_gated_model(hub: Hub, tmp_path: Path) -> None:
    hub.gated = frozenset({NAME})
    assert "HF_TOKEN" in refusal(found(hub, tmp_path))
    assert found(hub, tmp_path, HF_TOKEN="good").returncode == 0


def test_a_family_that_is_not_supported_is_said_before_its_weights_come(
    hub: Hub, tmp_path: Path
) -> None:
    assert "'bert' is not supported" in refusal(found(hub, tmp_path, "an-org/bert"))
    assert "model.safetensors" not in hub.files_sent()


def test_offline(hub: Hub, tmp_path: Path) -> None:
    said = refusal(found(hub, tmp_path, HF_HUB_OFFLINE="1"))
    assert "HF_HUB_OFFLINE forbids a download" in said
    assert hub.asked == []
    assert found(hub, tmp_path).returncode == 0
    hub.asked.clear()
    assert found(hub, tmp_path, HF_HUB_OFFLINE="1").returncode == 0
    assert hub.asked == []


def test_no_hub(hub: Hub, tmp_path: Path) -> None:
    gone = refusal(found(hub, tmp_path, HF_ENDPOINT="http://127.0.0.1:1"))
    assert "http://127.0.0.1:1 cannot be reached" in gone


def test_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models" / "here").mkdir(parents=True)
    assert not is_hub_name("models/here")
    assert is_hub_name("models/elsewhere")
    assert not any(map(is_hub_name, ("name", "/a/b", "./a/b", "a/b/c", "../b", "a b/c", "")))
    assert served_name("models/here") == "here"
    assert served_name("an-org/a-model@main") == "an-org/a-model"
    assert find_model("models/here") == Path("models/here")
    with pytest.raises(CheckpointError, match="name is no folder"):
        find_model("name")
