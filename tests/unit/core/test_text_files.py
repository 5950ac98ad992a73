from __future__ import annotations

from pathlib import Path

import pytest

from kvmesh.core.text_files import UNREADABLE, why_unreadable


def test_a_file_is_missing_a_folder_or_no_text(tmp_path: Path) -> None:
    latin = tmp_path / "latin"
    latin.write_bytes("ab\N{LATIN SMALL LETTER E WITH ACUTE}".encode("latin-1"))
    said = []
    for path in (tmp_path / "none", tmp_path, latin):
        with pytest.raises(UNREADABLE) as caught:
            path.read_text(encoding="utf-8")
        said.append(why_unreadable(caught.value))  # type: ignore[arg-type]
    assert said == ["No such file or directory", "Is a directory", "not UTF-8 at byte 2"]


def test_an_error_without_a_word_of_the_system_says_what_it_is() -> None:
    assert why_unreadable(OSError("Not a gzipped file")) == "Not a gzipped file"
