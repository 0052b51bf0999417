"""Which node gets which cores, which device and how much of the memory. Pure: a machine and the pools in, a plan out.

Two nodes that compute on the same core halve each other, so nodes of one machine get disjoint cores as long as
there are enough, and neighbouring hardware threads stay together.
"""

from __future__ import annotations

import importlib.metadata
import os
import re
from collections import Counter
from dataclasses import dataclass
from itertools import islice, pairwise
from pathlib import Path

import msgspec

from cluster.config import PoolsConfig, TandemConfig
from cluster.describe import counted
from engine.node_config import NodeConfig
from wire.errors import ConfigurationError
from wire.nodes import Role

# Where cores do not divide evenly, whoever reads prompts gets the odd one: it computes, the others mostly wait for memory.
_ROLE_ORDER = (Role.PREFILL, Role.DECODE, Role.AGGREGATED)


@dataclass(frozen=True, slots=True)
class Machine:
    cores: tuple[int, ...]  # those this process may use, hardware threads of one core side by side
    gpus: int = 0


@dataclass(frozen=True, slots=True)
class NodePlacement:
    node_id: str
    role: Role
    cores: tuple[int, ...]
    device: str
    memory_share: float  # of what is free on its device


def place_nodes(config: TandemConfig, machine: Machine) -> list[NodePlacement]:
    nodes = [
        (f"{role.value}-{index}", role)
        for role in _ROLE_ORDER
        for index in range(config.pools.of(role).nodes)
    ]
    cores = _divide_cores([role for _, role in nodes], config.pools, machine.cores)
    devices = [_device_for(index, config.model.device, machine.gpus) for index in range(len(nodes))]
    neighbours = Counter(devices)
    return [
        NodePlacement(node_id, role, cores[i], devices[i], config.cache.memory_share / neighbours[devices[i]])
        for i, (node_id, role) in enumerate(nodes)
    ]


def _divide_cores(roles: list[Role], pools: PoolsConfig, cores: tuple[int, ...]) -> list[tuple[int, ...]]:
    wanted = [pools.of(role).threads for role in roles]
    fixed = sum(threads or 0 for threads in wanted)
    sharing = wanted.count(None)
    free = len(cores) - fixed
    if free < 0 or (sharing and free == 0):
        rest = f" and {counted(sharing, 'node')} more needs at least one" if sharing else ""
        raise ConfigurationError(
            f"pools.*.threads ask for {counted(fixed, 'core')}{rest}, but this machine offers {len(cores)}: "
            "ask for fewer threads or fewer nodes"
        )
    own = iter(cores[:fixed])
    shares = iter(_equal_shares(cores[fixed:], sharing))
    return [next(shares) if threads is None else tuple(islice(own, threads)) for threads in wanted]


def _equal_shares(cores: tuple[int, ...], nodes: int) -> list[tuple[int, ...]]:
    """Where they do not divide evenly, the first nodes get one more; fewer cores than nodes are taken in turns."""
    if len(cores) < nodes:
        return [(cores[index % len(cores)],) for index in range(nodes)]
    size, odd = divmod(len(cores), nodes) if nodes else (0, 0)
    starts = [index * size + min(index, odd) for index in range(nodes + 1)]
    return [cores[start:end] for start, end in pairwise(starts)]


def _device_for(index: int, device: str, gpus: int) -> str:
    if device in ("auto", "cuda") and gpus > 0:
        return f"cuda:{index % gpus}"
    return device


def node_config(config: TandemConfig, placement: NodePlacement, host: str) -> NodeConfig:
    replace = msgspec.structs.replace
    engine = config.engine
    return NodeConfig(
        node_id=placement.node_id,
        role=placement.role,
        host=host,
        engine=replace(
            engine,
            model=replace(
                engine.model, device=placement.device, threads=engine.model.threads or len(placement.cores)
            ),
            cache=replace(engine.cache, memory_share=placement.memory_share),
        ),
        transfer=None if placement.role is Role.AGGREGATED else config.transfer,
        timeouts=config.timeouts.nodes,
        cores=list(placement.cores),
    )


# --- reading the machine


def this_machine() -> Machine:
    return Machine(cores=ordered_cores(os.sched_getaffinity(0)), gpus=visible_gpus(os.environ))


def ordered_cores(usable: set[int], sysfs: Path = Path("/sys/devices/system/cpu")) -> tuple[int, ...]:
    def position(cpu: int) -> tuple[int, int, int]:
        topology = sysfs / f"cpu{cpu}" / "topology"
        try:
            package = int((topology / "physical_package_id").read_text())
            core = int((topology / "core_id").read_text())
        except (OSError, ValueError):
            return (0, cpu, cpu)  # a kernel that does not tell: by number
        return (package, core, cpu)

    return tuple(sorted(usable, key=position))


def visible_gpus(environ: os._Environ[str] | dict[str, str], devices: Path = Path("/dev")) -> int:
    """Without asking torch, which takes seconds to import."""
    if importlib.metadata.version("torch").endswith("+cpu"):
        return 0
    present = sum(1 for device in devices.glob("nvidia*") if re.fullmatch(r"nvidia\d+", device.name))
    listed = environ.get("CUDA_VISIBLE_DEVICES")
    if listed is None:
        return present
    named = [entry for entry in listed.split(",") if entry.strip()]
    usable = named[: named.index("-1")] if "-1" in named else named  # CUDA stops reading at the first -1
    return min(present, len(usable))
