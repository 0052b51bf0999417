from __future__ import annotations

import contextlib
import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.wire.zmtp import PUSH_OPENING, MessageReader, ProtocolError

LIMIT = 1000
READY = b"\x04\x06\x05READY"


def frame(body: bytes, *, more: bool = False, long: bool = False) -> bytes:
    long = long or len(body) > 255
    return bytes([more | long << 1]) + len(body).to_bytes(8 if long else 1, "big") + body


def read(data: bytes, cuts: list[int]) -> list[list[bytes]]:
    reader, found = MessageReader(LIMIT), []
    edges = sorted({0, len(data), *(cut % (len(data) + 1) for cut in cuts)})
    for start, end in itertools.pairwise(edges):
        reader.feed(data[start:end])
        while (message := reader.next_message()) is not None:
            found.append(message)
    return found


@given(
    st.lists(st.lists(st.binary(max_size=300), min_size=1, max_size=3), max_size=5),
    st.booleans(),
    st.lists(st.integers(0, 10_000), max_size=30),
)
def test_messages_are_the_same_however_the_bytes_are_cut(
    messages: list[list[bytes]], long: bool, cuts: list[int]
) -> None:
    data = PUSH_OPENING + READY
    for frames in messages:
        data += b"".join(frame(body, more=True, long=long) for body in frames[:-1])
        data += frame(frames[-1], long=long)
    assert read(data, cuts) == messages


def test_every_byte_by_itself() -> None:
    data = PUSH_OPENING + frame(b"a") + frame(b"") + frame(b"b" * 300)
    assert read(data, list(range(len(data)))) == [[b"a"], [b""], [b"b" * 300]]


@pytest.mark.parametrize(
    "data",
    [
        b"\xfe",
        b"GET / HTTP/1.1\r\n",
        b"\xff" + bytes(8) + b"\x7e",
        PUSH_OPENING[:10] + b"\x02" + PUSH_OPENING[11:],  # another version
        PUSH_OPENING[:12] + b"PLAIN".ljust(20, b"\0") + PUSH_OPENING[32:],  # another mechanism
        PUSH_OPENING + frame(bytes(LIMIT + 1))[:9],  # said to be too large is enough
        PUSH_OPENING + frame(bytes(LIMIT), more=True) + frame(b"x"),  # in pieces, too
    ],
)
def test_what_is_no_push_socket_is_refused(data: bytes) -> None:
    with pytest.raises(ProtocolError):
        read(data, [])


@given(st.binary(max_size=200), st.booleans())
def test_no_bytes_do_more_than_be_refused(data: bytes, greeted: bool) -> None:
    with contextlib.suppress(ProtocolError):
        read(PUSH_OPENING + data if greeted else data, [])


def test_a_message_of_endless_frames_is_refused_after_some() -> None:
    reader = MessageReader(1 << 20)
    reader.feed(PUSH_OPENING + b"\x01\x00" * 20_000)
    with pytest.raises(ProtocolError, match="frames"):
        reader.next_message()


def test_a_message_is_refused_for_what_its_frames_have_together() -> None:
    reader = MessageReader(100)
    frame = b"\x01\x3c" + bytes(60)
    reader.feed(PUSH_OPENING + frame + frame)
    with pytest.raises(ProtocolError, match="bytes"):
        reader.next_message()
