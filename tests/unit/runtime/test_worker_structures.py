from __future__ import annotations

from pathlib import Path

from kvmesh.core.types import Structure, StructureKind
from kvmesh.engine.fake import FakeRunner
from kvmesh.runtime.worker_structures import load_structures
from tests.unit.gateway.tiny_model import make_tokenizer


def test_a_folder_with_a_tokenizer_has_structures(tmp_path: Path) -> None:
    spec = FakeRunner(num_blocks=1).spec
    assert load_structures(None, spec) is None
    assert load_structures(tmp_path, spec) is None
    make_tokenizer().save(str(tmp_path / "tokenizer.json"))
    structures = load_structures(tmp_path, spec)
    assert structures is not None
    allowed = structures.constraint(Structure(StructureKind.LARK, 'start: "a"')).allowed([])
    assert allowed.shape == (spec.vocab_size,)
    assert allowed.any()
    structures.close()


def test_a_tokenizer_of_an_unknown_kind_does_not_stop_the_worker(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    assert load_structures(tmp_path, FakeRunner(num_blocks=1).spec) is None
