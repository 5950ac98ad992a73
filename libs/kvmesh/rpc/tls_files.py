"""Checks TLS files and explains errors before a service listens.

OpenSSL reports "PEM lib" for a bad key as for a bad certificate, and accepts a certificate that no
peer will trust. Tests: tests/unit/rpc/test_tls_files.py.
"""

from __future__ import annotations

import re
import ssl
from pathlib import Path

from kvmesh.core.errors import ConfigError

_KEY = re.compile(r"-----BEGIN (?:\w+ )*PRIVATE KEY-----")
_CERTIFICATE = re.compile(r"-----BEGIN (?:TRUSTED |X509 )?CERTIFICATE-----")
_STEPS = 8
"""Maximum number of rounds of a handshake; a handshake needs fewer."""


def load_tls_files(context: ssl.SSLContext, cert: str, key: str, ca: str, section: str) -> None:
    """Loads the named files into a context.

    Args:
        cert, key, ca: paths; empty for none. A key may be in the file of its certificate.
        section: name of the options, for errors.

    Raises:
        ConfigError: a file cannot be used; says which and why.
    """
    if cert:
        _load_pair(context, cert, key, section)
    if ca:
        _load_ca(context, ca, section)


def _load_pair(context: ssl.SSLContext, cert: str, key: str, section: str) -> None:
    chain = _read(cert, f"{section}.cert")
    key_text = _read(key, f"{section}.key") if key else chain
    key_name = f"{section}.key: {key}" if key else f"{section}.cert: {cert}"
    if not _CERTIFICATE.search(chain):
        raise ConfigError(f"{section}.cert: {cert} holds no certificate (PEM)")
    if not _KEY.search(key_text):
        where = " (PEM)" if key else f"; name its file with {section}.key"
        raise ConfigError(f"{key_name} holds no private key{where}")
    if "ENCRYPTED" in key_text:
        raise ConfigError(
            f"{key_name} needs a passphrase, which a service cannot type; store the key without "
            "one: openssl pkey -in KEY -out NEW"
        )
    try:
        context.load_cert_chain(cert, key or None)
    except ssl.SSLError as error:
        if error.reason == "KEY_VALUES_MISMATCH":
            raise ConfigError(
                f"{key_name} is not the key of the certificate in {section}.cert: {cert}; name the "
                "two that were made together"
            ) from error
        if not _is_readable(chain):
            raise ConfigError(f"{section}.cert: {cert} is a damaged certificate") from error
        raise ConfigError(f"{key_name} is a damaged private key") from error


def _load_ca(context: ssl.SSLContext, ca: str, section: str) -> None:
    if not _CERTIFICATE.search(_read(ca, f"{section}.ca")):
        raise ConfigError(f"{section}.ca: {ca} holds no certificate (PEM)")
    try:
        context.load_verify_locations(ca)
    except ssl.SSLError as error:
        raise ConfigError(f"{section}.ca: {ca} is a damaged certificate") from error


def _read(path: str, option: str) -> str:
    try:
        return Path(path).read_text(encoding="ascii", errors="replace")
    except OSError as error:
        raise ConfigError(f"{option}: {path}: cannot be read: {error.strerror}") from error


def _is_readable(chain: str) -> bool:
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(cadata=chain)
    except (ssl.SSLError, ValueError):
        return False
    return True


def check_trust(cert: str, key: str, ca: str, section: str) -> None:
    """Checks in memory that a peer would accept a server's certificate.

    Args:
        cert, key, ca: paths, as for `load_tls_files`; without a CA only its dates are checked.
        section: name of the options, for errors.

    Raises:
        ConfigError: it has expired or is not valid yet, or the CA did not sign it.
    """
    if said := _refusal(cert, key, cert):  # as its own CA, so that only its dates are checked
        raise ConfigError(f"{section}.cert: {cert}: {said}; make a new one")
    if ca and (said := _refusal(cert, key, ca)):
        raise ConfigError(
            f"{section}.cert: {cert} would be refused by peers that trust {section}.ca: {ca}: "
            f"{said}; name the CA that signed it"
        )


def _refusal(cert: str, key: str, ca: str) -> str:
    """The reason why a client that trusts `ca` refuses a certificate; empty if it accepts."""
    server, client = (
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER),
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT),
    )
    server.load_cert_chain(cert, key or None)
    client.check_hostname = False
    client.load_verify_locations(ca)
    if ca == cert:
        client.verify_flags |= ssl.VerifyFlags.VERIFY_X509_PARTIAL_CHAIN
    try:
        _shake_hands(server, client)
    except ssl.SSLCertVerificationError as error:
        return error.verify_message
    return ""


def _shake_hands(server: ssl.SSLContext, client: ssl.SSLContext) -> None:
    """Makes a handshake in memory, until both sides are done or one refuses.

    Raises:
        SSLCertVerificationError: the client refuses the server's certificate.
    """
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    sides = [
        client.wrap_bio(to_client, to_server),
        server.wrap_bio(to_server, to_client, server_side=True),
    ]
    for _ in range(_STEPS):
        for side in sides:
            try:
                side.do_handshake()
            except ssl.SSLWantReadError:
                continue
