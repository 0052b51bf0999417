"""Cards that must not compute any more are named. NVML's library is stood in for at its functions; the calls are those of ctypes."""

from __future__ import annotations

import ctypes
import queue
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from tandem.node.gpu_health import part
from tandem.node.gpu_health.nvml import Nvml, NvmlError, Readings
from tandem.node.gpu_health.part import GpuWatch, condemned_by, condemned_by_xid
from tandem.wire.requests import SickDevice
from tests.waiting import until

ADDRESSES = {"cuda:0": "0000:15:18.0", "cuda:1": "0000:97:18.0"}
TIMEOUT, NOT_SUPPORTED, LOST, UNKNOWN = 10, 3, 15, 999


def behind(address: Any, kind: Any = ctypes.c_void_p) -> Any:
    """What a call of ctypes was given the address of."""
    return ctypes.cast(address, ctypes.POINTER(kind)).contents


class Event(ctypes.Structure):
    """The beginning of nvmlEventData_t."""

    _fields_ = (("card", ctypes.c_void_p), ("kind", ctypes.c_ulonglong), ("data", ctypes.c_ulonglong))


class Library:
    """The functions of libnvidia-ml, over cards of which the test says how they are."""

    def __init__(self) -> None:
        self.handles = {address.encode(): 100 + number for number, address in enumerate(ADDRESSES.values())}
        self.registered: set[int] = set()
        self.uncorrected = dict.fromkeys(self.handles.values(), 3)  # of an earlier time
        self.rows = {handle: [0, 0, 0, 0] for handle in self.handles.values()}
        self.codes: dict[int, int] = {}  # what asking about a card ends with
        self.wait_ends_with = 0
        self.xids: queue.Queue[tuple[int, int] | None] = queue.Queue()
        self.opened = self.closed = self.waits = self.given = 0
        self.is_over = threading.Event()  # no test waits for what happens

    def happens(self, event: tuple[int, int] | None) -> None:
        """A card and the number of an error; None: nothing happens until the wait's time is over."""
        self.given += 1
        self.xids.put(event)

    def nvmlInit_v2(self) -> int:
        self.opened += 1
        return 0

    def nvmlShutdown(self) -> int:
        self.closed += 1
        return 0

    def nvmlEventSetCreate(self, events: Any) -> int:
        behind(events).value = 7
        return 0

    def nvmlEventSetFree(self, events: ctypes.c_void_p) -> int:
        assert events.value == 7
        return 0

    def nvmlDeviceGetHandleByPciBusId_v2(self, address: bytes, card: Any) -> int:
        behind(card).value = self.handles[address]
        return self.codes.get(self.handles[address], 0)

    def nvmlDeviceRegisterEvents(self, card: ctypes.c_void_p, kinds: Any, events: ctypes.c_void_p) -> int:
        assert (kinds.value, events.value) == (0x8, 7)
        assert card.value is not None
        self.registered.add(card.value)
        return 0

    def nvmlEventSetWait_v2(self, events: ctypes.c_void_p, event: Any, timeout_ms: Any) -> int:
        assert events.value == 7
        assert timeout_ms.value == 5000
        self.waits += 1
        if self.wait_ends_with:
            return self.wait_ends_with
        happened = None if self.is_over.is_set() else self.xids.get(timeout=60)
        if happened is None:
            return TIMEOUT
        found = behind(event, Event)
        (found.card, found.data), found.kind = happened, 0x8
        return 0

    def nvmlDeviceGetTotalEccErrors(self, card: ctypes.c_void_p, kind: Any, counter: Any, count: Any) -> int:
        assert (kind.value, counter.value) == (1, 0)
        assert card.value is not None
        behind(count, ctypes.c_ulonglong).value = self.uncorrected[card.value]
        return self.codes.get(card.value, 0)

    def nvmlDeviceGetRemappedRows(self, card: ctypes.c_void_p, *found: Any) -> int:
        assert card.value is not None
        for each, count in zip(found, self.rows[card.value], strict=True):
            behind(each, ctypes.c_uint).value = count
        return self.codes.get(card.value, 0)


@pytest.fixture
def library() -> Library:
    return Library()


def is_watched() -> bool:
    return "gpu-health" in {each.name for each in threading.enumerate()}


@pytest.fixture
def watch(library: Library) -> Iterator[GpuWatch]:
    made = GpuWatch(lambda: Nvml(library), ADDRESSES)
    yield made
    library.is_over.set()
    library.happens(None)
    if is_watched():
        made.stop()
    assert not is_watched()
    assert library.opened == library.closed


def looked(library: Library) -> None:
    """Lets one wait end without an error, and waits for the look at all cards after it: the next wait begins only then."""
    library.happens(None)
    until(lambda: library.waits > library.given)


