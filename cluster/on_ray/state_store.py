"""What a controller must know after it was killed, in Ray's control store: it lives as long as the cluster does."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar

from ray.exceptions import RayError

from tandem.cluster.on_ray.errors import translated
from tandem.cluster.on_ray.runtime import NAMESPACE

_NAMESPACE = NAMESPACE.encode()

T = TypeVar("T")


class RayStateStore:
    """One value under one name."""

    def __init__(self, name: str) -> None:
        self._key = name.encode()

    async def load(self) -> bytes | None:
        return await _asked(self._get)

    async def save(self, state: bytes) -> None:
        await _asked(self._put, state)

    async def forget(self) -> None:
        await _asked(self._delete)

    def _get(self) -> bytes | None:
        from ray.experimental import internal_kv

        found: bytes | None = internal_kv._internal_kv_get(self._key, namespace=_NAMESPACE)
        return found

    def _put(self, state: bytes) -> None:
        from ray.experimental import internal_kv

        internal_kv._internal_kv_put(self._key, state, overwrite=True, namespace=_NAMESPACE)

    def _delete(self) -> None:
        from ray.experimental import internal_kv

        internal_kv._internal_kv_del(self._key, namespace=_NAMESPACE)


async def _asked(call: Callable[..., T], *args: bytes) -> T:
    try:
        return await asyncio.to_thread(call, *args)
    except RayError as error:
        raise translated(error) from error
