"""Chooses a node's machine, cores, device and share of memory. Pure: machines and the nodes on them in, a placement out.

Two nodes on the same core halve each other's speed. So the nodes of a machine get disjoint cores as long as there are enough, and hardware
threads of one core stay together. A running node never moves to other cores, so a machine's cores are divided among all the nodes that it is
expected to hold: its places, or the pools as configured.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.metadata
import os
import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from tandem.base.errors import ConfigurationError
from tandem.cluster.config import PoolsConfig, TandemConfig
from tandem.cluster.describe import counted
from tandem.cluster.launcher import Host, Needs, TakenPlace
from tandem.cluster.pools.room import check_cores
from tandem.cluster.pools.state import ClosedSlot, NodePlacement, NodeRecord, RankPlace
from tandem.machine.resources import core_quota, free_memory
from tandem.node.config import NodeConfig, OtherMachine
from tandem.router.config import RouterConfig
from tandem.wire.nodes import Role


@dataclass(frozen=True, slots=True)
class LocalMachine:
    cores: tuple[int, ...]  # that this process may use, hardware threads of one core next to each other
    gpus: int = 0
    free_memory: int | None = None  # bytes; None: unknown
    quota: int | None = None  # how many cores' time it may use; None: no limit


def this_host(machine: LocalMachine, address: str) -> Host:
    cores = machine.cores[: machine.quota]
    return Host(name="this machine", address=address, cores=cores, gpus=machine.gpus, head=True)


def place_nodes(config: TandemConfig, machine: LocalMachine) -> list[NodeRecord]:
    """Returns the nodes with which a deployment starts on a single machine. Raises ConfigurationError if they do not fit there."""
    host = this_host(machine, "")
    check_cores(config.pools, len(host.cores))
    _seats(host, config.pools)
    _check_machines(config)
    _check_devices(config, host)
    nodes: list[NodeRecord] = []
    for role in Role:
        for index in range(config.pools.of(role).first_size):
            placement = place(config, [host], nodes, role)
            nodes.append(NodeRecord(f"{role.value}-{index}", role, placement))
    return nodes


def of_one_machine(config: TandemConfig) -> TandemConfig:
    """Returns the configuration with each node that is spread over several machines reduced to its part on one of them."""
    pools = {
        role.value: msgspec.structs.replace(
            pool,
            machines=1,
            tensor_parallel=pool.ranks_per_machine,
            pipeline_parallel=1,
            context_parallel=1,
            resources=pool.resources_per_machine,
        )
        for role in Role
        if (pool := config.pools.of(role)).machines > 1
    }
    return msgspec.structs.replace(config, pools=msgspec.structs.replace(config.pools, **pools))


def place(
    config: TandemConfig,
    hosts: Sequence[Host],
    nodes: Iterable[NodeRecord],
    role: Role,
    closed: Iterable[ClosedSlot] = (),
) -> NodePlacement | None:
    """Returns a placement on the emptiest machine that has room for one more node of this role, or on as many as its pool's `machines`.
    None if too few have room. Machines of the island come first that has the fewest nodes of this role for those of the other that it
    hands KV to or gets it from."""
    nodes = list(nodes)
    shut = Counter((slot.host, slot.role) for slot in closed if not slot.device)
    broken = {(slot.host, slot.device) for slot in closed if slot.device}
    here: dict[str, list[NodePlacement]] = {host.name: [] for host in hosts}
    for node in nodes:
        for part in node.placement.parts if node.placement is not None else []:
            if part.host in here:
                here[part.host].append(part)
    with_room = [host for host in hosts if _has_slot(host, here[host.name], role, shut[host.name, role])]
    parts: list[NodePlacement] = []
    pool, surplus = config.pools.of(role), _surplus(hosts, nodes, role)

    def order(host: Host) -> tuple[int, str, int]:
        return surplus[host.island], host.island if pool.machines > 1 else "", len(here[host.name])

    for host in sorted(with_room, key=order):
        barred = {device for name, device in broken if name == host.name}
        placement = _place_on(config, host, here[host.name], role, barred)
        if placement is not None:
            parts.append(placement)
        if len(parts) == pool.machines:
            return _together(parts)
    return None


def _surplus(hosts: Sequence[Host], nodes: Iterable[NodeRecord], role: Role) -> Counter[str]:
    """By island: how many more nodes of this role it has than of the other of prefill and decode. 0 for other roles."""
    found: Counter[str] = Counter()
    if role.hands_over:
        islands = {host.name: host.island for host in hosts}
        for node in nodes:
            if node.role.hands_over and node.placement is not None and node.placement.host in islands:
                found[islands[node.placement.host]] += 1 if node.role is role else -1
    return found


def _together(parts: Sequence[NodePlacement]) -> NodePlacement:
    """Combines the parts into one placement. Rank 0 is on the first machine."""
    others = tuple(RankPlace(part.host, part.address, part.cores, part.device) for part in parts[1:])
    share = min(part.memory_share for part in parts)
    return msgspec.structs.replace(parts[0], memory_share=share, others=others)


def _has_slot(host: Host, taken: Sequence[NodePlacement], role: Role, shut: int) -> bool:
    if host.slots is None:
        return True
    return sum(placement.slot is role for placement in taken) + shut < host.slots.get(role, 0)


def _place_on(
    config: TandemConfig, host: Host, taken: Sequence[NodePlacement], role: Role, barred: Collection[str]
) -> NodePlacement | None:
    """`barred`: devices that must stay empty."""
    try:
        seats = _seats(host, config.pools)
    except ConfigurationError:
        return None
    cores = _choose_cores(host.cores, seats, taken, role, config.pools.of(role).threads)
    if cores is None:
        return None
    if not _has_devices(config, host, role):
        return None
    chosen = _choose_device(config, host, seats, taken, role, barred)
    if chosen is None:
        return None
    device, neighbours = chosen
    return NodePlacement(
        host.name, host.address, role, cores, device, config.engine_of(role).cache.share_on(device) / neighbours
    )


# --- cores

Seat = tuple[Role, int]
"""A node that a machine is expected to hold: its role, and how many of the machine's cores are for it."""