def test_a_card_whose_driver_reports_a_fatal_error_is_named(library: Library, watch: GpuWatch) -> None:
    watch.start()
    for number in (13, 31, 43):  # what a program's own fault causes
        library.happens((101, number))
    looked(library)
    assert watch.sick == ()
    library.happens((999, 79))  # a card of another process
    library.happens((101, 79))
    until(lambda: bool(watch.sick))
    assert watch.sick == (SickDevice("cuda:1", "Xid 79: it has fallen off the bus"),)
    assert library.registered == {100, 101}


def test_errors_of_an_earlier_time_were_another_process_s(library: Library, watch: GpuWatch) -> None:
    watch.start()
    looked(library)
    assert watch.sick == ()
    library.uncorrected[100] += 2
    library.happens(None)
    until(lambda: bool(watch.sick))
    assert watch.sick[0].device == "cuda:0"
    assert "2 errors that could not be corrected since the node started" in watch.sick[0].why


def test_a_card_that_was_sick_before_is_named_at_once(library: Library, watch: GpuWatch) -> None:
    """So a node that is started again on it leaves it again."""
    library.rows[100] = [0, 1, 1, 0]
    library.rows[101] = [0, 1, 0, 1]
    watch.start()
    until(lambda: len(watch.sick) == 2)
    assert [each.device for each in watch.sick] == ["cuda:0", "cuda:1"]
    assert "waits for a reset" in watch.sick[0].why
    assert "must be exchanged" in watch.sick[1].why


@pytest.mark.parametrize("while_it_is_watched", [False, True])
def test_a_card_that_is_gone_is_named(library: Library, watch: GpuWatch, while_it_is_watched: bool) -> None:
    if not while_it_is_watched:
        library.codes[101] = LOST
    watch.start()
    if while_it_is_watched:
        looked(library)
        library.codes[101] = LOST
        library.happens(None)
    until(lambda: bool(watch.sick))
    assert watch.sick == (SickDevice("cuda:1", "Xid 79: it has fallen off the bus"),)


def test_a_card_that_counts_no_errors_is_watched_all_the_same(library: Library, watch: GpuWatch) -> None:
    library.codes = {100: NOT_SUPPORTED, 101: NOT_SUPPORTED}
    nvml = Nvml(library)
    with pytest.raises(NvmlError):
        nvml.card(ADDRESSES["cuda:0"])  # there must be a handle
    library.codes = {}
    card = nvml.card(ADDRESSES["cuda:0"])
    library.codes = {100: NOT_SUPPORTED}
    library.uncorrected[100] = 0
    assert nvml.read(card) == Readings()
    nvml.close()


def test_nvml_that_fails_is_said_once_and_opened_again(
    library: Library, watch: GpuWatch, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("tandem.node.gpu_health.part._LOOK_S", 0.001)
    monkeypatch.setattr(Nvml, "next_xid", lambda self, timeout_s: self._call("nvmlFails"))
    library.nvmlFails = lambda: UNKNOWN  # type: ignore[attr-defined]
    watch.start()
    until(lambda: library.opened > 2)
    assert caplog.text.count("health of this node's GPUs is not known: nvmlFails ended with 999") == 1


def test_errors_of_the_time_when_nvml_was_not_open_count(
    library: Library, watch: GpuWatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tandem.node.gpu_health.part._LOOK_S", 0.001)

    def fails_with_an_error_of_the_card(nvml: Nvml, _: float) -> None:
        library.uncorrected[101] = 5
        nvml._call("nvmlFails")

    monkeypatch.setattr(Nvml, "next_xid", fails_with_an_error_of_the_card)
    library.nvmlFails = lambda: UNKNOWN  # type: ignore[attr-defined]
    watch.start()
    until(lambda: bool(watch.sick))
    assert watch.sick[0].device == "cuda:1"
    assert "2 errors that could not be corrected since the node started" in watch.sick[0].why


def test_what_condemns_a_card() -> None:
    assert not condemned_by_xid(31)
    assert condemned_by_xid(95).startswith("Xid 95: ")
    assert not condemned_by(Readings(uncorrected=3), Readings(uncorrected=3))
    assert "must be exchanged" in condemned_by(Readings(), Readings(1, True, True))


def test_a_node_on_a_cpu_watches_nothing_and_ranks_watch_their_cards(
    library: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    def context(device: str, ranks: int, machines: int) -> Any:
        engine = SimpleNamespace(info=SimpleNamespace(device=device))
        return SimpleNamespace(engine=engine, config=SimpleNamespace(ranks=ranks, machines=machines))

    given: list[dict[str, str]] = []

    class Noted(GpuWatch):
        def __init__(self, _: object, cards: dict[str, str]) -> None:
            given.append(cards)

        def start(self) -> None: ...

    monkeypatch.setattr(part, "GpuWatch", Noted)
    monkeypatch.setattr(part, "pci_address", lambda device: f"address of {device}")
    assert part.make(context("cpu", 1, 1)) is None
    assert part.make(context("cuda:2", 4, 2)) is not None
    assert given == [{"cuda:2": "address of cuda:2", "cuda:3": "address of cuda:3"}]
