"""Bugs in what not every schedule has, as `mutants` has those of handoffs: strangers, background answers, adapters, images, times of day.
They run in the schedules that have it."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import msgspec

from tandem.encode_node import service
from tandem.engine.cache import hashing
from tandem.engine.cache.manager import KVCacheManager
from tandem.engine.model.lora.slots import AdapterSlots
from tandem.engine.scheduling.pins.pins import Pins
from tandem.node.answers import KeptAnswers
from tandem.node.encoders.client import EncoderClient
from tandem.node.loop import RouterLost
from tandem.node.service import NodeService
from tandem.wire.adapters import name_of
from tandem.wire.curve import ProcessKeys

Patch = tuple[Any, str, Callable[[Any], Any]]


def _stranger_heard(right: Any) -> Any:
    return lambda self, key: True


def _ends_with_its_router(right: Any) -> Any:
    def handle(self: NodeService, item: Any) -> None:
        if isinstance(item, RouterLost):
            self._abort([live.submit.request_id for live in self._live.of_router(item.reply_to)])
        right(self, item)

    return handle


def _kept_without_its_beginning(right: Any) -> Any:
    def begin(self: KeptAnswers, submit: Any) -> None:
        right(self, msgspec.structs.replace(submit, output_token_ids=[]))

    return begin


def _adapter_by_name(right: Any) -> Any:
    def extra_keys(request: Any, start: int, end: int) -> Any:
        keys = right(request, start, end)
        return tuple(("lora", name_of(request.lora).encode()) if key[0] == "lora" else key for key in keys)

    return extra_keys


def _replaced_at_once(right: Any) -> Any:
    def serve(self: AdapterSlots, read: Any, kept: Any = (), now: float = 0.0) -> None:
        right(self, read, kept, now)
        self._replaced.clear()
        self._list_replaced()

    return serve


def _image_not_named(right: Any) -> Any:
    return lambda request, start, end: tuple(key for key in right(request, start, end) if key[0] != "media")


def _encoder_waited_for(right: Any) -> Any:
    return lambda self, now: None


def _rows_by_image(right: Any) -> Any:
    return lambda identifier, salt: right(identifier.partition("/")[0], salt)


def _pinned_by_the_time_of_day(right: Any) -> Any:
    def init(self: Pins, *given: Any, **named: Any) -> None:
        right(self, *given, **named)
        self._clock = time.time

    return init


def _state_not_copied(right: Any) -> Any:
    return lambda self: ([], right(self)[1])


FEATURE_MUTANTS: dict[str, tuple[str, tuple[Patch, ...]]] = {
    "stranger-heard": (
        "a process without a key is heard, once it reaches a port",
        ((ProcessKeys, "__contains__", _stranger_heard),),
    ),
    "answer-ends-with-its-router": (
        "a background answer is aborted when its router is silent",
        ((NodeService, "handle", _ends_with_its_router),),
    ),
    "kept-without-its-beginning": (
        "a background answer that moved to another node lacks its first tokens there",
        ((KeptAnswers, "begin", _kept_without_its_beginning),),
    ),
    "adapter-by-name": (
        "KV of an adapter's earlier weights is found under its name",
        ((hashing, "extra_keys", _adapter_by_name),),
    ),
    "replaced-at-once": (
        "requests that were planned with an adapter's earlier weights find none",
        ((AdapterSlots, "serve", _replaced_at_once),),
    ),
    "image-not-named": (
        "KV of another image with as many placeholders is found",
        ((hashing, "extra_keys", _image_not_named),),
    ),
    "encoder-waited-for": (
        "rows of an encoder node that is gone are waited for",
        (
            (EncoderClient, "look", _encoder_waited_for),
            (EncoderClient, "seconds_until_due", _encoder_waited_for),
        ),
    ),
    "rows-by-image": (
        "an encoder node finds one part's rows for another part of the image",
        ((service, "rows_name", _rows_by_image),),
    ),
    "state-not-copied": (
        "a prompt begins from a checkpoint, and its states are those of another request",
        ((KVCacheManager, "take_state_copies", _state_not_copied),),
    ),
    "pinned-by-the-time-of-day": (
        "a clock that is set back keeps an agent's blocks for a day",
        ((Pins, "__init__", _pinned_by_the_time_of_day),),
    ),
}
"""The name, where it was seen, what is patched."""

FEATURE_NEEDS = {
    "stranger-heard": "stranger",
    "answer-ends-with-its-router": "background",
    "kept-without-its-beginning": "background",
    "adapter-by-name": "adapters",
    "replaced-at-once": "adapters",
    "image-not-named": "images",
    "encoder-waited-for": "images",
    "rows-by-image": "images",
    "state-not-copied": "states",
    "pinned-by-the-time-of-day": "jobs",
}