def _seats(host: Host, pools: PoolsConfig) -> list[Seat]:
    if host.slots is None:
        counts = {role: pools.of(role).last_size for role in Role}
    else:
        # A machine may offer places of every role; it holds nodes of one layout, disaggregated or aggregated.
        together = pools.aggregated.first_size > 0
        counts = {
            role: host.slots.get(role, 0)
            if (role.hands_over is not together if role.runs_requests else pools.of(role).first_size > 0)
            else 0
            for role in Role
        }
    # If cores do not divide evenly, the first get the odd ones: prefill nodes are bound by computing, the others mostly by memory.
    roles = [role for role in Role for _ in range(counts[role])]
    return list(zip(roles, _divide(len(host.cores), roles, pools), strict=True))


def _divide(cores: int, roles: list[Role], pools: PoolsConfig) -> list[int]:
    if cores == 0:
        return [0] * len(roles)  # unknown: nodes are not bound to cores
    wanted = [pools.of(role).threads for role in roles]
    fixed = sum(threads or 0 for threads in wanted)
    sharing = wanted.count(None)
    free = cores - fixed
    if free < 0 or (sharing and free == 0):
        rest = f" and {counted(sharing, 'node')} more needs at least one" if sharing else ""
        raise ConfigurationError(
            f"pools.*.threads asks for {counted(fixed, 'core')}{rest}, but this machine has {cores}: "
            "set fewer threads or fewer nodes"
        )
    size, odd = divmod(free, sharing) if sharing else (0, 0)
    # The first nodes get the remainder. With fewer cores than nodes, nodes share cores.
    shares = iter([max(1, size + (index < odd)) for index in range(sharing)])
    return [next(shares) if threads is None else threads for threads in wanted]


def _choose_cores(
    cores: tuple[int, ...], seats: Sequence[Seat], taken: Sequence[NodePlacement], role: Role, threads: int | None
) -> tuple[int, ...] | None:
    """Returns free cores; without any, those with the fewest nodes. A pool with `threads` gets that many free cores, or None."""
    if not cores:
        return ()
    used = Counter(core for placement in taken for core in placement.cores)
    free = [core for core in cores if not used[core]]
    if threads is not None:
        return tuple(free[:threads]) if len(free) >= threads else None
    size = _free_seat(seats, taken, role)
    if free:
        return tuple(free[:size])
    order = {core: index for index, core in enumerate(cores)}
    emptiest = sorted(cores, key=lambda core: (used[core], order[core]))[:size]
    return tuple(sorted(emptiest, key=order.__getitem__))


