"""Describes every message between Tandem's processes in a form that can be stored and compared, one file for each version.

`python -m tests.wire.descriptions` rewrites the file of WIRE_VERSION. Do that only for a version that was never released.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import reduce
from operator import or_
from pathlib import Path
from types import UnionType
from typing import Any, get_args

import msgspec
from msgspec import inspect

from tandem.base.logs import ClusterLogs, LogPage, LogsQuery
from tandem.base.wings import find_wings
from tandem.cluster.control import AppliedChange, ClusterView, RolloutView
from tandem.wire.handoff import HandoffMessage
from tandem.wire.lines import Letter, Resend
from tandem.wire.nodes import NodeInfo, NodeSighting, RouterInfo, RouterQueue
from tandem.wire.requests import ToNode, ToRouter
from tandem.wire.versions import WIRE_VERSION

VERSIONS = Path(__file__).parent / "versions"
# By the module that has them.
_OF_WINGS = {
    "tandem.wire.sharing": ("node to node, tiers", ["SharingMessage"]),
    "tandem.kvtransfer.nccl.pair": ("node to node, NCCL", ["PairMessage", "Rendezvous"]),
}
_CHANNELS_OF_WINGS = {
    channel: reduce(or_, (getattr(module, kind) for kind in kinds))
    for module in find_wings([*_OF_WINGS])
    for channel, kinds in [_OF_WINGS[module.__name__]]
}
IS_WHOLE = len(_CHANNELS_OF_WINGS) == len(_OF_WINGS)  # no wing with messages was deleted
CHANNELS: dict[str, Any] = {
    "numbered lines": Letter[Resend],  # whatever message it carries
    "router to node": ToNode | Resend,
    "node to router": ToRouter | Resend,
    "node to node, transfers": HandoffMessage,
    **_CHANNELS_OF_WINGS,
    "node to controller": NodeInfo,
    "router to controller": RouterInfo | RouterQueue | NodeSighting,
    "command to controller": LogsQuery,
    "controller to command": ClusterView | RolloutView | AppliedChange | ClusterLogs | LogPage,
}

Description = dict[str, Any]


def members_of(channel: Any) -> tuple[Any, ...]:
    return get_args(channel) if isinstance(channel, UnionType) else (channel,)


def described() -> Description:
    structs: dict[str, Any] = {}
    enums: dict[str, Any] = {}
    channels = {name: sorted(_members(channel, structs, enums)) for name, channel in CHANNELS.items()}
    return {"channels": channels, "structs": dict(sorted(structs.items())), "enums": dict(sorted(enums.items()))}


def kept(version: int) -> Description:
    read: Description = json.loads((VERSIONS / f"{version}.json").read_text(encoding="utf-8"))
    return read


def written_as(description: Description) -> str:
    return json.dumps(description, indent=1) + "\n"


def _members(channel: Any, structs: dict[str, Any], enums: dict[str, Any]) -> list[str]:
    return [_text(inspect.type_info(one), structs, enums) for one in members_of(channel)]


def _text(info: inspect.Type, structs: dict[str, Any], enums: dict[str, Any]) -> str:
    def inner(part: inspect.Type) -> str:
        return _text(part, structs, enums)

    match info:
        case inspect.StructType(cls=cls):
            return _struct(info, cls, structs, enums)
        case inspect.EnumType(cls=cls):
            enums[cls.__name__] = sorted(member.value for member in cls)
            return cls.__name__
        case inspect.UnionType(types=types):
            return " | ".join(sorted(map(inner, types)))
        case inspect.ListType(item_type=item):
            return f"list[{inner(item)}]"
        case inspect.VarTupleType(item_type=item):
            return f"tuple[{inner(item)}, ...]"
        case inspect.TupleType(item_types=items):
            return f"tuple[{', '.join(map(inner, items))}]"
        case inspect.DictType(key_type=key, value_type=value):
            return f"dict[{inner(key)}, {inner(value)}]"
        case inspect.LiteralType(values=values):
            return f"one of {sorted(values)}"
        case _:
            return type(info).__name__.removesuffix("Type").lower()


def _struct(info: inspect.StructType, cls: Any, structs: dict[str, Any], enums: dict[str, Any]) -> str:
    cls = getattr(cls, "__origin__", cls)  # of a generic one
    name: str = cls.__name__
    if name in structs:
        return name
    config = cls.__struct_config__
    fields: list[dict[str, Any]] = []
    structs[name] = {
        "tag": config.tag,
        "is_list": config.array_like,
        "refuses_unknown": config.forbid_unknown_fields,
        "omits_defaults": config.omit_defaults,
        "fields": fields,
    }
    for field in info.fields:
        said: dict[str, Any] = {"name": field.encode_name, "type": _text(field.type, structs, enums)}
        if not field.required:
            default = field.default
            if default is msgspec.NODEFAULT:
                default = field.default_factory()
            said["default"] = json.loads(msgspec.json.encode(default))
        fields.append(said)
    return name


def breaks(older: Description, newer: Description) -> list[str]:
    """The messages that a process of one version would misread from the other, a sentence for each."""
    found = []
    for channel, members in older["channels"].items():
        for missing in set(members) - set(newer["channels"].get(channel, [])):
            found.append(f"{missing} is no longer read on the channel {channel!r}")
    for name, values in older["enums"].items():
        for missing in set(values) - set(newer["enums"].get(name, [])):
            found.append(f"{name} has no {missing!r} any more")
    for name, before in older["structs"].items():
        after = newer["structs"].get(name)
        if after is None:
            found.append(f"{name} is gone")
        else:
            found += [f"{name}: {sentence}" for sentence in _breaks_of(before, after)]
    for name, struct in newer["structs"].items():
        if struct["refuses_unknown"] and not struct["omits_defaults"]:
            found.append(f"{name}: it refuses fields that it does not know, so it must leave out defaults")
    return found


def not_named(older: Description, newer: Description, since: Mapping[str, int], version: int) -> list[str]:
    """The additions of the newer version that a node of the older one could not read, and that SINCE does not name with this version."""
    added = set(newer["channels"]["router to node"]) - set(older["channels"]["router to node"])
    for name, struct in newer["structs"].items():
        if struct["refuses_unknown"] and name in older["structs"]:
            before = {field["name"] for field in older["structs"][name]["fields"]}
            added |= {f"{name}.{field['name']}" for field in struct["fields"] if field["name"] not in before}
    of_commands = tuple(f"{name}." for name in newer["channels"]["command to controller"])
    return sorted(name for name in added if since.get(name) != version and not name.startswith(of_commands))


def _breaks_of(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    found = [
        f"{how} was {before[how]!r} and is {after[how]!r}"
        for how in ("tag", "is_list", "refuses_unknown", "omits_defaults")
        if before[how] != after[how]
    ]
    fields = {field["name"]: field for field in after["fields"]}
    for field in before["fields"]:
        name = field["name"]
        now = fields.pop(name, None)
        if now is None:
            found.append(f"the field {name} is gone")
        elif now["type"] != field["type"]:
            found.append(f"the field {name} was {field['type']} and is {now['type']}")
        elif "default" in field and "default" not in now:
            found.append(f"the field {name} has no default any more")
        elif before["omits_defaults"] and field.get("default") != now.get("default"):
            found.append(f"the field {name} is left out when it has its default, which is another one now")
    found += [f"the new field {name} has no default" for name, field in fields.items() if "default" not in field]
    names = [field["name"] for field in before["fields"]]
    if before["is_list"] and [field["name"] for field in after["fields"]][: len(names)] != names:
        found.append("it is a list, so new fields come last")
    return found


if __name__ == "__main__":
    VERSIONS.mkdir(exist_ok=True)
    (VERSIONS / f"{WIRE_VERSION}.json").write_text(written_as(described()), encoding="utf-8")
