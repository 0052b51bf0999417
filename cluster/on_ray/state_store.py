"""What a controller must know after it was killed, kept in Ray's control store, which lives as long as the Ray cluster."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from ray.exceptions import RayError

from tandem.base.own_thread import from_own_thread
from tandem.cluster.launcher import CheckKept
from tandem.cluster.on_ray.errors import translated

T = TypeVar("T")


def internal_kv() -> Any:
    """Ray's module for its key-value store. Ray has no public interface to it."""
    from ray.experimental import internal_kv

    return internal_kv


class RayStateStore:
    """One value under a name, in a deployment's namespace. Methods raise the translated errors of Ray."""

    def __init__(self, name: str, namespace: str) -> None:
        self._key = name.encode()
        self._namespace = namespace.encode()

    async def load(self) -> bytes | None:
        return await _asked(self._get)

    async def save(self, state: bytes, check: CheckKept | None = None) -> None:
        def put(state: bytes) -> None:
            if check is not None:
                check(self._get())
            self._put(state)

        await _asked(put, state)

    async def save_first(self, state: bytes) -> bool:
        """Saves the value unless there is one. Returns False when there was one, which stays."""
        return not await _asked(self._put_new, state)

    async def forget(self) -> None:
        await _asked(self._delete)

    def _get(self) -> bytes | None:
        found: bytes | None = internal_kv()._internal_kv_get(self._key, namespace=self._namespace)
        return found

    def _put(self, state: bytes) -> None:
        internal_kv()._internal_kv_put(self._key, state, overwrite=True, namespace=self._namespace)

    def _put_new(self, state: bytes) -> bool:
        """Returns whether there was a value already."""
        return bool(internal_kv()._internal_kv_put(self._key, state, overwrite=False, namespace=self._namespace))

    def _delete(self) -> None:
        internal_kv()._internal_kv_del(self._key, namespace=self._namespace)


async def names_under(prefix: str, namespace: str) -> list[str]:
    def look() -> list[str]:
        keys = internal_kv()._internal_kv_list(prefix.encode(), namespace=namespace.encode())
        return [key.decode() for key in keys]

    return await _asked(look)


async def _asked(call: Callable[..., T], *args: bytes) -> T:
    try:
        return await from_own_thread("state-store", lambda: call(*args))
    except RayError as error:
        raise translated(error) from error
