"""Copies between the host and the model's device that make neither wait longer than it must.

A copy from ordinary host memory waits for all work that the device still has. A copy from page-locked memory is only queued;
torch keeps that memory until the copy has finished, and reuses it then.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy.typing as npt
import torch

Array = npt.NDArray[Any]

# Arrays begin at multiples of this many bytes, because every dtype needs a multiple of its size.
_ALIGNMENT = 16


def on(device: torch.device) -> AbstractContextManager[Any]:
    """Makes `device` the thread's current one: libraries launch their kernels there, wherever their tensors are."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def to_device(array: Array, device: torch.device) -> torch.Tensor:
    """On a CPU returns a view of the array. Elsewhere returns a copy that may still be under way; later work on the device sees it
    complete."""
    return page_locked(array, device).to(device, non_blocking=True)


def page_locked(array: Array, device: torch.device) -> torch.Tensor:
    """The array in host memory that the device can copy by itself: page-locked, unless the device is a CPU."""
    tensor = torch.from_numpy(array)
    return tensor if device.type == "cpu" else tensor.pin_memory()


def to_device_together(arrays: Sequence[Array], device: torch.device) -> list[torch.Tensor]:
    """`to_device` for several arrays, in one copy."""
    if device.type == "cpu":
        return [torch.from_numpy(array) for array in arrays]
    host = pack(arrays, lambda size: torch.empty(size, dtype=torch.uint8, pin_memory=True))
    return unpack(arrays, host.to(device, non_blocking=True))


class DeviceMark:
    """Marks the end of the work that the device has been given so far. `wait` waits for that work, and not for later work. On a
    CPU all work is done already."""

    def __init__(self, device: torch.device) -> None:
        self._event: torch.cuda.Event | None = None
        if device.type == "cuda":
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._event.record(torch.cuda.current_stream(device))

    def wait(self) -> None:
        if self._event is not None:
            self._event.synchronize()


class HostCopy:
    """Copies a device tensor to the host. `read` waits for the copy and the work before it, and not for later work."""

    def __init__(self, tensor: torch.Tensor) -> None:
        """On a CPU no copy is made: the tensor must not change any more."""
        if tensor.device.type == "cpu":
            self._host = tensor
        else:
            self._host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            self._host.copy_(tensor, non_blocking=True)
        self._copied = DeviceMark(tensor.device)

    def read(self) -> torch.Tensor:
        self._copied.wait()
        return self._host


def _places(arrays: Sequence[Array]) -> list[int]:
    """Where each array's bytes begin, and as the last number where they all end."""
    places = [0]
    for array in arrays:
        places.append(places[-1] + -(-array.nbytes // _ALIGNMENT) * _ALIGNMENT)
    return places


def pack(arrays: Sequence[Array], memory: Callable[[int], torch.Tensor]) -> torch.Tensor:
    """The arrays' bytes in memory of the host, which `memory` makes."""
    places = _places(arrays)
    packed = memory(places[-1])
    out = packed.numpy()
    for array, place in zip(arrays, places, strict=False):
        target = out[place : place + array.nbytes].view(array.dtype).reshape(array.shape)
        target[...] = array
    return packed


def unpack(arrays: Sequence[Array], packed: torch.Tensor) -> list[torch.Tensor]:
    """Views of the packed bytes with the arrays' dtypes and shapes."""
    tensors = []
    for array, place in zip(arrays, _places(arrays), strict=False):
        dtype = torch.from_numpy(array).dtype
        if array.nbytes:
            tensors.append(packed[place : place + array.nbytes].view(dtype).view(array.shape))
        else:
            tensors.append(torch.empty(array.shape, dtype=dtype, device=packed.device))
    return tensors
