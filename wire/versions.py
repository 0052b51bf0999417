"""Which versions of the messages a process understands, and by what rules they change.

Processes of two versions of Tandem work together while a cluster goes over from one to the other. WIRE_VERSION is the version of the
messages between nodes, routers, the controller and commands. (Router processes that tell each other what they know are of one version, and so
are the ranks of a node. A router hands its listening socket and the page with its tally of connections to one of any version: `router/http/door.py`.) A process speaks with those of its own version, of the one before and of the one after. Every node states its version where it is
announced (`NodeInfo`) and in its first word to another node (`CacheFingerprint`). Two that are further apart do not speak: the router, or
the other node, says so in its log, and requests go elsewhere.

No message is translated. That works because of what a change may be:

- **A field is added, and it has a default.** Who does not know it reads the rest of the message. Who does not get it has the default, so the
  default means what was done before there was the field. In a message that is a list on the wire (`array_like`), it is the last one.
- **What asks for an answer refuses what it does not know** (`Submit` and the structs in it that say so): a request must not run without what it
  asked for. These leave out what has its default, so a request that does not use the new field runs on a node of either version. A router
  sends one that does use it only to nodes whose `NodeInfo.wire_version` has the field: SINCE names such fields, `needed_version` reads them
  off a message, and a test finds those that are missing.
- **A message or a name of an enum is added.** It is sent only to processes that have said that they are of a version that has it. SINCE
  names messages of routers to nodes, too.
- **Nothing is taken away, renamed or given another type or meaning.** What is no longer used stays where it is.

tests/wire/versions/ holds a description of every version's messages. A test compares the messages as they are with the description of
WIRE_VERSION, and each version with the one before it. Until a version is released its own description may be written again:

    python -m tests.wire.descriptions

What two processes of different versions do, with WIRE_VERSION 7 on one side:

    the other side's   router and node                         two nodes
    8                  they work together                      they work together
    7                  they work together                      they work together
    6                  they work together                      they work together
    5 or less          the node gets no requests, and the      the handshake is refused as incompatible: the decode
                       router's log says why                   node computes the prompt itself

The bytes of KV have a version of their own, KV_VERSION: what a block's bytes mean, and the order in which they lie, beyond what a
fingerprint says of it. There is no speaking with the version before: KV of two versions never mixes, neither by transfer nor through a
tier. A request whose two nodes have different ones is computed where it decodes.

To add a field to a message that describes, such as NodeStatus: give it a default, and count WIRE_VERSION up if the last version was released.
To add one to a request: the same, and name it in SINCE with the new version. After the next release it can go from there: every node in
reach has the field.

To change what a field means: add another one, and fill both. Who knows the new one reads that.

Settings are not messages. A process gets its settings from a controller that knows every setting in them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import msgspec

WIRE_VERSION = 1
KV_VERSION = 2

# The version that a message of routers to nodes ("Ping"), or a field of one that refuses what it does not know ("Submit.lora"), came
# with, if not every version in reach has it. A node of a version before could not read the message, nor any after it on the same line.
SINCE: Mapping[str, int] = {}

# How far two versions may be apart.
REACH = 1


def out_of_reach(version: int) -> str | None:
    """Why a process that speaks this version cannot be spoken with, or None."""
    if abs(version - WIRE_VERSION) <= REACH:
        return None
    older = "its" if version < WIRE_VERSION else "this process's"
    return (
        f"it speaks version {version} of Tandem's messages, and this process version {WIRE_VERSION}: they may be {REACH} apart. "
        f"Bring {older} Tandem to a version in between first"
    )


def needed_version(message: msgspec.Struct) -> int:
    """The first version that understands all of the message; 0: every one in reach does. A field at its default is left out, and asks
    for nothing."""
    return max(_versions_in(message), default=0) if SINCE else 0


def _versions_in(value: object) -> Iterator[int]:
    if isinstance(value, msgspec.Struct):
        name = type(value).__name__
        yield SINCE.get(name, 0)
        for field in msgspec.structs.fields(value):
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
