"""What of another configuration a cluster that runs can take on."""

from __future__ import annotations

from typing import Any

import msgspec

from tandem.cluster.config import TandemConfig
from tandem.wire.nodes import Role

_RESTART = "needs `tandem down`, then `tandem serve` again"


def compare(running: TandemConfig, wanted: TandemConfig) -> tuple[dict[Role, int], list[str]]:
    """The pool sizes that have changed, and a sentence for every other setting that has. A pool whose size in the
    configuration is what it was keeps the size that it has been given since. No values: a setting may hold a key."""
    sizes: dict[Role, int] = {}
    names = _differences("", _without_sizes(running), _without_sizes(wanted))
    for role in Role:
        before, after = running.pools.of(role).nodes, wanted.pools.of(role).nodes
        if before == after:
            continue
        if before is None or after is None:
            names.append(f"pools.{role.value}.nodes")
        else:
            sizes[role] = after
    return sizes, [f"{name} differs from what is running: to change it {_RESTART}" for name in sorted(names)]


def with_sizes(config: TandemConfig, sizes: dict[Role, int]) -> TandemConfig:
    pools = {
        role.value: msgspec.structs.replace(config.pools.of(role), nodes=size) for role, size in sizes.items()
    }
    return msgspec.structs.replace(config, pools=msgspec.structs.replace(config.pools, **pools))


def _without_sizes(config: TandemConfig) -> Any:
    tree = msgspec.to_builtins(config)
    for pool in tree["pools"].values():
        if isinstance(pool, dict):
            pool.pop("nodes", None)
    return tree


def _differences(name: str, left: Any, right: Any) -> list[str]:
    if isinstance(left, dict) and isinstance(right, dict):
        return [
            difference
            for key in left.keys() | right.keys()
            for difference in _differences(f"{name}.{key}" if name else key, left.get(key), right.get(key))
        ]
    return [] if left == right else [name]
