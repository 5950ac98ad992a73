from __future__ import annotations

from pathlib import Path

import pytest

from services.gateway.text.tokenizer import TextTokenizer, load_tokenizer
from tests.unit.gateway.tiny_model import write_model


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    write_model(folder)
    return folder


@pytest.fixture(scope="session")
def tokenizer(model_folder: Path) -> TextTokenizer:
    return load_tokenizer(model_folder)
