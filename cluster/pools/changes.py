"""Which settings a running cluster can change, and how."""

from __future__ import annotations

from typing import Any

import msgspec

from tandem.base.errors import ConfigurationError
from tandem.cluster.config import DEFAULT_NAME, TandemConfig
from tandem.wire.nodes import Role

_RESTART = "needs `tandem down`, then `tandem serve` again"
_LATER = "`tandem apply` changes it while the cluster serves"
# Settings that nodes read at their start, that the controller can change at once, and that routers read at their start. Any other
# setting needs a restart of the cluster.
_OF_NODES = ("model", "cache", "scheduler", "transfer", "answers", "logs", "debug", "timeouts.nodes")
_AT_ONCE = ("autoscaling", "slo", "rollout", "timeouts", "controller")
_OF_ROUTERS = ("router",)
_OF_CONTROLLER = ("controller.env",)
# Nodes read a pool's settings at their start, except these.
_AT_ONCE_OF_POOLS = ("min", "max", "nodes")


class ConfigDifference(msgspec.Struct, frozen=True):
    """The settings that differ in another configuration, as names. It has no values, because one may be a key."""

    sizes: dict[Role, int | None]
    at_once: list[str]
    nodes: list[str]  # that nodes read at their start
    routers: list[str]  # that routers read at their start
    controller: list[str]  # that the controller's process reads at its start
    refused: list[str]


def difference(running: TandemConfig, wanted: TandemConfig) -> ConfigDifference:
    """Returns what differs. `sizes` has only pools whose size differs between the configurations: a pool that was scaled since keeps
    its size if the configuration's did not change."""
    sizes = {role: after for role in Role if running.pools.of(role).nodes != (after := wanted.pools.of(role).nodes)}
    kinds = ("at_once", "nodes", "routers", "controller", "refused")
    found: dict[str, list[str]] = {kind: [] for kind in kinds}
    for name in _different(running, wanted):
        found[_kind(name)].append(name)
    return ConfigDifference(sizes, **found)


def _different(running: TandemConfig, wanted: TandemConfig) -> list[str]:
    """Returns the names of the settings that differ, without pools' sizes. Two are no differences: the tokenizer's path, which follows
    from the model, and an inbox host that is not set, which the controller fills in."""
    names = set(_differences("", _without_sizes(running), _without_sizes(wanted))) - {"router.tokenizer_path"}
    if wanted.name == DEFAULT_NAME:
        # A configuration that is sent to the deployment's router need not repeat its name
        names.discard("name")
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
    match name.split("."):
        case ["pools", _, setting, *_]:
            return "at_once" if setting in _AT_ONCE_OF_POOLS else "nodes"
    return "refused"


def applied(running: TandemConfig, wanted: TandemConfig) -> TandemConfig:
    """Returns `wanted` with every refused setting as it is running, and with the environment of the controller's process. Raises
    ConfigurationError if the model's served name differs."""
    if running.router.model_name != wanted.router.model_name:
        raise ConfigurationError(
            f"clients ask for the model {running.router.model_name!r}, but this configuration would serve {wanted.router.model_name!r}: set "
            f"model.served_name: {running.router.model_name} to serve another model under the same name"
        )
    replace = msgspec.structs.replace
    router = wanted.router
    if router.inbox_host == TandemConfig().router.inbox_host:  # the controller filled it in
        router = replace(router, inbox_host=running.router.inbox_host)
    return replace(
        wanted, name=running.name, router=router, controller=replace(wanted.controller, env=running.controller.env)
    )


def compare(running: TandemConfig, wanted: TandemConfig) -> tuple[dict[Role, int], list[str]]:
    """Returns the pool sizes that differ, and a sentence for every other setting that does. A pool that was scaled since keeps its size
    if the configuration's did not change. The sentences have no values, because one may be a key."""
    found = difference(running, wanted)
    sizes = {
        role: size
        for role, size in found.sizes.items()
        if size is not None and running.pools.of(role).nodes is not None
    }
    follow = [f"pools.{role.value}.nodes" for role in found.sizes if role not in sizes]
    later = [*found.at_once, *found.nodes, *found.routers, *found.controller, *follow]
    said = dict.fromkeys(found.refused, f"to change it {_RESTART}") | dict.fromkeys(later, _LATER)
    return sizes, [f"{name} differs from what is running: {said[name]}" for name in sorted(said)]


def with_sizes(config: TandemConfig, sizes: dict[Role, int]) -> TandemConfig:
    pools = {role.value: msgspec.structs.replace(config.pools.of(role), nodes=size) for role, size in sizes.items()}
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