def _free_seat(seats: Sequence[Seat], taken: Sequence[NodePlacement], role: Role) -> int:
    """Returns the size of the largest free seat of this role, or of the smallest seat if none is free."""
    sizes = sorted((size for seat, size in seats if seat is role), reverse=True)
    for placement in taken:
        if placement.slot is role and len(placement.cores) in sizes:
            sizes.remove(len(placement.cores))
    return sizes[0] if sizes else min((size for _, size in seats), default=1)


# --- devices


def computes_on_cpu(config: TandemConfig, machine: LocalMachine) -> bool:
    return not _shares_gpus(config, machine.gpus) and config.model.device in ("auto", "cpu")


def _shares_gpus(config: TandemConfig, gpus: int) -> bool:
    return gpus > 0 and config.model.device in ("auto", "cuda")


def _has_devices(config: TandemConfig, host: Host, role: Role) -> bool:
    return not _shares_gpus(config, host.gpus) or config.pools.of(role).ranks_per_machine <= host.gpus


def _check_machines(config: TandemConfig) -> None:
    for role in Role:
        pool = config.pools.of(role)
        if pool.first_size and pool.machines > 1:
            raise ConfigurationError(
                f"pools.{role.value}.machines is {pool.machines}, and this is one machine: serve on a Ray cluster of several (--address), or set it to 1"
            )


def _check_devices(config: TandemConfig, host: Host) -> None:
    for role in Role:
        if config.pools.of(role).first_size and not _has_devices(config, host, role):
            raise ConfigurationError(
                f"a {role.value} node has {config.pools.of(role).ranks} ranks (pools.{role.value}.tensor_parallel times "
                f"pipeline_parallel times context_parallel) and needs a GPU for each, but this machine has {counted(host.gpus, 'GPU')}: set fewer ranks, "
                "or set model.device to cpu"
            )


def _choose_device(
    config: TandemConfig,
    host: Host,
    seats: Sequence[Seat],
    taken: Sequence[NodePlacement],
    role: Role,
    barred: Collection[str],
) -> tuple[str, int] | None:
    """Returns the first of the consecutive GPUs for the node's ranks, and how many nodes share the fullest of them, expected ones
    included. None if that would be more than expected because some GPUs are barred: their memory is given away."""
    device, gpus, pools = config.model.device, host.gpus, config.pools
    if not _shares_gpus(config, gpus):
        return device, max(1, len(seats), len(taken) + 1)
    used, expected = [0] * gpus, [0] * gpus
    for placement in taken:
        kind, _, first = placement.device.partition(":")
        if kind == "cuda":
            _occupy(used, int(first or 0), pools.of(placement.slot).ranks_per_machine)
    for seat, _ in seats:
        size = pools.of(seat).ranks_per_machine
        _occupy(expected, _emptiest(expected, size), size)
    width = pools.of(role).ranks_per_machine
    most = max(1, *expected)
    used = [most if f"cuda:{gpu}" in barred else count for gpu, count in enumerate(used)]
    begin = _emptiest(used, width)
    own = range(begin, begin + width)
    if barred and any(used[gpu] >= most for gpu in own):
        return None
    return f"cuda:{begin}", max(max(expected[gpu], used[gpu] + 1) for gpu in own)


def _emptiest(used: Sequence[int], width: int) -> int:
    """Returns where `width` consecutive GPUs begin whose fullest one has the fewest nodes. The first such place wins, which leaves no
    gaps."""
    starts = range(max(1, len(used) - width + 1))
    return min(starts, key=lambda start: (max(used[start : start + width]), sum(used[start : start + width])))


def _occupy(used: list[int], first: int, width: int) -> None:
    for gpu in range(first, min(first + width, len(used))):
        used[gpu] += 1


# --- what a process starts with


def node_config(config: TandemConfig, node_id: str, role: Role, placement: NodePlacement) -> NodeConfig:
    replace = msgspec.structs.replace
    engine, pool, transfer = config.engine_of(role), config.pools.of(role), config.transfer
    transfer = replace(transfer, options={**transfer.options, **pool.transfer_options})
    return NodeConfig(
        node_id=node_id,
        role=role,
        host=placement.address,
        engine=replace(
            engine,
            model=replace(
                engine.model,
                device=placement.device,
                threads=engine.model.threads or len(placement.cores),
                adapters={},  # they may have changed since: each node gets them before it is announced
            ),
            cache=replace(engine.cache, memory_share=placement.memory_share),
        ),
        transfer=transfer if role.hands_over else None,
        timeouts=config.timeouts.nodes,
        answers=config.answers,
        logs=config.logs,
        tensor_parallel=pool.tensor_parallel,
        pipeline_parallel=pool.pipeline_parallel,
        context_parallel=pool.context_parallel,
        cores=list(placement.cores),
        others=[OtherMachine(there.address, list(there.cores), there.device) for there in placement.others],
        env=pool.env,
    )


