"""A cache that tenants share without learning of each other: what one has put in, only the same one finds."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Hashable, Sequence
from typing import Generic, NamedTuple, TypeVar

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class CacheOwner(NamedTuple):
    """Who asks. `tenant` has a fair share of the memory; `salt` is the requests' own, as for KV blocks, and keeps a
    tenant's requests apart from each other if it wishes so."""

    tenant: str = ""
    salt: str = ""


NO_OWNER = CacheOwner()


class _Share(Generic[K, V]):
    def __init__(self) -> None:
        self.entries: OrderedDict[tuple[str, K], tuple[V, int]] = OrderedDict()
        self.size = 0


class TenantCache(Generic[K, V]):
    """Keeps the most recently used entries. When it is full, the tenant that has most gives up its oldest, so no
    tenant pushes out another that has less. Thread-safe."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._shares: dict[str, _Share[K, V]] = {}
        self._lock = threading.Lock()
        self.size = 0

    def get(self, owner: CacheOwner, key: K) -> V | None:
        return self.get_all(owner, [key])[0]

    def get_all(self, owner: CacheOwner, keys: Sequence[K]) -> list[V | None]:
        tenant, salt = owner
        with self._lock:
            if (share := self._shares.get(tenant)) is None:
                return [None] * len(keys)
            entries = share.entries
            values: list[V | None] = []
            for key in keys:
                if (found := entries.get((salt, key))) is None:
                    values.append(None)
                else:
                    entries.move_to_end((salt, key))
                    values.append(found[0])
            return values

    def put(self, owner: CacheOwner, key: K, value: V, size: int) -> None:
        with self._lock:
            share = self._shares.setdefault(owner.tenant, _Share())
            if (owner.salt, key) in share.entries:
                return
            share.entries[owner.salt, key] = (value, size)
            share.size += size
            self.size += size
            while self.size > self._most:
                self._drop_one()

    def _drop_one(self) -> None:
        tenant, share = max(self._shares.items(), key=lambda one: one[1].size)
        _, (_, size) = share.entries.popitem(last=False)
        share.size -= size
        self.size -= size
        if not share.entries:
            del self._shares[tenant]
