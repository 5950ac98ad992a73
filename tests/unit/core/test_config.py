from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest

from kvmesh.core.config import format_config, load_config, option, options_of, positive, secret
from kvmesh.core.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Inner:
    """Inner."""

    port: int = option(80, "a port")
    wait_s: float = positive(1.5, "seconds")
    is_on: bool = option(False, "a switch")
    api_key: str = secret("a secret")


@dataclass(frozen=True, slots=True)
class Outer:
    """Outer."""

    name: str = option("x", "a name")
    limit: int | None = option(None, "a limit")
    room: float = option(-1.0, "-1: as much as there is")
    inner: Inner = option(Inner, "")


def test_later_sources_win(tmp_path: Path) -> None:
    file = tmp_path / "c.toml"
    file.write_text('name = "file"\n[inner]\nport = 1\nwait_s = 2\n')
    environ = {"KVMESH_INNER__PORT": "2", "KVMESH_NAME": "env", "KVMESH_INNER__IS_ON": "yes"}
    config = load_config(
        Outer, ["--config", str(file), "--inner.port", "3", "--limit", "9"], environ=environ
    )
    assert config == Outer("env", 9, inner=Inner(3, 2.0, True))


def test_defaults() -> None:
    assert load_config(Outer, environ={}) == Outer()


def test_every_option_has_a_flag_and_an_env_twin() -> None:
    leaves = {leaf.flag: leaf.env for leaf in options_of(Outer)}
    assert leaves["--inner.wait-s"] == "KVMESH_INNER__WAIT_S"
    assert leaves[""] == "KVMESH_INNER__API_KEY"  # the secret
    assert len(leaves) == 7


def test_unknown_key_in_a_file_names_the_known_ones(tmp_path: Path) -> None:
    file = tmp_path / "c.toml"
    file.write_text("[inner]\nprot = 1\n")
    with pytest.raises(ConfigError, match=r"inner\.prot.*inner\.port"):
        load_config(Outer, environ={"KVMESH_CONFIG": str(file)})


@pytest.mark.parametrize(
    ("name", "value", "kind"),
    [
        ("KVMESH_INNER__PORT", "eighty", "a whole number"),
        ("KVMESH_INNER__IS_ON", "maybe", "true or false"),
        ("KVMESH_LIMIT", "1.5", "a whole number"),
        ("KVMESH_LIMIT", "-1", "at least 0, got -1"),
        ("KVMESH_ROOM", "-2", "at least -1, got -2"),
        ("KVMESH_ROOM", "nan", "a number"),
        ("KVMESH_INNER__WAIT_S", "0", "more than 0"),
        ("KVMESH_INNER__WAIT_S", "-1", "at least 0, got -1"),
    ],
)
def test_a_value_of_the_wrong_type_or_range_names_its_source(
    name: str, value: str, kind: str
) -> None:
    with pytest.raises(ConfigError, match=f"{name}.*must be {kind}"):
        load_config(Outer, environ={name: value})


def test_a_default_below_zero_may_be_said() -> None:
    assert load_config(Outer, environ={"KVMESH_ROOM": "-1"}).room == -1


@pytest.mark.parametrize("value", ["1.5", "true", "inf", "2026-01-01", "[1]"])
def test_what_a_file_says_is_no_whole_number_is_not_made_one(tmp_path: Path, value: str) -> None:
    file = tmp_path / "c.toml"
    file.write_text(f"limit = {value}\n")
    with pytest.raises(ConfigError, match="limit must be a whole number"):
        load_config(Outer, ["--config", str(file)], environ={})


def test_missing_file_is_a_clear_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        load_config(Outer, ["--config", str(tmp_path / "none.toml")], environ={})


def test_a_file_that_is_no_text_is_a_clear_error(tmp_path: Path) -> None:
    latin = tmp_path / "latin.toml"
    latin.write_bytes(b"# \xe9\n")
    with pytest.raises(ConfigError, match=r"latin\.toml: cannot be read: not UTF-8 at byte 2"):
        load_config(Outer, ["--config", str(latin)], environ={})


def test_printed_config_hides_secrets() -> None:
    text = format_config(Outer(inner=Inner(api_key="hunter2")))
    assert "inner.api_key = ***" in text
    assert "hunter2" not in text
    assert "inner.port = 80" in text


def test_a_misspelt_variable_of_a_known_section_is_an_error() -> None:
    with pytest.raises(ConfigError, match=r"KVMESH_INNER__PROT.*KVMESH_INNER__PORT"):
        load_config(Outer, environ={"KVMESH_INNER__PROT": "1"})
    # Other services' sections are none of our business.
    load_config(Outer, environ={"KVMESH_REDIS__URL": "x", "KVMESH_URL": "y"})


def test_printed_config_goes_to_standard_output(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        load_config(Outer, ["--print-config", "--name", "n"], environ={})
    assert stop.value.code == 0
    assert "name = 'n'" in capsys.readouterr().out


def test_a_secret_has_no_flag_but_a_file_and_an_env_twin(tmp_path: Path) -> None:
    with pytest.raises(SystemExit):
        load_config(Outer, ["--inner.api-key", "hunter2"], environ={})
    file = tmp_path / "c.toml"
    file.write_text('[inner]\napi_key = "hunter2"\n')
    assert load_config(Outer, ["--config", str(file)], environ={}).inner.api_key == "hunter2"
    environ = {"KVMESH_INNER__API_KEY": "hunter3"}
    assert load_config(Outer, environ=environ).inner.api_key == "hunter3"


def test_a_password_in_a_url_is_not_printed() -> None:
    text = format_config(Outer(name="rediss://user:hun:ter2@host:6379/0"))
    assert "rediss://user:***@host:6379/0" in text


@pytest.mark.parametrize("value", ["-2", "65536", "99999"])
def test_a_port_that_is_none_is_an_error(value: str) -> None:
    with pytest.raises(ConfigError, match=rf"--inner.port: inner.port: {value} is not a port"):
        load_config(Outer, ["--inner.port", value], environ={})


def test_an_unknown_flag_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        load_config(Outer, ["--nope"], environ={}, prog="test")
    assert stop.value.code == 2
    said = "test: unrecognized arguments: --nope; see `test --help`\n"
    assert capsys.readouterr().err == said
