"""Memory shared by all ranks of a node on one machine. One process writes a step's arrays once, and each rank copies them.

The memory has no name: ranks inherit its descriptor, so the kernel frees it when the last process ends. Each number has one writer.

    per rank   beat: increases as long as the process runs · taken: the last step that the rank has copied
    twice      a step's arrays: while ranks copy one step, the next may be written
"""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Callable, Sequence

import msgspec
import numpy as np

from tandem.base.errors import InternalError

_PLACES = 2
_PLACE_BYTES = 256 << 20  # address space only: a page takes memory when it is first written
_LINE = 64  # bytes per rank, so that two ranks never write to one cache line
_HEAD = 4096
_MOST_RANKS = _HEAD // _LINE
_ALIGNMENT = 16
_SHORT_WAIT_S = 0.0001

_encode = msgspec.msgpack.Encoder().encode
_heads = msgspec.msgpack.Decoder(list[tuple[str, list[int]]])


def create_memory() -> int:
    """Creates the memory and returns its descriptor, which the caller owns."""
    memory = os.memfd_create("tandem-ranks")
    os.ftruncate(memory, _HEAD + _PLACES * _PLACE_BYTES)
    return memory


class SharedMemory:
    def __init__(self, descriptor: int, ranks: range) -> None:
        """`ranks`: the numbers of the ranks that read from it."""
        if ranks.stop > _MOST_RANKS:
            raise InternalError(f"a node of {ranks.stop} ranks")
        self._ranks = ranks
        self._map = mmap.mmap(descriptor, _HEAD + _PLACES * _PLACE_BYTES)
        numbers = np.frombuffer(self._map, np.uint64, _HEAD // 8).reshape(_MOST_RANKS, _LINE // 8)
        self._beats, self._taken = numbers[:, 0], numbers[:, 1]
        self.written = 0  # number of the last step written

    # --- the process that started the ranks

    def write(self, arrays: Sequence[np.ndarray], still_wanted: Callable[[], bool]) -> None:
        """Writes the next step. While a rank has not copied the step before the last, whose place this one takes, it waits as long as
        `still_wanted()` is true; then it gives up and writes nothing. The wait is rare: the writer is seldom two steps ahead of a rank."""
        step = self.written + 1
        while self.behind(step - _PLACES):
            if not still_wanted():
                return
            time.sleep(_SHORT_WAIT_S)
        head = _encode([(array.dtype.str, list(array.shape)) for array in arrays])
        begin = _place(step)
        room = begin + _PLACE_BYTES
        at = begin + 16 + len(head)
        for array in arrays:
            at = _aligned(at)
            if at + array.nbytes > room:
                raise InternalError(f"a step's arrays are larger than {_PLACE_BYTES >> 20} MiB")
            if array.nbytes:
                target = np.frombuffer(self._map, array.dtype, array.size, at)
                target[:] = array.reshape(-1)
            at += array.nbytes
        self._map[begin + 16 : begin + 16 + len(head)] = head
        np.frombuffer(self._map, np.int64, 2, begin)[:] = (len(head), at - begin)
        self.written = step

    def behind(self, step: int) -> list[int]:
        return [rank for rank in self._ranks if int(self._taken[rank]) < step]

    def beat_of(self, rank: int) -> int:
        return int(self._beats[rank])

    # --- a rank other than 0

    def read(self, rank: int, step: int) -> list[np.ndarray]:
        """Copies the arrays of an announced step, and marks the step as taken."""
        begin = _place(step)
        length, total = np.frombuffer(self._map, np.int64, 2, begin).tolist()
        copied = bytearray(memoryview(self._map)[begin : begin + total])
        self._taken[rank] = step
        arrays: list[np.ndarray] = []
        at = 16 + length
        for dtype, shape in _heads.decode(copied[16:at]):
            at = _aligned(begin + at) - begin
            array = np.frombuffer(copied, dtype, int(np.prod(shape)), at).reshape(shape)
            arrays.append(array)
            at += array.nbytes
        return arrays

    def beat(self, rank: int) -> None:
        self._beats[rank] += 1


def _place(step: int) -> int:
    return _HEAD + step % _PLACES * _PLACE_BYTES


def _aligned(at: int) -> int:
    return -(-at // _ALIGNMENT) * _ALIGNMENT
