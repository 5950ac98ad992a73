"""TLS contexts for sockets outside gRPC: HTTP ports and data channels.

Tests: tests/unit/rpc/test_tls.py.
"""

from __future__ import annotations

import ssl

from kvmesh.core.errors import ConfigError
from kvmesh.rpc.channels import TlsConfig
from kvmesh.rpc.tls_files import check_trust, load_tls_files


def server_context(tls: TlsConfig, section: str, *, ca_signs: bool = True) -> ssl.SSLContext | None:
    """A server's TLS context; None without a certificate (plain text).

    Args:
        section: name of the options, for errors.
        ca_signs: the CA must have signed the server's own certificate, as it signs callers'.

    Raises:
        ConfigError: a file cannot be used, or a CA is given without a certificate.
    """
    if not tls.cert:
        if tls.key or tls.ca:
            raise ConfigError(f"{section}.cert is empty; a key or a CA alone encrypts nothing")
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    load_tls_files(context, tls.cert, tls.key, tls.ca, section)
    check_trust(tls.cert, tls.key, tls.ca if ca_signs else "", section)
    if tls.ca and tls.verify_callers:
        context.verify_mode = ssl.CERT_REQUIRED
    return context


def check_tls(tls: TlsConfig, section: str) -> None:
    """Checks that a service would accept these files.

    Args:
        section: name of the options, as in the config.

    Raises:
        ConfigError: it would not.
    """
    if tls.cert:
        server_context(tls, section, ca_signs=section not in _FOR_ANYBODY)
    else:
        client_context(tls, section)


_FOR_ANYBODY = ("http.tls", "server.admin.tls")
"""Ports whose callers are not services: their CA signs the callers, but maybe not the port."""


def client_context(tls: TlsConfig, section: str) -> ssl.SSLContext | None:
    """A client's TLS context; None without a CA (plain text).

    Args:
        section: name of the options, for errors.

    Raises:
        ConfigError: a file cannot be used.
    """
    if not tls.ca:
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    load_tls_files(context, tls.cert, tls.key, tls.ca, section)
    return context
