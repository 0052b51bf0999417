"""By which names a router without keys may be asked.

A page that a browser shows can make its own site's name mean 127.0.0.1 (DNS rebinding), and then ask a router
there as if it were its own site. Such a request bears the site's name as its Host, so a router that listens on
loopback, where only its machine's own users should reach it, accepts no name that a site may have. Elsewhere
anyone in reach may ask anyway, by any name that a service or a proxy has. With keys nothing is checked,
because the page has none.
"""

from __future__ import annotations

import ipaddress
import socket
from urllib.parse import urlsplit

from tandem.base.errors import RequestError

# Names below these cannot be registered by a site.
_PRIVATE = (".localhost", ".local", ".internal")
_KNOWN_AT_ONCE = 64


class WrongHost(RequestError):
    code = "misdirected_request"
    http_status = 421


class OwnHosts:
    def __init__(self, host: str, origins: tuple[str, ...]) -> None:
        """`host`: where the router listens. `origins`: pages that may ask (`router.cors_origins`)."""
        self._checks = is_loopback(host) and "*" not in origins
        self._names = {host.lower(), socket.gethostname().lower()}
        self._names |= {name for origin in origins if (name := _name_of(origin.partition("://")[2]))}
        self._known: set[bytes] = set()  # Hosts that were accepted, which need not be read again

    def check(self, host: bytes | None) -> None:
        """Raises WrongHost. Only HTTP/1.0 has no Host, and no browser speaks it."""
        if not self._checks or host is None or host in self._known:
            return
        name = _name_of(host.decode("latin-1"))
        if not self._is_own(name):
            raise WrongHost(
                f"host: {name[:100]!r} is not a name of this router, which has no keys and listens on loopback: ask at "
                "localhost or 127.0.0.1, name the page's origin in router.cors_origins, or set router.api_keys"
            )
        if len(self._known) < _KNOWN_AT_ONCE:
            self._known.add(host)

    def _is_own(self, name: str) -> bool:
        # Sites have names of several parts. An address is no site's name.
        return "." not in name or name.endswith(_PRIVATE) or name in self._names or _is_address(name)


def _name_of(host: str) -> str:
    """Returns the lower-case name or address of a Host, without its port."""
    try:
        return (urlsplit(f"//{host}").hostname or "").removesuffix(".")
    except ValueError:
        return host.lower()


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def is_loopback(host: str) -> bool:
    return host == "localhost" or (_is_address(host) and ipaddress.ip_address(host).is_loopback)
