"""Checks on which NUMA nodes this machine's cores, GPUs and network devices are: memory of another node is slower, in every step and transfer."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tandem.base.errors import TandemError
from tandem.cluster.config import TandemConfig
from tandem.cluster.describe import counted
from tandem.cluster.doctor.machine_checks import Finding, ok, warn
from tandem.cluster.pools.placement import LocalMachine, place_nodes
from tandem.cluster.pools.state import NodeRecord
from tandem.machine.pci import ROOT, gpus, rdma_devices, read_text


@dataclass(frozen=True, slots=True)
class NumaMap:
    """NUMA nodes by the kernel's numbers. -1: unknown."""

    cores: Mapping[int, int]
    gpus: Sequence[int]  # in bus order, which is CUDA's order for GPUs of one kind
    devices: Mapping[str, int]  # RDMA devices

    @property
    def nodes(self) -> list[int]:
        return sorted(set(self.cores.values()))


def read_numa(root: Path) -> NumaMap:
    cores = {
        core: int(folder.name.removeprefix("node"))
        for folder in sorted((root / "sys/devices/system/node").glob("node[0-9]*"))
        for core in _listed(read_text(folder / "cpulist"))
    }
    devices = {each.device.name: each.device.numa for each in rdma_devices(root)}
    return NumaMap(cores, [gpu.numa for gpu in gpus(root)], devices)


def check_numa(config: TandemConfig, machine: LocalMachine, root: Path = ROOT) -> Finding:
    """`root` is where the kernel's file systems lie."""
    found = read_numa(root)
    if not found.nodes:
        return ok("the kernel reports no NUMA nodes")
    if len(found.nodes) == 1:
        return ok("one NUMA node: all memory is equally near")
    what = f"{counted(len(found.nodes), 'NUMA node')}: {'; '.join(_described(found, number) for number in found.nodes)}"
    try:
        nodes = place_nodes(config, machine)
    except TandemError:
        nodes = []  # the finding on cores says why
    problems = [*_of_cores(found, nodes, machine), *_of_gpus(found, nodes, config, machine)]
    if not problems:
        return ok(what)
    return warn(
        f"{what}. {'; '.join(why for why, _ in problems)}", "; ".join(dict.fromkeys(advice for _, advice in problems))
    )


def _described(found: NumaMap, number: int) -> str:
    here = [
        counted(sum(node == number for node in found.cores.values()), "core"),
        *([counted(count, "GPU")] if (count := sum(node == number for node in found.gpus)) else []),
        *(device for device, node in found.devices.items() if node == number),
    ]
    return f"{', '.join(here)} on {number}"


def _of_cores(found: NumaMap, nodes: Sequence[NodeRecord], machine: LocalMachine) -> Iterable[tuple[str, str]]:
    largest = max(sum(found.cores.get(core) == number for core in machine.cores) for number in found.nodes)
    for node in nodes:
        cores = node.placement.cores if node.placement is not None else ()
        on = {found.cores[core] for core in cores if core in found.cores}
        if len(on) > 1 and len(cores) <= largest:
            yield (
                f"{node.node_id}'s {len(cores)} cores lie on NUMA nodes {_and(on)}",
                f"give each pool `threads` that divide a NUMA node's {counted(largest, 'core')}",
            )
        elif len(on) > 1:
            yield (
                f"{node.node_id} has more cores than a NUMA node ({len(cores)} on {_and(on)})",
                f"serve with more nodes of {largest} threads each, or with ranks (tensor_parallel)",
            )


def _of_gpus(
    found: NumaMap, nodes: Sequence[NodeRecord], config: TandemConfig, machine: LocalMachine
) -> Iterable[tuple[str, str]]:
    if len(found.gpus) != machine.gpus or -1 in found.gpus:
        return  # some GPUs are hidden from this process, or their places are: so CUDA's numbers cannot be mapped
    for node in nodes:
        device = re.fullmatch(r"cuda:(\d+)", node.placement.device) if node.placement is not None else None
        if device is None or node.placement is None:
            continue
        first, width = int(device[1]), config.pools.of(node.role).ranks
        on = set(found.gpus[first : first + width])
        cores = {found.cores[core] for core in node.placement.cores if core in found.cores}
        if len(on) > 1:
            yield (
                f"{node.node_id}'s {width} GPUs lie on NUMA nodes {_and(on)}",
                "a node's ranks sum up several times in every layer: unless the GPUs are linked (nvidia-smi topo -m says NV#), "
                "choose a tensor_parallel that divides a NUMA node's GPUs",
            )
        elif cores and not on & cores:
            yield (
                f"{node.node_id} computes on a GPU of NUMA node {_and(on)}, and its cores are of {_and(cores)}",
                "let this process run on the GPUs' own cores: docker run --cpuset-cpus, taskset, or Kubernetes' topology manager "
                "(single-numa-node)",
            )
    near = {node for node in found.devices.values() if node >= 0}
    if far := set(found.gpus) - near if near else set():
        yield (
            f"the GPUs of NUMA node {_and(far)} have no RDMA device beside them",
            "KV from there crosses between the processors: put prefill and decode nodes on GPUs beside an RDMA device",
        )


def _and(numbers: Iterable[int]) -> str:
    return " and ".join(map(str, sorted(numbers)))


def _listed(text: str) -> Iterable[int]:
    """Parses `0-3,8`, the kernel's format. The list is empty for a NUMA node without cores."""
    for part in filter(None, text.split(",")):
        low, _, high = part.partition("-")
        yield from range(int(low), int(high or low) + 1)
