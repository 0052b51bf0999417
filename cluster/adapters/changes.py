"""Changes which LoRA adapters nodes have while the cluster serves, on every node or on none.

A change is recorded once every serving node has taken it, so whatever is recorded can be served. If the controller dies in the middle of
a change, the next one gives the nodes the recorded set back.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence

import msgspec

from tandem.base.errors import ConfigurationError, DeadlineExceeded, TandemError, Unavailable
from tandem.cluster.pools.node_supervisor import NodeSupervisor
from tandem.cluster.pools.reconciler import Reconciler
from tandem.cluster.pools.supervisor import AdapterPlaces
from tandem.cluster.pools.wings import Joints
from tandem.cluster.settings.rules import broken_adapters
from tandem.cluster.tasks import Clock
from tandem.wire.adapters import check_place


def join(joints: Joints) -> None:
    joints.adapters = AdapterChanges(joints.pools, joints.clock).change


class AdapterChanges:
    def __init__(self, pools: Reconciler, clock: Clock) -> None:
        self._pools = pools
        self._clock = clock

    async def change(self, load: AdapterPlaces, unload: Sequence[str]) -> dict[str, str]:
        """Changes all nodes or none. Returns the location of every adapter by name once all routers serve them. See `cluster.orders.Adapters`."""
        pools = self._pools
        async with pools.changing_adapters:
            await pools.has_read.wait()
            before = self._before()
            wanted = self._wanted(before, load, unload)
            if wanted == before:
                return wanted
            if pools.state.rollout is not None:
                raise Unavailable("a rollout is replacing nodes: change adapters when it is over (`tandem status`)")
            number = pools.state.revision.number
            nodes = [node for node in pools.fleet.nodes.values() if node.serves]
            if not nodes:
                raise Unavailable(
                    "no node is ready to load an adapter: try again when `tandem status` shows one that is ready"
                )
            try:
                digests = await self._tell(nodes, wanted)
                await self._keep(wanted, number)
            except TandemError:
                await asyncio.gather(*(node.set_adapters(before) for node in nodes), return_exceptions=True)
                raise
        for name in wanted.keys() | before.keys():
            if wanted.get(name) != before.get(name):
                pools.note(f"the adapter {name} was {'loaded' if name in wanted else 'unloaded'}, as asked")
        await self._until_routers_serve(digests, before.keys() - wanted.keys())
        return wanted

    def _before(self) -> dict[str, str]:
        state = self._pools.state
        adapters = state.revision.adapters
        return dict(self._pools.config.model.adapters if adapters is None else adapters)

    def _wanted(self, before: dict[str, str], load: AdapterPlaces, unload: Sequence[str]) -> dict[str, str]:
        for name in unload:
            if name not in before:
                there = ", ".join(sorted(before)) or "none"
                raise ConfigurationError(f"there is no adapter {name[:200]!r}; there are: {there}")
            if name in load:
                raise ConfigurationError(f"the adapter {name!r} cannot be both loaded and unloaded")
        for name, where in load.items():
            check_place(name, where)
        wanted = {name: where for name, where in before.items() if name not in unload} | dict(load)
        config = self._pools.config
        model = config.router.model_name
        changed = msgspec.structs.replace(
            config, model=msgspec.structs.replace(config.model, adapters=wanted, served_name=model)
        )
        for path, what in broken_adapters(changed):
            raise ConfigurationError(f"{'.'.join(path)} {what}")
        return wanted

    async def _tell(self, nodes: Sequence[NodeSupervisor], wanted: AdapterPlaces) -> dict[str, str]:
        """Gives the nodes these adapters. Returns their digests, which must be equal on all nodes. Raises if one node fails."""
        answers = await asyncio.gather(*(node.set_adapters(wanted) for node in nodes), return_exceptions=True)
        digests: dict[str, str] = {}
        for node, answer in zip(nodes, answers, strict=True):
            if isinstance(answer, ConfigurationError):
                raise ConfigurationError(f"{node.name}: {answer}") from answer
        for node, answer in zip(nodes, answers, strict=True):
            if isinstance(answer, BaseException):
                raise Unavailable(
                    f"{node.name} did not confirm the adapters, so the change is undone on every node: {answer}"
                ) from answer
            for name, digest in answer.items():
                if digests.setdefault(name, digest) != digest:
                    raise ConfigurationError(
                        f"the adapter {name!r} has other files on {node.name}'s machine than on {nodes[0].name}'s: put the same files "
                        "on both"
                    )
        return digests

    async def _keep(self, wanted: dict[str, str], number: int) -> None:
        pools = self._pools
        async with pools.writing():
            revision = pools.state.revision
            if pools.state.rollout is not None or revision.number != number:
                raise Unavailable(
                    "a rollout began while the adapters were loading: change them when it is over (`tandem status`)"
                )
            revision = msgspec.structs.replace(revision, adapters=wanted)
            await pools.keep(msgspec.structs.replace(pools.state, revision=revision))

    async def _until_routers_serve(self, digests: Mapping[str, str], gone: Iterable[str]) -> None:
        """Waits until every router serves exactly the new adapters, which it learns from the nodes. Raises Unavailable after
        `timeouts.unresponsive_s`."""
        pools, gone = self._pools, set(gone)

        def late() -> list[str]:
            return [
                router.name
                for router in pools.fleet.routers.values()
                if router.serves
                and (digests.items() - router.load.adapters.items() or not gone.isdisjoint(router.load.adapters))
            ]

        async def until_served() -> None:
            while late():
                await pools.changed.wait()

        try:
            limit_s = pools.config.timeouts.unresponsive_s
            await self._clock.within(limit_s, until_served(), "hearing of it")
        except DeadlineExceeded:
            if names := late():
                raise Unavailable(
                    f"every node has the change, but {', '.join(names)} did not confirm it yet, maybe because a node is starting: "
                    "/v1/models shows when it has"
                ) from None
