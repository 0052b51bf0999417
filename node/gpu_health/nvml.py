"""The few functions of NVML that tell how healthy a card is. NVML comes with the driver, so nothing has to be installed."""

from __future__ import annotations

import ctypes
from typing import Any, NamedTuple

_LIBRARY = "libnvidia-ml.so.1"
_SUCCESS, _NOT_SUPPORTED, _TIMEOUT, _GPU_IS_LOST = 0, 3, 10, 15
_UNCORRECTED, _SINCE_DRIVER_BEGAN = 1, 0
_XID_EVENT = 0x8

Card = ctypes.c_void_p


class NvmlError(Exception):
    def __init__(self, function: str, code: int) -> None:
        super().__init__(f"{function} ended with {code}")
        self.is_lost = code == _GPU_IS_LOST


class Readings(NamedTuple):
    uncorrected: int = 0  # memory errors since the driver was loaded
    remap_pending: bool = False  # a row of memory waits for a reset to be replaced
    remap_failed: bool = False  # a row of memory could not be replaced


class _EventData(ctypes.Structure):
    _fields_ = (
        ("card", Card),
        ("kind", ctypes.c_ulonglong),
        ("data", ctypes.c_ulonglong),
        ("gpu_instance", ctypes.c_uint),
        ("compute_instance", ctypes.c_uint),
    )


class Nvml:
    """Raises OSError if the library is not there, NvmlError if a function fails. One thread at a time uses it."""

    def __init__(self, library: Any = None) -> None:
        self._library = library if library is not None else ctypes.CDLL(_LIBRARY)
        self._call("nvmlInit_v2")
        self._events = ctypes.c_void_p()
        self._call("nvmlEventSetCreate", ctypes.byref(self._events))

    def card(self, pci_address: str) -> Card:
        """From now on `next_xid` waits for this card, too."""
        found = Card()
        self._call("nvmlDeviceGetHandleByPciBusId_v2", pci_address.encode(), ctypes.byref(found))
        self._call(
            "nvmlDeviceRegisterEvents",
            found,
            ctypes.c_ulonglong(_XID_EVENT),
            self._events,
            allowed=(_SUCCESS, _NOT_SUPPORTED),
        )
        return found

    def next_xid(self, timeout_s: float) -> tuple[Card, int] | None:
        """Waits for an error that the driver reports. Returns None if none came in time."""
        event = _EventData()
        wait = ctypes.c_uint(int(timeout_s * 1000))
        code = self._call("nvmlEventSetWait_v2", self._events, ctypes.byref(event), wait, allowed=(_SUCCESS, _TIMEOUT))
        if code == _TIMEOUT or event.kind != _XID_EVENT:
            return None
        return Card(event.card), int(event.data)

    def read(self, card: Card) -> Readings:
        """What a card does not count stays 0."""
        uncorrected = ctypes.c_ulonglong()
        allowed = (_SUCCESS, _NOT_SUPPORTED)
        kinds = ctypes.c_uint(_UNCORRECTED), ctypes.c_uint(_SINCE_DRIVER_BEGAN)
        self._call("nvmlDeviceGetTotalEccErrors", card, *kinds, ctypes.byref(uncorrected), allowed=allowed)
        rows = [ctypes.c_uint() for _ in range(4)]  # corrected, uncorrected, pending, failed
        self._call("nvmlDeviceGetRemappedRows", card, *(ctypes.byref(each) for each in rows), allowed=allowed)
        return Readings(uncorrected.value, bool(rows[2].value), bool(rows[3].value))

    def close(self) -> None:
        self._call("nvmlEventSetFree", self._events)
        self._call("nvmlShutdown")

    def _call(self, function: str, *given: Any, allowed: tuple[int, ...] = (_SUCCESS,)) -> int:
        code = int(getattr(self._library, function)(*given))
        if code not in allowed:
            raise NvmlError(function, code)
        return code
