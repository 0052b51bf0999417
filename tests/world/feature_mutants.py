"""Bugs in what not every schedule has, as `mutants` has those of handoffs: background answers, adapters, images, states. They run in the
schedules that have it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tandem.encode_node import service
from tandem.engine.cache import hashing
from tandem.engine.cache.manager import KVCacheManager
from tandem.engine.model.adapter_book import AdapterBook
from tandem.node.loop import RouterLost
from tandem.node.service import NodeService
from tandem.wire.adapters import name_of

Patch = tuple[Any, str, Callable[[Any], Any]]


def _ends_with_its_router(right: Any) -> Any:
    def handle(self: NodeService, item: Any) -> None:
        if isinstance(item, RouterLost):
            self._abort([live.submit.request_id for live in self._live.of_router(item.reply_to)])
        right(self, item)

    return handle


def _adapter_by_name(right: Any) -> Any:
    def extra_keys(request: Any, start: int, end: int) -> Any:
        keys = right(request, start, end)
        return tuple(("lora", name_of(request.lora).encode()) if key[0] == "lora" else key for key in keys)

    return extra_keys


def _replaced_at_once(right: Any) -> Any:
    def serve(self: AdapterBook[Any], read: Any, kept: Any = (), now: float = 0.0) -> None:
        right(self, read, kept, now)
        self._replaced.clear()
        self._list_replaced()

    return serve


def _image_not_named(right: Any) -> Any:
    return lambda request, start, end: tuple(key for key in right(request, start, end) if key[0] != "media")


def _rows_by_image(right: Any) -> Any:
    return lambda identifier, salt: right(identifier.partition("/")[0], salt)


def _state_not_copied(right: Any) -> Any:
    return lambda self: ([], right(self)[1])


FEATURE_MUTANTS: dict[str, tuple[str, tuple[Patch, ...]]] = {
    "answer-ends-with-its-router": (
        "a background answer is aborted when its router is silent",
        ((NodeService, "handle", _ends_with_its_router),),
    ),
    "adapter-by-name": (
        "KV of an adapter's earlier weights is found under its name",
        ((hashing, "extra_keys", _adapter_by_name),),
    ),
    "replaced-at-once": (
        "requests that were planned with an adapter's earlier weights find none",
        ((AdapterBook, "serve", _replaced_at_once),),
    ),
    "image-not-named": (
        "KV of another image with as many placeholders is found",
        ((hashing, "extra_keys", _image_not_named),),
    ),
    "rows-by-image": (
        "an encoder node finds one part's rows for another part of the image",
        ((service, "rows_name", _rows_by_image),),
    ),
    "state-not-copied": (
        "a prompt begins from a checkpoint, and its states are those of another request",
        ((KVCacheManager, "take_state_copies", _state_not_copied),),
    ),
}
"""The name, where it was seen, what is patched."""

FEATURE_NEEDS = {
    "answer-ends-with-its-router": "background",
    "adapter-by-name": "adapters",
    "replaced-at-once": "adapters",
    "image-not-named": "images",
    "rows-by-image": "images",
    "state-not-copied": "states",
}
