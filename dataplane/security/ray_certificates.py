"""Tries the TLS of a Ray cluster before Ray does, which repeats for minutes what fails, and does not say why."""

from __future__ import annotations

import os
import socket
import ssl

USE_TLS = "RAY_USE_TLS"
_FILES = ("RAY_TLS_CA_CERT", "RAY_TLS_SERVER_CERT", "RAY_TLS_SERVER_KEY")


def ray_uses_tls() -> bool:
    """Return whether Ray's connections of this process are encrypted."""
    return os.environ.get(USE_TLS, "0").lower() in ("1", "true")


def certificate_mistake(connection: socket.socket) -> str:
    """Return why Ray's connections of this process would fail at a GCS, as a sentence; "" if they would not.

    connection: a new connection to the GCS, with a time limit; it cannot be used afterwards. A server that says nothing
    within the limit is not judged.
    """
    try:
        context = _context()
    except (OSError, KeyError) as error:  # An ssl.SSLError, too.
        given = {name: os.environ.get(name) for name in _FILES}
        return f"{USE_TLS}: got 1 with {given}, expected a PEM file of this host in each ({error})"
    host = connection.getpeername()[0]
    try:
        with context.wrap_socket(connection, server_hostname=host) as secure:
            # A server refuses a certificate after the handshake of TLS 1.3, and Ray's closes without a word then.
            refused = "" if secure.recv(1) else "Ray closed the connection"
    except ssl.SSLError as error:
        refused = (error.reason or "").lower().replace("_", " ")
        if isinstance(error, ssl.SSLCertVerificationError):
            refused = error.verify_message
    except OSError:
        return ""
    plain = "wrong version number" in refused
    if plain and ray_uses_tls():
        return f"{USE_TLS}: got 1, expected no value, because that Ray cluster was started without it"
    if not plain and not ray_uses_tls():
        return f"{USE_TLS}: got no value, expected 1 and {', '.join(_FILES)}, because that Ray cluster accepts only TLS"
    if refused and not plain:
        return (
            f"RAY_TLS_SERVER_CERT: this host and that Ray cluster do not accept each other's certificates ({refused}), "
            f"expected certificates of one RAY_TLS_CA_CERT with the address {host}, valid at the time of both clocks"
        )
    return ""


def _context() -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.set_alpn_protocols(["h2"])
    if ray_uses_tls():
        authority, certificate, key = (os.environ[name] for name in _FILES)
        context.load_verify_locations(authority)
        context.load_cert_chain(certificate, key)
    else:
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return context
