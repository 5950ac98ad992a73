from __future__ import annotations

from pathlib import Path

import pytest

from kvmesh.cli.__main__ import main
from kvmesh.metadata.tenants import digest_of, directory_from_json
from tests.redis_server import redis_process


def run(*arguments: str) -> int:
    return main(["keys", *arguments])


def test_create_list_limit_revoke(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "tenants.json"
    place = ("--tenants-file", str(file))
    assert run("create", "--tenant", "acme", "--requests-per-min", "60", *place) == 0
    said = capsys.readouterr()
    key = said.out.strip()
    assert key not in file.read_text()
    assert key not in said.err
    tenant = directory_from_json(file.read_bytes()).tenant_of(digest_of(key))
    assert tenant is not None
    assert (tenant.name, tenant.limits.requests_per_min) == ("acme", 60)

    assert run("limit", "--tenant", "acme", "--weight", "2.5", *place) == 0
    limits = directory_from_json(file.read_bytes()).tenants["acme"]
    assert (limits.requests_per_min, limits.weight) == (60, 2.5)

    key_id = digest_of(key)[:12]
    assert run("list", *place) == 0
    assert key_id in capsys.readouterr().out
    assert run("revoke", key_id, *place) == 0
    assert directory_from_json(file.read_bytes()).keys == {}
    assert run("revoke", key_id, *place) == 1
    said_last = capsys.readouterr().err.splitlines()[-1]
    assert f"no key has the id '{key_id}'; `kvmesh keys list` shows the ids" in said_last


def test_keys_in_redis(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with redis_process(tmp_path) as process:
        place = ("--redis-url", process.url)
        assert run("create", "--tenant", "acme", *place) == 0
        key = capsys.readouterr().out.strip()
        assert run("list", *place) == 0
        assert digest_of(key)[:12] in capsys.readouterr().out
    assert run("list", *place) == 1
    assert "kvmesh keys: " in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["create"], "needs --tenant"),
        (["revoke"], "needs the id"),
        (["create", "acme"], "did you mean --tenant acme?"),
        (["turn"], "invalid choice"),
        (["limit", "--tenant", "a"], "needs a limit"),
        (["limit", "--tenant", "a", "--weight", "much"], "'much' is not a number"),
    ],
)
def test_usage_errors(arguments: list[str], text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        run(*arguments)
    assert stop.value.code == 2
    assert text in capsys.readouterr().err


def test_values_that_are_not_allowed(tmp_path: Path) -> None:
    place = ("--tenants-file", str(tmp_path / "tenants.json"))
    assert run("create", "--tenant", "a b", *place) == 1
    assert run("limit", "--tenant", "a", "--weight", "0", *place) == 1
    assert not (tmp_path / "tenants.json").exists()


def test_a_tenant_that_is_not_there_is_not_made_by_a_limit(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "tenants.json"
    place = ("--tenants-file", str(file))
    assert run("list", *place) == 0
    assert "no tenants yet" in capsys.readouterr().err
    assert run("create", "--tenant", "acme", *place) == 0
    assert run("limit", "--tenant", "amce", "--weight", "2", *place) == 1
    assert "known: acme" in capsys.readouterr().err
    file.write_text("{")
    assert run("list", *place) == 1
    assert str(file) in capsys.readouterr().err
