"""What of another configuration a cluster that runs can take on."""

from __future__ import annotations

from typing import Any

import msgspec

from tandem.cluster.config import DEFAULT_NAME, TandemConfig
from tandem.wire.errors import ConfigurationError
from tandem.wire.nodes import Role

_RESTART = "needs `tandem down`, then `tandem serve` again"
_LATER = "`tandem apply` changes it while the cluster serves"
# What nodes read when they start, what the controller can do with at once, and what routers read when they start; all else needs a
# restart.
_OF_NODES = ("model", "cache", "scheduler", "transfer", "answers", "logs", "debug", "timeouts.nodes")
_AT_ONCE = ("autoscaling", "slo", "rollout", "timeouts", "controller", "pools.nodes_per_core")
_OF_ROUTERS = ("router",)
_OF_CONTROLLER = ("controller.env",)
# Whether nodes are replaced for it.
_OF_POOLS = {
    "threads": True,
    "tensor_parallel": True,
    "pipeline_parallel": True,
    "machines": True,
    "env": True,
    "transfer_options": True,
    "cache": True,
    "scheduler": True,
    "resources": True,
    "label_selector": True,
    "min": False,
    "max": False,
    "nodes": False,
}


class ConfigDifference(msgspec.Struct, frozen=True):
    """What is different in another configuration, by the names of settings; no values: one may hold a key."""

    sizes: dict[Role, int | None]
    at_once: list[str]
    nodes: list[str]  # read by nodes when they start
    routers: list[str]  # read by routers when they start
    controller: list[str]  # read by the controller's process when it starts
    refused: list[str]


def difference(running: TandemConfig, wanted: TandemConfig) -> ConfigDifference:
    """A pool whose size in the configuration is what it was keeps the size that it has been given since."""
    sizes = {
        role: after for role in Role if running.pools.of(role).nodes != (after := wanted.pools.of(role).nodes)
    }
    found: dict[str, list[str]] = {
        "at_once": [],
        "nodes": [],
        "routers": [],
        "controller": [],
        "refused": [],
    }
    for name in _different(running, wanted):
        found[_kind(name)].append(name)
    return ConfigDifference(sizes, **found)


def _different(running: TandemConfig, wanted: TandemConfig) -> list[str]:
    """The names of settings but pools' sizes. A tokenizer is found where the model is, and where no address is named, routers are
    told one."""
    names = set(_differences("", _without_sizes(running), _without_sizes(wanted))) - {"router.tokenizer_path"}
    if wanted.name == DEFAULT_NAME:
        names.discard("name")  # a configuration that is sent to one of its routers need not repeat it
    if wanted.router.inbox_host == TandemConfig().router.inbox_host:
        names.discard("router.inbox_host")
    return sorted(names)


def _kind(name: str) -> str:
    def within(sections: tuple[str, ...]) -> bool:
        return any(name == section or name.startswith(f"{section}.") for section in sections)

    if within(_OF_NODES):
        return "nodes"
    if within(_OF_CONTROLLER):
        return "controller"
    if within(_AT_ONCE):
        return "at_once"
    if within(_OF_ROUTERS):
        return "routers"
    section, _, of_pool = name.partition(".")
    setting = of_pool.partition(".")[2].partition(".")[0]
    if section == "pools" and setting in _OF_POOLS:
        return "nodes" if _OF_POOLS[setting] else "at_once"
    return "refused"


def applied(running: TandemConfig, wanted: TandemConfig) -> TandemConfig:
    """`wanted`, with what is refused as it was, and the controller's environment: that is what its process has. Raises ConfigurationError for another model's name."""
    if running.router.model_name != wanted.router.model_name:
        raise ConfigurationError(
            f"clients ask for the model {running.router.model_name!r}, and this would serve {wanted.router.model_name!r}: set "
            f"model.served_name: {running.router.model_name} to put another model in its place under that name"
        )
    replace = msgspec.structs.replace
    router = wanted.router
    if router.inbox_host == TandemConfig().router.inbox_host:  # routers were told one
        router = replace(router, inbox_host=running.router.inbox_host)
    return replace(
        wanted,
        name=running.name,
        router=router,
        controller=replace(wanted.controller, env=running.controller.env),
    )


def compare(running: TandemConfig, wanted: TandemConfig) -> tuple[dict[Role, int], list[str]]:
    """The pool sizes that have changed, and a sentence for every other setting that has. A pool whose size in the
    configuration is what it was keeps the size that it has been given since. No values: a setting may hold a key."""
    sizes: dict[Role, int] = {}
    names = _different(running, wanted)
    for role in Role:
        before, after = running.pools.of(role).nodes, wanted.pools.of(role).nodes
        if before == after:
            continue
        if before is None or after is None:
            names.append(f"pools.{role.value}.nodes")
        else:
            sizes[role] = after
    return sizes, [
        f"{name} differs from what is running: {_LATER if _kind(name) != 'refused' else f'to change it {_RESTART}'}"
        for name in sorted(names)
    ]


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
