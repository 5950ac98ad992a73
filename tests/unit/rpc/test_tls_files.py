from __future__ import annotations

import datetime
import ssl
import subprocess
import sys
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from kvmesh.cli.certs import main as certs
from kvmesh.core.errors import ConfigError
from kvmesh.rpc.tls_files import check_trust, load_tls_files


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Certificates of two CAs, in `one` and `two`."""
    folder = tmp_path_factory.mktemp("certs")
    for name in ("one", "two"):
        assert certs(["--out", str(folder / name)]) == 0
    return folder


def load(cert: object, key: object = "", ca: object = "") -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    load_tls_files(context, str(cert), str(key), str(ca), "server.tls")
    check_trust(str(cert), str(key), str(ca), "server.tls")


def refused(cert: object, key: object = "", ca: object = "") -> str:
    with pytest.raises(ConfigError) as refusal:
        load(cert, key, ca)
    text = str(refusal.value)
    assert "\n" not in text
    return text


def pair(folder: Path) -> tuple[Path, Path]:
    return folder / "gateway.pem", folder / "gateway.key"


def test_what_belongs_together_is_taken(made: Path, tmp_path: Path) -> None:
    cert, key = pair(made / "one")
    load(cert, key)
    load(cert, key, made / "one" / "ca.pem")
    both = tmp_path / "both.pem"
    both.write_text(cert.read_text() + key.read_text())
    load(both)


def test_a_missing_file_is_named_with_its_option(made: Path, tmp_path: Path) -> None:
    cert, key = pair(made / "one")
    gone = tmp_path / "gone.pem"
    assert refused(gone, key).startswith(f"server.tls.cert: {gone}: cannot be read: No such")
    assert refused(cert, gone).startswith(f"server.tls.key: {gone}: cannot be read")
    assert refused(cert, key, gone).startswith(f"server.tls.ca: {gone}: cannot be read")


def test_files_that_took_each_others_place(made: Path) -> None:
    cert, key = pair(made / "one")
    assert "gateway.key holds no certificate" in refused(key, cert)
    assert "gateway.pem holds no private key" in refused(cert, cert)
    assert "holds no private key; name its file with server.tls.key" in refused(cert)
    assert refused(cert, key, key).endswith("gateway.key holds no certificate (PEM)")


@pytest.mark.parametrize(("option", "said"), [("cert", "certificate"), ("key", "private key")])
def test_a_damaged_file(made: Path, tmp_path: Path, option: str, said: str) -> None:
    paths = dict(zip(("cert", "key"), pair(made / "one"), strict=True))
    lines = paths[option].read_text().splitlines()
    damaged = tmp_path / "damaged.pem"
    damaged.write_text("\n".join([lines[0], *lines[2:]]) + "\n")
    paths[option] = damaged
    text = refused(paths["cert"], paths["key"])
    assert text.startswith(f"server.tls.{option}: {damaged} is a damaged {said}")


def test_a_damaged_ca(made: Path, tmp_path: Path) -> None:
    damaged = tmp_path / "ca.pem"
    text = (made / "one" / "ca.pem").read_text().splitlines()
    damaged.write_text("\n".join([text[0], *text[2:]]) + "\n")
    cert, key = pair(made / "one")
    assert "ca.pem is a damaged certificate" in refused(cert, key, damaged)


def test_a_key_of_another_certificate(made: Path) -> None:
    cert, _ = pair(made / "one")
    _, key = pair(made / "two")
    assert "is not the key of the certificate in server.tls.cert" in refused(cert, key)


def test_a_certificate_of_another_ca(made: Path) -> None:
    text = refused(*pair(made / "one"), made / "two" / "ca.pem")
    assert "would be refused by peers that trust server.tls.ca" in text
    load(*pair(made / "one"))


def test_a_certificate_whose_time_is_over(tmp_path: Path) -> None:
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "old")])
    now = datetime.datetime.now(datetime.UTC)
    day = datetime.timedelta(days=1)
    cert = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(now - 2 * day)
        .not_valid_after(now - day)
        .sign(key, hashes.SHA256())
    )
    files = tmp_path / "old.pem", tmp_path / "old.key"
    pem = serialization.Encoding.PEM
    files[0].write_bytes(cert.public_bytes(pem))
    form, plain = serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    files[1].write_bytes(key.private_bytes(pem, form, plain))
    assert "old.pem: certificate has expired; make a new one" in refused(*files)


def test_a_key_with_a_passphrase_is_not_asked_for(made: Path, tmp_path: Path) -> None:
    cert, key = pair(made / "one")
    loaded = serialization.load_pem_private_key(key.read_bytes(), None)
    locked = tmp_path / "locked.key"
    form, secret = serialization.PrivateFormat.PKCS8, serialization.BestAvailableEncryption(b"x")
    locked.write_bytes(loaded.private_bytes(serialization.Encoding.PEM, form, secret))
    code = (
        "import ssl, sys; from kvmesh.rpc.tls_files import load_tls_files as load;"
        "load(ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), *sys.argv[1:], '', 'x')"
    )
    argv = [sys.executable, "-c", code, str(cert), str(locked)]
    done = subprocess.run(
        argv, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
    )
    assert "needs a passphrase" in done.stderr
