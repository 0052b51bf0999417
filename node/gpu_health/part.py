"""The thread that reads the node's cards, and which readings condemn one."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from tandem.node.gpu_health.nvml import Card, Nvml, NvmlError, Readings
from tandem.node.near import pci_address
from tandem.node.wings import PartContext, ServicePart
from tandem.wire.requests import SickDevice

log = logging.getLogger(__name__)

_LOOK_S = 5.0
_STOP_S = 10.0

# Errors after which a card must be reset or exchanged, by NVIDIA's numbers. Those that a program's own fault causes (13, 31, 43, 45) end
# the process or the step, and need no other card.
_CONDEMNS = {
    48: "two bits of its memory were wrong at once",
    62: "its microcontroller has stopped",
    64: "a row of its memory could not be replaced",
    79: "it has fallen off the bus",
    94: "its memory was wrong where a process read it",
    95: "its memory was wrong, and it is not known for whom",
    119: "its system processor does not answer",
    120: "its system processor has failed",
    140: "its memory was wrong, and was not corrected",
}


def condemned_by_xid(number: int) -> str:
    """Returns why a card with this error must not compute any more; "" if it may."""
    return f"Xid {number}: {_CONDEMNS[number]}" if number in _CONDEMNS else ""


def condemned_by(before: Readings, now: Readings) -> str:
    """`before` was read when the node started: errors of an earlier time were another process's."""
    if now.remap_failed:
        return "a row of its memory could not be replaced: the card must be exchanged"
    if now.remap_pending:
        return "a row of its memory waits for a reset of the card to be replaced"
    if now.uncorrected > before.uncorrected:
        count = now.uncorrected - before.uncorrected
        return f"its memory had {count} errors that could not be corrected since the node started"
    return ""


@dataclass(slots=True)
class _Watched:
    device: str
    card: Card
    before: Readings = field(default_factory=Readings)


class GpuWatch:
    """Names a sick card once, and then watches the others."""

    def __init__(self, open_nvml: Callable[[], Nvml], cards: Mapping[str, str]) -> None:
        """`cards`: the PCI address of each device."""
        self._open = open_nvml
        self._cards = cards
        self._found: dict[str, SickDevice] = {}
        self._before: dict[str, Readings] = {}  # by device, of the node's start: NVML may be opened again
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="gpu-health", daemon=True)

    @property
    def sick(self) -> tuple[SickDevice, ...]:
        """From any thread."""
        return tuple(self._found.values())

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._ended.set()
        self._thread.join(_STOP_S)

    def _run(self) -> None:
        """Opens NVML again after an error: a reset of another card may have ended it."""
        said = ""
        while not self._ended.is_set():
            try:
                self._watch()
            except Exception as error:  # the node serves on without this
                if str(error) != said:
                    said = str(error)
                    log.warning("the health of this node's GPUs is not known: %s", error)
                self._ended.wait(_LOOK_S)

    def _watch(self) -> None:
        nvml = self._open()
        try:
            watched = [each for device, address in self._cards.items() if (each := self._begin(nvml, device, address))]
            while not self._ended.is_set():
                happened = nvml.next_xid(_LOOK_S)
                if happened is not None:
                    card, number = happened
                    self._happened(card, number, watched)
                for each in watched:
                    self._look(nvml, each)
        finally:
            try:
                nvml.close()
            except NvmlError as error:
                log.debug("%s", error)

    def _begin(self, nvml: Nvml, device: str, address: str) -> _Watched | None:
        try:
            card = nvml.card(address)
            now = nvml.read(card)
        except NvmlError as error:
            if not error.is_lost:
                raise
            self._condemn(device, condemned_by_xid(79))
            return None
        before = self._before.setdefault(device, now)
        self._condemn(device, condemned_by(before, now))
        return _Watched(device, card, before)

    def _happened(self, card: Card, number: int, watched: list[_Watched]) -> None:
        for each in watched:
            if each.card.value == card.value:
                log.warning("%s: the driver reports Xid %d", each.device, number)
                self._condemn(each.device, condemned_by_xid(number))

    def _look(self, nvml: Nvml, each: _Watched) -> None:
        if each.device in self._found:
            return
        try:
            why = condemned_by(each.before, nvml.read(each.card))
        except NvmlError as error:
            if not error.is_lost:
                raise
            why = condemned_by_xid(79)
        self._condemn(each.device, why)

    def _condemn(self, device: str, why: str) -> None:
        if why and device not in self._found:
            log.error("%s must not compute any more: %s", device, why)
            self._found[device] = SickDevice(device, why)


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
