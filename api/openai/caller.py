"""Who asks, as far as generation must know it."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from urllib.parse import quote

import msgspec

from tandem.api.sequence import TraceNotes
from tandem.api.text.tenant_cache import CacheOwner

LEAST_URGENT = 2**31 - 1  # the highest number that a request may name
_LONGEST_FOLDER = 200  # file systems take names of 255 bytes


class Caller(msgspec.Struct, frozen=True):
    """What generation must know about the caller."""

    label: str
    deadline: float
    cache_salt: Callable[[str | None], str | None]
    session: str | None
    job_id: str | None = None
    is_last_step: bool = False
    most_urgent: int | None = None  # the lowest priority number that it may ask for; None: any
    trace: TraceNotes | None = None
    arrived: float | None = None
    key: str | None = None  # its key's name; None: it needs none
    when_idle: bool = False  # its sequences run while nothing else does
    first_by: float | None = None  # when its first token must come

    def file(self, name: str | None) -> str | None:
        """The path of a file that the caller names. Each key's files are in a folder of its own, so that no key replaces another's."""
        if name is None or self.key is None:
            return name
        return f"{_folder_of(self.key)}/{name}"

    def cache_owner(self, cache_salt: str | None) -> CacheOwner:
        """Whose the request's entries in this router's caches are: apart like its KV blocks."""
        return CacheOwner(self.cache_salt(None) or "", self.cache_salt(cache_salt) or "")

    def priority(self, asked: int | None) -> int:
        if self.when_idle:
            return LEAST_URGENT
        wanted = asked or 0
        return wanted if self.most_urgent is None else max(wanted, self.most_urgent)


def _folder_of(key: str) -> str:
    """Key names are any text: returns it as a file's name, a distinct one for each."""
    folder = quote(key, safe="", errors="surrogatepass")
    if folder.startswith("."):
        folder = "%2E" + folder[1:]
    if 0 < len(folder) <= _LONGEST_FOLDER:
        return folder
    return "%" + hashlib.sha256(key.encode("utf-8", "surrogatepass")).hexdigest()
