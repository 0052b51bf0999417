"""Messages of two versions: what may change between them, and that each side reads the other's."""

from __future__ import annotations

import copy
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem.wire.lines import Letter, Resend
from tandem.wire.requests import Cancel
from tandem.wire.versions import REACH, SINCE, WIRE_VERSION, out_of_reach
from tests.wire.descriptions import (
    CHANNELS,
    IS_WHOLE,
    VERSIONS,
    Description,
    breaks,
    described,
    kept,
    members_of,
    not_named,
)
from tests.wire.struct_strategies import values_of


@pytest.mark.skipif(not IS_WHOLE, reason="messages of a wing are gone")
def test_the_messages_are_those_of_their_version() -> None:
    assert described() == kept(WIRE_VERSION), (
        f"a message between processes has changed. If version {WIRE_VERSION} was released, count WIRE_VERSION in wire/versions.py up. "
        "Then write its description with `python -m tests.wire.descriptions`, and keep that with the change"
    )


def test_every_version_is_read_by_the_next() -> None:
    numbers = sorted(int(path.stem) for path in VERSIONS.glob("*.json"))
    assert numbers == list(range(1, WIRE_VERSION + 1)), "each version has its description"
    # The first with itself: its own rules hold as well.
    for older, newer in [(1, 1), *pairwise(numbers)]:
        assert not breaks(kept(older), kept(newer)), f"from version {older} to {newer}"


def test_what_the_version_before_could_not_read_is_named() -> None:
    if WIRE_VERSION > 1:
        missing = not_named(kept(WIRE_VERSION - 1), described(), SINCE, WIRE_VERSION)
        assert not missing, f"SINCE in wire/versions.py must name them with {WIRE_VERSION}"
    assert all(WIRE_VERSION - REACH < version <= WIRE_VERSION for version in SINCE.values()), (
        "every node in reach has what is older: it can go from SINCE in wire/versions.py"
    )


def test_a_field_or_a_message_that_is_not_named_is_found() -> None:
    newer = copy.deepcopy(described())
    for struct in ("Submit", "SamplingParams", "Ping", "LogsQuery"):
        _struct(newer, struct)["fields"].append({"name": "late", "type": "int", "default": 0})
    newer["channels"]["router to node"].append("Rest")
    late = ["Rest", "SamplingParams.late", "Submit.late"]
    assert not_named(described(), newer, {}, 2) == late, "what passes over unknown fields needs no name"
    assert not_named(described(), newer, {"Rest": 2, "Submit.late": 1}, 2) == late[1:]
    assert not not_named(described(), newer, dict.fromkeys(late, 2), 2)


def _struct(description: Description, name: str) -> dict[str, Any]:
    found: dict[str, Any] = description["structs"][name]
    return found


def _field(description: Description, struct: str, name: str) -> dict[str, Any]:
    return next(field for field in _struct(description, struct)["fields"] if field["name"] == name)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda d: _struct(d, "Ping")["fields"].pop(), "Ping: the field asked_at is gone"),
        (lambda d: _field(d, "Ping", "reply_to").update(type="bytes"), "reply_to was str and is bytes"),
        (lambda d: _field(d, "Ping", "asked_at").pop("default"), "asked_at has no default any more"),
        (lambda d: _struct(d, "Ping")["fields"].append({"name": "n", "type": "int"}), "n has no default"),
        (lambda d: _struct(d, "Ping").update(tag="pong"), "tag was 'ping' and is 'pong'"),
        (lambda d: _field(d, "Submit", "priority").update(default=3), "which is another one now"),
        (
            lambda d: _struct(d, "Letter")["fields"].insert(0, {"name": "n", "type": "int", "default": 0}),
            "new fields come last",
        ),
        (lambda d: d["enums"]["NodeState"].remove("ready"), "NodeState has no 'ready' any more"),
        (lambda d: d["channels"]["router to node"].remove("Cancel"), "Cancel is no longer read"),
        (lambda d: d["structs"].pop("Cancel"), "Cancel is gone"),
        (lambda d: _struct(d, "Submit").update(omits_defaults=False), "so it must leave out defaults"),
    ],
)
def test_a_change_that_the_version_before_would_misread_is_named(
    change: Callable[[Description], object], said: str
) -> None:
    newer = copy.deepcopy(described())
    change(newer)
    assert any(said in sentence for sentence in breaks(described(), newer))


def test_what_is_added_by_the_rules_breaks_nothing() -> None:
    newer = copy.deepcopy(described())
    for struct in newer["structs"].values():
        struct["fields"].append({"name": "of_a_later_version", "type": "int", "default": 7})
    newer["enums"]["NodeState"].append("resting")
    newer["channels"]["router to node"].append("Rest")
    _field(newer, "NodeInfo", "wire_version")["default"] = 2
    assert not breaks(described(), newer)


def as_a_later_version_says_it(value: Any) -> Any:
    """The same message with a field more in each struct that may have one."""
    match value:
        case msgspec.Struct():
            config = value.__struct_config__
            fields = {
                encoded: as_a_later_version_says_it(getattr(value, name))
                for name, encoded in zip(value.__struct_fields__, value.__struct_encode_fields__, strict=True)
            }
            tag = {config.tag_field: config.tag} if config.tag_field else {}
            more = {} if config.forbid_unknown_fields else {"of_a_later_version": 7}
            said = {**tag, **fields, **more}
            return list(said.values()) if config.array_like else said
        case list() | tuple():
            return [as_a_later_version_says_it(item) for item in value]
        case dict():
            return {key: as_a_later_version_says_it(item) for key, item in value.items()}
    return value


@pytest.mark.parametrize(
    "kind",
    [
        one
        for name, channel in CHANNELS.items()
        # Of these two the one holds any other message, and the other is of one struct that refuses what it does not know.
        if name not in ("numbered lines", "command to controller")
        for one in members_of(channel)
    ],
    ids=lambda kind: kind.__name__,
)
@settings(max_examples=5)
@given(data=st.data())
def test_fields_of_a_later_version_change_nothing_for_this_one(kind: Any, data: st.DataObject) -> None:
    message = data.draw(values_of(kind))
    frame = msgspec.msgpack.encode(as_a_later_version_says_it(message))
    assert msgspec.msgpack.decode(frame, type=kind) == message


def test_a_letter_may_have_more_after_its_message() -> None:
    letter = Letter("tcp://x:1", 1, 2, 3, 4, 5, 6, 7, Cancel("tcp://x:1", ["r"]))
    frame = msgspec.msgpack.encode(as_a_later_version_says_it(letter))
    assert msgspec.msgpack.decode(frame, type=Letter[Cancel | Resend]) == letter


def test_versions_that_are_further_apart_do_not_speak() -> None:
    for version in range(WIRE_VERSION - REACH, WIRE_VERSION + REACH + 1):
        assert out_of_reach(version) is None
    for version in (WIRE_VERSION - REACH - 1, WIRE_VERSION + REACH + 1):
        assert f"version {version} of Tandem's messages" in str(out_of_reach(version))