def router_config(config: RouterConfig, address: str) -> RouterConfig:
    """Returns the configuration for a router on the machine with this address, unless it listens on all addresses anyway."""
    everywhere = config.host in ("0.0.0.0", "::")
    return msgspec.structs.replace(config, host=config.host if everywhere else address, inbox_host=address)


# --- reading the machine


def this_machine() -> LocalMachine:
    cores = ordered_cores(os.sched_getaffinity(0))
    return LocalMachine(cores, visible_gpus(os.environ), free_memory(), core_quota())


def ordered_cores(usable: set[int], sysfs: Path = Path("/sys/devices/system/cpu")) -> tuple[int, ...]:
    def position(cpu: int) -> tuple[int, int, int]:
        topology = sysfs / f"cpu{cpu}" / "topology"
        try:
            package = int((topology / "physical_package_id").read_text())
            core = int((topology / "core_id").read_text())
        except (OSError, ValueError):
            return (0, cpu, cpu)  # the kernel does not report the topology: sort by number
        return (package, core, cpu)

    return tuple(sorted(usable, key=position))


def visible_gpus(environ: os._Environ[str] | dict[str, str], devices: Path = Path("/dev")) -> int:
    """Counts the GPUs without importing torch, which takes seconds."""
    if importlib.metadata.version("torch").endswith("+cpu"):
        return 0
    present = sum(1 for device in devices.glob("nvidia*") if re.fullmatch(r"nvidia\d+", device.name))
    listed = environ.get("CUDA_VISIBLE_DEVICES")
    if listed is None:
        return present
    named = [entry for entry in listed.split(",") if entry.strip()]
    # CUDA ignores everything from the first -1 on
    usable = named[: named.index("-1")] if "-1" in named else named
    return min(present, len(usable))


class MachineFacts(msgspec.Struct, frozen=True):
    machine: str  # equal for all Ray nodes that share the machine's cores
    cores: tuple[int, ...]  # that may be used there, hardware threads of one core next to each other
    gpus: int = 0
    quota: int | None = None  # how many cores' time it may use; None: no limit


def share_cores(found: Mapping[str, MachineFacts], given: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    """Returns the cores of every host. A host keeps the cores that it was given, because its nodes are bound to them. New hosts on one
    machine get equal parts of it; a host that comes later gets a part of the same size, of the least used cores."""
    shares = {name: given[name] for name in found if name in given}
    for machine in dict.fromkeys(one.machine for one in found.values()):
        here = [name for name, one in found.items() if one.machine == machine]
        used = Counter(core for name in here for core in shares.get(name, ()))
        new = [name for name in here if name not in shares]
        for position, name in enumerate(new):
            cores = found[name].cores
            size, odd = divmod(len(cores), len(here))
            size = max(1, size + (position < odd and len(new) == len(here)))
            size = min(size, found[name].quota or size)
            order = {core: index for index, core in enumerate(cores)}
            chosen = sorted(sorted(cores, key=lambda core: (used[core], order[core]))[:size], key=order.__getitem__)
            used.update(chosen)
            shares[name] = tuple(chosen)
    return shares


class ThisMachine:
    """This machine as the only host: it takes every node that fits, and never goes away."""

    def __init__(self, machine: LocalMachine, address: str) -> None:
        self._host = this_host(machine, address)

    async def present(self) -> list[Host]:
        return [self._host]

    async def changed(self, timeout_s: float) -> None:
        await asyncio.sleep(timeout_s)

    def placing(self) -> contextlib.AbstractAsyncContextManager[None]:
        return contextlib.nullcontext()

    def use(self, needs: Needs, taken: Sequence[TakenPlace]) -> None:
        """Does nothing: the machine's places do not depend on needs."""

    async def want(self, slots: dict[Role, int]) -> None:
        """Does nothing: no machine can be added."""
