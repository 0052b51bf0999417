"""Starts nodes and routers as named Ray actors, each on the machine that was chosen for it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from tandem.cluster.launcher import Confirm, Host, NodeHandle, RouterHandle
from tandem.cluster.models.adapters import find_adapter_here
from tandem.cluster.models.store import find_model_here
from tandem.cluster.on_ray.ending import PoliteEnd
from tandem.cluster.on_ray.exchange import only_with
from tandem.cluster.on_ray.handles import Create, RayNode, RayRanks, RayRouter, SpreadNode, encoded, end_node
from tandem.cluster.on_ray.router_actor import RouterActor
from tandem.cluster.on_ray.runtime import HEAD_ONLY
from tandem.cluster.on_ray.spread import NodePlacementGroup, RanksActor, group_of
from tandem.cluster.roles import make_node, traits_of
from tandem.node.config import NodeConfig
from tandem.router.config import RouterConfig
from tandem.wire.nodes import Role


class RayLauncher:
    """Launches detached actors: they outlive this process, and a later launcher finds them by name in the deployment's namespace."""

    def __init__(self, stop_s: float, *, namespace: str) -> None:
        self._stop_s = stop_s
        self._namespace = namespace

    def launch_node(
        self,
        config: NodeConfig,
        host: Host,
        slot: Role,
        needs: Mapping[str, float],
        confirm: Confirm,
        beside: Sequence[Host] = (),
    ) -> NodeHandle:
        options = _on_ray_node(host)
        if host.slots is not None:
            gpus = needs.get("GPU", 0)
            rest = {name: amount for name, amount in needs.items() if name != "GPU"}
            options |= {"resources": {slot.value: 1, **rest}, "num_gpus": gpus}
            if gpus and config.engine.model.device.startswith("cuda:"):
                config = _on_own_gpus(config)
        options["runtime_env"] = only_with(config.env)
        if python := config.engine.model.engine_python:
            options["runtime_env"]["py_executable"] = python
        kind = RayNode
        create = self._node_creator(config, options)
        if beside:
            machines = [there.name for there in (host, *beside)]
            name = group_of(config.node_id, self._namespace)
            group = NodePlacementGroup(name, {slot.value: 1, **needs}, machines)
            kind = SpreadNode

            def create() -> Any:
                group.reserve()
                there = {**options, "scheduling_strategy": group.on(0)}
                return self._node_creator(config, there)()

        node = kind(
            config.node_id,
            self._namespace,
            lambda running: is_same_node(running, config),
            create,
            confirm,
            self._stop_s,
            _machine_of(host),
        )
        if isinstance(node, SpreadNode):
            node.placement_group = group
            node.ranks = [
                self._ranks(node, config, number, there, options, confirm) for number, there in enumerate(beside, 1)
            ]
        return node

    def _ranks(
        self,
        node: SpreadNode,
        config: NodeConfig,
        number: int,
        host: Host,
        options: Mapping[str, Any],
        confirm: Confirm,
    ) -> RayRanks:
        name = f"{config.node_id}-machine{number}"

        def create() -> Any:
            there = {**options, "scheduling_strategy": node.placement_group.on(number)}
            return self._creator(RanksActor, name, there, encoded(config), number)()

        return RayRanks(name, self._namespace, node, create, confirm, self._stop_s, host.name)

    def launch_router(
        self, name: str, config: RouterConfig, host: Host | None, confirm: Confirm, door: str = ""
    ) -> RouterHandle:
        options: dict[str, Any] = {"resources": HEAD_ONLY} if host is None else _on_ray_node(host)
        options["runtime_env"] = only_with(config.env)
        create = self._creator(RouterActor, name, options, encoded(config), self._namespace)
        router = RayRouter(
            name,
            self._namespace,
            lambda running: is_same_router(running, config),
            create,
            confirm,
            self._stop_s,
            _machine_of(host),
        )
        router.door = door
        return router

    async def end(self, name: str) -> None:
        await end_node(name, self._namespace)

    def _node_creator(self, config: NodeConfig, options: Mapping[str, Any]) -> Create:
        # Each actor can become a node of any role, so it is told how to make them all.
        actor, known = traits_of(config.role).find_actor(), (find_model_here, find_adapter_here, PoliteEnd)
        return self._creator(actor, config.node_id, options, make_node, encoded(config), *known)

    def _creator(self, actor: Any, name: str, options: Mapping[str, Any], *given: object) -> Create:
        placed = actor.options(num_cpus=0, name=name, namespace=self._namespace, lifetime="detached", **options)
        return lambda: placed.remote(*given)


def is_same_node(running: bytes, wanted: NodeConfig) -> bool:
    """Compares everything but the role, which a running node can change."""
    made_with = msgspec.msgpack.decode(running, type=NodeConfig)
    return _without_role(made_with) == _without_role(wanted)


def is_same_router(running: bytes, wanted: RouterConfig) -> bool:
    """Compares everything but what does not need a new process: where the same tokenizer is found, and the number and placement of
    the deployment's routers."""
    made_with = msgspec.msgpack.decode(running, type=RouterConfig)
    others = {"processes": wanted.processes, "placement": wanted.placement}
    return msgspec.structs.replace(made_with, tokenizer_path=wanted.tokenizer_path, **others) == wanted


def _without_role(config: NodeConfig) -> NodeConfig:
    return msgspec.structs.replace(config, role=Role.AGGREGATED, transfer=None)


def _machine_of(host: Host | None) -> str:
    return "" if host is None or host.slots is None else host.name


def _on_ray_node(host: Host) -> dict[str, Any]:
    if host.slots is None:
        return {}  # a Ray of a single machine
    return {"scheduling_strategy": NodeAffinitySchedulingStrategy(node_id=host.name, soft=False)}


def _on_own_gpus(config: NodeConfig) -> NodeConfig:
    """Ray shows a process only the GPUs that it reserves for it, so CUDA numbers them from 0."""
    replace = msgspec.structs.replace
    engine = config.engine
    return replace(
        config,
        engine=replace(engine, model=replace(engine.model, device="cuda:0")),
        others=[replace(there, device="cuda:0") for there in config.others],
    )
