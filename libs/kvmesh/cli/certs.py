"""`kvmesh certs`: a development CA and a certificate for every service, for TLS and mTLS.

For trying and testing; in production certificates come from whatever issues them there.
Tests: tests/unit/cli/test_certs.py, tests/e2e/test_mtls.py.
"""

from __future__ import annotations

import datetime
import ipaddress
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from kvmesh.cli.flags import add_flag, new_parser, positive_int
from kvmesh.core.errors import ConfigError

SERVICES = ("gateway", "scheduler", "kvmanager", "prefill", "decode")
PUBLIC = "public"
"""Certificate of the gateway's HTTP port: it opens no door inside the mesh."""

_SKEW = datetime.timedelta(minutes=5)
"""Clocks of two hosts may differ by this much."""


@dataclass(frozen=True, slots=True)
class Issued:
    """A certificate and its private key."""

    cert: x509.Certificate
    key: ec.EllipticCurvePrivateKey


def make_ca(days: int) -> Issued:
    """A certificate authority of its own."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = _name("kvmesh development CA")
    usage = x509.KeyUsage(
        digital_signature=True,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=True,
        crl_sign=True,
        encipher_only=False,
        decipher_only=False,
    )
    cert = (
        _dated(name, name, key, days)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(usage, critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .sign(key, hashes.SHA256())
    )
    return Issued(cert, key)


def issue(ca: Issued, service: str, hosts: Sequence[str], days: int) -> Issued:
    """A certificate for one service.

    Args:
        service: goes into the subject; `PUBLIC` is for servers only, all others are for both ends.
        hosts: names and addresses that peers reach it by.
    """
    key = ec.generate_private_key(ec.SECP256R1())
    uses = [ExtendedKeyUsageOID.SERVER_AUTH]
    if service != PUBLIC:
        uses.append(ExtendedKeyUsageOID.CLIENT_AUTH)
    authority = x509.AuthorityKeyIdentifier.from_issuer_public_key(ca.key.public_key())
    cert = (
        _dated(_name(service), ca.cert.subject, key, days)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(x509.SubjectAlternativeName([_host(each) for each in hosts]), critical=False)
        .add_extension(x509.ExtendedKeyUsage(uses), critical=False)
        .add_extension(authority, critical=False)
        .sign(ca.key, hashes.SHA256())
    )
    return Issued(cert, key)


def write(issued: Issued, folder: Path, name: str) -> None:
    """Writes `name.pem` and `name.key`; the key for its owner alone."""
    (folder / f"{name}.pem").write_bytes(issued.cert.public_bytes(serialization.Encoding.PEM))
    pem = issued.key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )
    key_path = folder / f"{name}.key"
    key_path.unlink(missing_ok=True)  # one that is there may be readable by others
    with os.fdopen(os.open(key_path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(pem)


def read_ca(folder: Path) -> Issued | None:
    """The CA that an earlier run made; None without one.

    Raises:
        ConfigError: its files cannot be used.
    """
    key_path = folder / "ca.key"
    if not key_path.exists():
        return None
    try:
        key = serialization.load_pem_private_key(key_path.read_bytes(), None)
        cert = x509.load_pem_x509_certificate((folder / "ca.pem").read_bytes())
    except (OSError, ValueError) as error:
        raise ConfigError(f"{folder}: the CA cannot be used: {error}") from error
    if not isinstance(key, ec.EllipticCurvePrivateKey) or key.public_key() != cert.public_key():
        raise ConfigError(f"{folder}: ca.key is not the key of ca.pem")
    return Issued(cert, key)


def _name(common_name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common_name)])


def _dated(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePrivateKey, days: int
) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _SKEW)
        .not_valid_after(now + datetime.timedelta(days=days))
    )


def _host(text: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(text))
    except ValueError:
        return x509.DNSName(text)


def main(argv: Sequence[str]) -> int:
    """Writes the files; a CA that is there is used again."""
    parser = new_parser(
        "kvmesh certs",
        "Makes a development CA and certificates for all services, good for mTLS.",
        "example: kvmesh certs --out certs --hosts 127.0.0.1,localhost,node-1.example",
    )
    add_flag(parser, "--out", "certs", "folder for the files", metavar="FOLDER")
    add_flag(
        parser,
        "--hosts",
        "127.0.0.1,::1,localhost",
        "names and addresses of all hosts",
        metavar="LIST",
    )
    add_flag(
        parser, "--services", ",".join((*SERVICES, PUBLIC)), "whom to make one for", metavar="LIST"
    )
    add_flag(parser, "--days", 30, "how long they are valid", kind=positive_int)
    arguments = parser.parse_args(argv)
    folder = Path(arguments.out)
    hosts = [each.strip() for each in arguments.hosts.split(",") if each.strip()]
    if not hosts:
        parser.error("--hosts names nobody; a certificate is for the names that peers use")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        ca = read_ca(folder)
        if ca is None:
            ca = make_ca(arguments.days)
            write(ca, folder, "ca")
        for service in arguments.services.split(","):
            write(issue(ca, service.strip(), hosts, arguments.days), folder, service.strip())
    except OSError as error:
        raise ConfigError(f"{folder}: {error.strerror}") from error
    print(f"{folder}: ca.pem, and NAME.pem with NAME.key for {arguments.services}")
    print(
        "every service: --server.tls.ca ca.pem --server.tls.cert NAME.pem --server.tls.key NAME.key"
    )
    return 0
