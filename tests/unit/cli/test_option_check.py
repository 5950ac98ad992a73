from __future__ import annotations

import re
from pathlib import Path

import pytest

from kvmesh.cli.__main__ import COMMANDS
from kvmesh.cli.flags import env_name, flag_twins
from kvmesh.cli.option_check import option_problems
from kvmesh.cli.up_flags import parser
from tests.unit.docs.programs import flags_of_command

ROOT = Path(__file__).parents[3]


def problems(**environ: str) -> list[str]:
    return option_problems(environ, flag_twins(parser()), ROOT)


def test_options_of_services_and_flags_of_up_are_known() -> None:
    assert (
        problems(
            KVMESH_ENGINE__NUM_BLOCKS="512",
            KVMESH_LIMITS__MAX_LOOKUPS="5",
            KVMESH_NUM_BLOCKS="512",
            KVMESH_SOMETHING_ELSE="1",
        )
        == []
    )


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("KVMESH_ENGINE__NUM_BLOKS", "1", "did you mean KVMESH_ENGINE__NUM_BLOCKS?"),
        ("KVMESH_ENGIN__NUM_BLOCKS", "1", "did you mean KVMESH_ENGINE__NUM_BLOCKS?"),
        ("KVMESH_ENGINE__NUM_BLOCKS", "many", "must be a whole number, got 'many'"),
        ("KVMESH_NUM_BLOKS", "1", "did you mean KVMESH_NUM_BLOCKS?"),
        ("KVMESH_CONFIG", "/nowhere.toml", "/nowhere.toml: cannot be read"),
        ("KVMESH_DATA__TLS__CERT", "/nowhere.pem", "data.tls.cert: /nowhere.pem: cannot be read"),
    ],
)
def test_what_is_wrong_is_one_line(name: str, value: str, said: str) -> None:
    [problem] = problems(**{name: value})
    assert said in problem


def test_no_other_command_has_a_flag_that_is_taken_for_a_mistake() -> None:
    names = {env_name(flag) for command in COMMANDS for flag in flags_of_command(command)}
    assert len(names) > 50
    assert problems(**dict.fromkeys(names, "")) == []


def test_no_variable_of_the_containers_is_taken_for_a_mistake() -> None:
    files = [ROOT / "docker-compose.yml", *(ROOT / "deploy").rglob("*.y*ml")]
    names = {name for file in files for name in re.findall(r"KVMESH_[A-Z_]+", file.read_text())}
    assert "KVMESH_MODEL_DIR" in names
    assert problems(**dict.fromkeys((each for each in names if "__" not in each), "")) == []
