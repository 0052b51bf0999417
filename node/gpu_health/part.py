"""Begins to watch the cards of the node's ranks on this machine."""

from __future__ import annotations

from tandem.node.gpu_health.nvml import Nvml
from tandem.node.gpu_health.watch import GpuWatch
from tandem.node.near import pci_address
from tandem.node.wings import PartContext, ServicePart
from tandem.wire.requests import SickDevice


def make(context: PartContext) -> ServicePart | None:
    kind, _, first = context.engine.info.device.partition(":")
    if kind != "cuda":
        return None
    here = context.config.ranks // context.config.machines
    devices = [f"cuda:{number}" for number in range(int(first or 0), int(first or 0) + here)]
    cards = {device: address for device in devices if (address := pci_address(device))}
    watch = GpuWatch(Nvml, cards)
    watch.start()
    return GpuHealthPart(watch)


class GpuHealthPart(ServicePart):
    def __init__(self, watch: GpuWatch) -> None:
        self._watch = watch

    @property
    def sick(self) -> tuple[SickDevice, ...]:
        return self._watch.sick

    def stop(self) -> None:
        self._watch.stop()
