"""The versions of the messages, which versions a process understands, and the rules by which messages change.

Processes of two versions of Tandem work together while a cluster goes over from one to the other. WIRE_VERSION is the
version of the messages between nodes, routers, the controller and commands. A process speaks with processes of its own
version, of the one before and of the one after. A node states its version when it is announced (`NodeInfo`) and in
its first message to another node (`CacheFingerprint`). If two versions are further apart, the processes do not
speak: the router, or the other node, says so in its log, and requests go elsewhere.

Sibling processes of a router, and the ranks of a node, always have one version. A router hands its listening socket,
and the page with its tally of connections, to a router of any version: `router/http/door.py`.

No message is translated. That works because these are the only changes:

- **A field is added, and has a default.** A process that does not know the field reads the rest of the message. A
  process that does not get it uses the default, so the default must mean what was done before the field existed. In
  a message that is a list on the wire (`array_like`), the new field is the last.
- **A message that asks for something refuses fields that it does not know** (`Submit`, and the structs in it that
  say so), because a request must not run without what it asked for. These messages leave out fields at their
  default, so a request that does not use a new field runs on a node of either version. A router sends a request that
  uses it only to nodes whose `NodeInfo.wire_version` has the field. SINCE names such fields, `needed_version` reads
  them from a message, and a test finds missing ones.
- **A message or a member of an enum is added.** It is sent only to processes that have stated a version with it.
  SINCE names messages from routers to nodes, too.
- **Nothing is removed, renamed or given another type or meaning.** Unused fields stay where they are.

tests/wire/versions/ has a description of every version's messages. A test compares the current messages with the
description of WIRE_VERSION, and each version with the one before it. Until a version is released, its description
may be written again:

    python -m tests.wire.descriptions

What two processes do, if the one has WIRE_VERSION 7:

    the other side's   router and node                         two nodes
    8                  they work together                      they work together
    7                  they work together                      they work together
    6                  they work together                      they work together
    5 or less          the node gets no requests, and the      the handshake is refused as incompatible: the decode
                       router's log says why                   node computes the prompt itself

The bytes of KV have a version of their own, KV_VERSION: what a block's bytes mean, and their order, beyond what a
fingerprint says. Two KV versions never mix, not even neighbouring ones, neither by transfer nor through a tier. If a
request's two nodes have different KV versions, the decode node computes the prompt.

To add a field to a message that describes, such as NodeStatus: give it a default, and count WIRE_VERSION up if the last
version was released. To add one to a request: the same, and name it in SINCE with the new version. After the next
release the entry can go, because every node in reach has the field.

To change what a field means: add another one, and fill both. A process that knows the new one reads that.

Settings are not messages: a process gets its settings from a controller that knows all of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import msgspec

from tandem.base.settings import struct_fields

WIRE_VERSION = 1
KV_VERSION = 2

# The version that brought a message from routers to nodes ("Ping"), or a field of a message that refuses unknown fields
# ("Submit.lora"), unless every version in reach has it. A node of an earlier version could not read such a message,
# nor any later one on the same line.
SINCE: Mapping[str, int] = {}

# How far two versions may be apart.
REACH = 1


def out_of_reach(version: int) -> str | None:
    """Returns why this process cannot speak with one of this version; None if it can."""
    if abs(version - WIRE_VERSION) <= REACH:
        return None
    older = "its" if version < WIRE_VERSION else "this process's"
    return (
        f"it speaks version {version} of Tandem's messages, and this process version {WIRE_VERSION}: they may be {REACH} apart. "
        f"Bring {older} Tandem to a version in between first"
    )


def needed_version(message: msgspec.Struct) -> int:
    """Returns the first version that understands all of the message; 0 if every version in reach does. A field at its
    default is left out, so it needs no version."""
    return max(_versions_in(message), default=0) if SINCE else 0


def _versions_in(value: object) -> Iterator[int]:
    if isinstance(value, msgspec.Struct):
        name = type(value).__name__
        yield SINCE.get(name, 0)
        for field in struct_fields(type(value)):
            has = getattr(value, field.name)
            default = field.default if field.default_factory is msgspec.NODEFAULT else field.default_factory()
            if has != default:
                yield SINCE.get(f"{name}.{field.name}", 0)
                yield from _versions_in(has)
    elif isinstance(value, Mapping):
        yield from _versions_in(list(value.values()))
    elif isinstance(value, list | tuple) and value and isinstance(value[0], msgspec.Struct):
        for item in value:
            yield from _versions_in(item)
