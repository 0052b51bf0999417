from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.base.settings import without_defaults
from tandem.wire.handoff import HandoffMessage
from tandem.wire.nodes import NodeInfo, RouterInfo
from tandem.wire.requests import Cancel, Submit, TokenBatch, TokenChunk, ToNode, ToRouter
from tandem.wire.sampling import SamplingParams
from tests.wire.struct_strategies import values_of

CHANNELS = [ToNode, ToRouter, HandoffMessage, NodeInfo]


@pytest.mark.parametrize("channel", CHANNELS, ids=["to node", "to router", "handoff", "node info"])
@given(data=st.data())
def test_a_damaged_frame_is_refused_or_a_message_never_anything_else(channel: Any, data: st.DataObject) -> None:
    frame = bytearray(msgspec.msgpack.encode(data.draw(values_of(channel))))
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(frame) - 1))
        frame[at] = data.draw(st.integers(0, 255))
    cut = data.draw(st.integers(0, len(frame)))
    for damaged in (bytes(frame), bytes(frame[:cut])):
        try:
            assert isinstance(msgspec.msgpack.decode(damaged, type=channel), msgspec.Struct)
        except (msgspec.DecodeError, UnicodeDecodeError):
            continue


def test_a_message_of_another_channel_is_refused() -> None:
    frame = msgspec.msgpack.encode(Cancel("tcp://x:1", ["r"]))
    for channel in (ToRouter, HandoffMessage):
        with pytest.raises(msgspec.ValidationError):
            msgspec.msgpack.decode(frame, type=channel)


def test_what_a_node_does_not_know_is_refused_not_ignored() -> None:
    """A router that is newer than a node must not have a request run without what it asked for."""
    submit = msgspec.to_builtins(Submit("r", "tcp://x:1", 1.0, prompt_token_ids=[1], sampling=SamplingParams()))
    submit["sampling"]["unheard_of"] = 1
    with pytest.raises(msgspec.ValidationError, match="unheard_of"):
        msgspec.msgpack.decode(msgspec.msgpack.encode(submit), type=ToNode)


def test_a_step_for_many_requests_is_small() -> None:
    batch = TokenBatch("decode-0", 1 << 60, [TokenChunk(f"req-{i:032x}", 100, [12345]) for i in range(256)])
    assert len(msgspec.msgpack.encode(batch)) < 256 * 96


@pytest.mark.parametrize("kept", [NodeInfo, RouterInfo, SamplingParams])
@given(data=st.data())
def test_what_is_kept_without_defaults_is_what_it_was(kept: Any, data: st.DataObject) -> None:
    value = data.draw(values_of(kept))
    without = without_defaults(value)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(without), type=kept) == value
    at_default = {
        field.name
        for field in msgspec.structs.fields(kept)
        if field.default is not msgspec.NODEFAULT and getattr(value, field.name) == field.default
    }
    assert not at_default & without.keys()
