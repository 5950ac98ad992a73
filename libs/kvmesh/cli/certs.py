"""`kvmesh certs`: makes a development CA and a certificate for every service, for TLS and mTLS.

For trials and tests; in production an existing authority issues the certificates.
Tests: tests/unit/cli/test_certs.py, tests/e2e/test_mtls.py.
"""

from __future__ import annotations

import argparse
import datetime
import ipaddress
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from kvmesh.cli.flags import add_flag, new_parser, positive_int
from kvmesh.core.errors import ConfigError
from kvmesh.core.named_values import listed

SERVICES = ("gateway", "scheduler", "kvmanager", "prefill", "decode")
PUBLIC = "public"
"""Name of the certificate of the gateway's HTTP port; it gives no access inside the mesh."""

_CA = "ca"
_SERVICE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_HOST = re.compile(r"[\w.*:-]+")
_MAX_DAYS = 36_500

_SKEW = datetime.timedelta(minutes=5)
"""Assumed maximum difference between the clocks of two hosts."""


@dataclass(frozen=True, slots=True)
class Issued:
    """A certificate and its private key."""

    cert: x509.Certificate
    key: ec.EllipticCurvePrivateKey


def make_ca(days: int) -> Issued:
    """Returns a new self-signed certificate authority."""
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
        _dated(name, name, key, _in_days(days))
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(usage, critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .sign(key, hashes.SHA256())
    )
    return Issued(cert, key)


def issue(ca: Issued, service: str, hosts: Sequence[str], days: int) -> Issued:
    """Returns a certificate for one service.

    Args:
        service: name in the subject; `PUBLIC` is for servers only, all others for both ends.
        hosts: names and addresses at which peers reach it.
        days: days of validity; at most those of the CA, after which no peer would accept it.
    """
    key = ec.generate_private_key(ec.SECP256R1())
    uses = [ExtendedKeyUsageOID.SERVER_AUTH]
    if service != PUBLIC:
        uses.append(ExtendedKeyUsageOID.CLIENT_AUTH)
    authority = x509.AuthorityKeyIdentifier.from_issuer_public_key(ca.key.public_key())
    until = min(_in_days(days), ca.cert.not_valid_after_utc)
    cert = (
        _dated(_name(service), ca.cert.subject, key, until)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(x509.SubjectAlternativeName([_host(each) for each in hosts]), critical=False)
        .add_extension(x509.ExtendedKeyUsage(uses), critical=False)
        .add_extension(authority, critical=False)
        .sign(ca.key, hashes.SHA256())
    )
    return Issued(cert, key)


def write(issued: Issued, folder: Path, name: str) -> None:
    """Writes `name.pem` and `name.key`; only the owner can read the key."""
    (folder / f"{name}.pem").write_bytes(issued.cert.public_bytes(serialization.Encoding.PEM))
    pem = issued.key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )
    key_path = folder / f"{name}.key"
    key_path.unlink(missing_ok=True)  # an existing file may be readable by others
    with os.fdopen(os.open(key_path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(pem)


def read_ca(folder: Path) -> Issued | None:
    """Returns the CA of an earlier run; None without one.

    Raises:
        ConfigError: its files cannot be used, or it has expired.
    """
    key_path = folder / "ca.key"
    if not key_path.exists():
        return None
    try:
        key = serialization.load_pem_private_key(key_path.read_bytes(), None)
        cert = x509.load_pem_x509_certificate((folder / "ca.pem").read_bytes())
    except (OSError, ValueError, TypeError) as error:  # an encrypted key is a TypeError
        raise ConfigError(f"{folder}: the CA cannot be used: {error}") from error
    if not isinstance(key, ec.EllipticCurvePrivateKey) or key.public_key() != cert.public_key():
        raise ConfigError(f"{folder}: ca.key is not the key of ca.pem")
    if cert.not_valid_after_utc <= _in_days(0):
        raise ConfigError(
            f"{folder}: the CA expired on {cert.not_valid_after_utc.date()}; remove ca.key and "
            "ca.pem, make all certificates again, and give every service its new files"
        )
    return Issued(cert, key)


def _name(common_name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common_name)])


def _in_days(days: int) -> datetime.datetime:
    return datetime.datetime.now(datetime.UTC) + datetime.timedelta(days=days)


def _dated(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePrivateKey, until: datetime.datetime
) -> x509.CertificateBuilder:
    begin = datetime.datetime.now(datetime.UTC) - _SKEW
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(begin)
        .not_valid_after(until)
    )


def _host(text: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(text))
    except ValueError:
        return x509.DNSName(text)


def host_list(raw: str) -> tuple[str, ...]:
    """Parses names and addresses, comma-separated."""
    hosts = listed(raw)
    if not hosts:
        raise argparse.ArgumentTypeError("the list is empty; give the hosts that peers connect to")
    for each in hosts:
        if not each.isascii():
            raise argparse.ArgumentTypeError(f"{each!r} is not in its ASCII form (xn--...)")
        if not _HOST.fullmatch(each):
            raise argparse.ArgumentTypeError(f"{each!r} is neither a name nor an address")
    return hosts


def service_list(raw: str) -> tuple[str, ...]:
    """Parses names of services, comma-separated; each is a subject and the name of two files."""
    services = tuple(each.strip() for each in raw.split(","))
    for each in services:
        if not _SERVICE.fullmatch(each):
            raise argparse.ArgumentTypeError(f"{each!r}: 1 to 64 letters, digits, dots, - or _")
        if each == _CA:
            raise argparse.ArgumentTypeError("'ca' is reserved for the CA itself")
    return services


def num_days(raw: str) -> int:
    """Parses a validity in days."""
    days = positive_int(raw)
    if days > _MAX_DAYS:
        raise argparse.ArgumentTypeError(f"{days} is more than {_MAX_DAYS}")
    return days


def main(argv: Sequence[str]) -> int:
    """Writes the files; an existing CA is used again."""
    parser = new_parser(
        "kvmesh certs",
        "Creates a development CA and certificates for all services, suitable for mTLS.",
        "example: kvmesh certs --out certs --hosts 127.0.0.1,localhost,node-1.example",
    )
    add_flag(parser, "--out", "certs", "folder to which the files are written", metavar="FOLDER")
    hosts, services = "127.0.0.1,::1,localhost", ",".join((*SERVICES, PUBLIC))
    text = "names and addresses of all hosts, comma-separated"
    add_flag(parser, "--hosts", hosts, text, kind=host_list, metavar="LIST")
    add_flag(
        parser,
        "--services",
        services,
        "services to create certificates for, comma-separated",
        kind=service_list,
        metavar="LIST",
    )
    add_flag(parser, "--days", 30, "validity in days", kind=num_days)
    arguments = parser.parse_args(argv)
    folder = Path(arguments.out)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        ca = read_ca(folder)
        if ca is None:
            ca = make_ca(arguments.days)
            write(ca, folder, _CA)
        for service in arguments.services:
            issued = issue(ca, service, arguments.hosts, arguments.days)
            write(issued, folder, service)
    except OSError as error:
        raise ConfigError(f"{folder}: {error.strerror}") from error
    end = issued.cert.not_valid_after_utc.date()
    made = ",".join(arguments.services)
    print(f"{folder}: ca.pem, and NAME.pem with NAME.key for {made}; valid until {end}")
    print(
        "every service: --server.tls.ca ca.pem --server.tls.cert NAME.pem --server.tls.key NAME.key"
    )
    return 0
