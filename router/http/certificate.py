"""The router's TLS: one context for all connections, which loads a new certificate while the router
serves."""

from __future__ import annotations

import logging
import os
import ssl

from tandem.wire.errors import ConfigurationError

logger = logging.getLogger(__name__)

_Stamp = tuple[tuple[int, int, int], ...]


class Certificate:
    """A certificate with its chain, and its key without a passphrase, both in PEM files. Raises
    ConfigurationError when they are not a pair."""

    def __init__(self, certificate_file: str, key_file: str) -> None:
        self._files = certificate_file, key_file
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
        try:
            found = [os.stat(file) for file in self._files]
        except OSError as error:
            raise ConfigurationError(f"router.tls_certificate and router.tls_key: {error}") from error
        return tuple((one.st_ino, one.st_size, one.st_mtime_ns) for one in found)

    def _load_into(self, context: ssl.SSLContext) -> None:
        certificate, key = self._files
        try:
            # Without a password function, OpenSSL would ask for a key's passphrase on the terminal.
            context.load_cert_chain(certificate, key, password=lambda: "")
        except (OSError, ValueError) as error:  # ssl.SSLError is an OSError
            raise ConfigurationError(
                f"router.tls_certificate {certificate} and router.tls_key {key} must be a certificate with its chain, and its "
                f"key without a passphrase, both in PEM: {error}"
            ) from error


def _context() -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["http/1.1"])
    return context
