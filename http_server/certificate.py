"""The router's TLS: one context for all connections, which loads a new certificate while the router
serves."""

from __future__ import annotations

import logging
import os
import ssl
from collections.abc import Callable
from typing import TypeVar

from tandem.base.errors import ConfigurationError

logger = logging.getLogger(__name__)

_SETTINGS = "router.tls_certificate", "router.tls_key"
_Stamp = tuple[tuple[int, int, int], ...]
_Seen = TypeVar("_Seen")


class Certificate:
    """A certificate with its chain, and its key without a passphrase, both in PEM files. Raises
    ConfigurationError when they are not a pair."""

    def __init__(self, certificate_file: str, key_file: str, names: tuple[str, str] = _SETTINGS) -> None:
        """`names`: what an operator calls the two files, for errors."""
        self._files = certificate_file, key_file
        self._names = names
        self._stamp = self._look()
        self.context = _context()
        self._load_into(self.context)

    def reload_if_changed(self) -> None:
        """Loads changed files for new connections; open ones keep the old certificate. Files that are wrong
        or incomplete are logged, and the old certificate stays until a file changes again."""
        try:
            stamp = self._look()
            if stamp == self._stamp:
                return
            self._stamp = stamp
            # tried on a new context first: a pair that does not fit would leave half of itself in the context
            self._load_into(_context())
            self._load_into(self.context)
        except ConfigurationError as error:
            logger.error("the certificate is not renewed, the one before is still used: %s", error)
        else:
            logger.info("the certificate in %s was loaded", self._files[0])

    def _look(self) -> _Stamp:
        """What changes with every new version of a file, also when a link is pointed at another folder, as
        Kubernetes does with Secrets."""
        found = [_of_file(setting, file, os.stat) for setting, file in zip(self._names, self._files, strict=True)]
        return tuple((one.st_ino, one.st_size, one.st_mtime_ns) for one in found)

    def _load_into(self, context: ssl.SSLContext) -> None:
        for setting, file in zip(self._names, self._files, strict=True):
            _of_file(setting, file, lambda name: open(name, "rb").close())
        certificate, key = self._files
        has_passphrase = False

        def passphrase() -> str:
            # Without this function, OpenSSL would ask for it on the terminal.
            nonlocal has_passphrase
            has_passphrase = True
            return ""

        try:
            context.load_cert_chain(certificate, key, password=passphrase)
        except (OSError, ValueError) as error:  # ssl.SSLError is an OSError
            if has_passphrase:
                why = f"{self._names[1]} {key} has a passphrase: write it without a passphrase, with `openssl pkey -in {key}`"
            elif getattr(error, "reason", None) in ("KEY_VALUES_MISMATCH", "KEY_TYPE_MISMATCH"):
                why = f"{self._names[1]} {key} is not the key of {self._names[0]} {certificate}: name the one that was made with it"
            else:
                why = (
                    f"{self._names[0]} {certificate} and {self._names[1]} {key} must be a certificate with its chain, and its key, "
                    f"both in PEM: {error}"
                )
            raise ConfigurationError(why) from error


def _of_file(setting: str, file: str, look: Callable[[str], _Seen]) -> _Seen:
    try:
        return look(file)
    except OSError as error:
        raise ConfigurationError(f"{setting} {file} cannot be read: {error.strerror}") from error


def check_before_use(certificate_file: str, key_file: str) -> None:
    """Raises ConfigurationError for what is no pair, and for a certificate that clients refuse because of its dates. A router loads
    that one all the same: an operator may have nothing better yet, and a router that is replaced must not stay away."""
    server_context = Certificate(certificate_file, key_file).context
    trusting = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    trusting.check_hostname = False
    trusting.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    trusting.load_verify_locations(certificate_file)
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    server = server_context.wrap_bio(to_server, to_client, server_side=True)
    client = trusting.wrap_bio(to_client, to_server)
    for side in (client, server, client):
        try:
            side.do_handshake()
        except ssl.SSLWantReadError:
            continue
        except ssl.SSLCertVerificationError as error:
            if error.verify_code in _DATES:
                raise ConfigurationError(
                    f"{_SETTINGS[0]} {certificate_file} {_DATES[error.verify_code]}, so clients refuse it: renew it"
                ) from error
            return  # what else a client asks of a certificate, such as its name, it knows better


_DATES = {9: "is not valid yet", 10: "has expired"}  # X509_V_ERR_CERT_NOT_YET_VALID, X509_V_ERR_CERT_HAS_EXPIRED


def _context() -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["http/1.1"])
    return context
