"""Reads what a GGUF file says of itself, and where its tensors lie. The gguf package's reader makes an array of every string of the
vocabulary, which takes seconds; here a list of strings is only counted."""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFValueType
from gguf.quants import quant_shape_to_byte_shape

_FORMATS = {
    GGUFValueType.UINT8: "B",
    GGUFValueType.INT8: "b",
    GGUFValueType.UINT16: "H",
    GGUFValueType.INT16: "h",
    GGUFValueType.UINT32: "I",
    GGUFValueType.INT32: "i",
    GGUFValueType.FLOAT32: "f",
    GGUFValueType.BOOL: "?",
    GGUFValueType.UINT64: "Q",
    GGUFValueType.INT64: "q",
    GGUFValueType.FLOAT64: "d",
}
_PLAIN = {
    GGMLQuantizationType.F32: np.float32,
    GGMLQuantizationType.F16: np.float16,
    GGMLQuantizationType.F64: np.float64,
    GGMLQuantizationType.I8: np.int8,
    GGMLQuantizationType.I16: np.int16,
    GGMLQuantizationType.I32: np.int32,
    GGMLQuantizationType.I64: np.int64,
}
_VERSIONS = (2, 3)


@dataclass(frozen=True, slots=True)
class StringList:
    """A list of strings, which are not read."""

    length: int


@dataclass(frozen=True, slots=True)
class GgufTensor:
    name: str
    tensor_type: GGMLQuantizationType
    shape: tuple[int, ...]  # as the file has it: the innermost dimension first
    data: Any  # a view of the mapped file; bytes, if the tensor is in blocks

    @property
    def n_elements(self) -> int:
        return math.prod(self.shape)


class GgufHeader:
    """Raises ValueError for a file that is not GGUF, or ends too early."""

    def __init__(self, path: Path) -> None:
        self._file = np.memmap(path, np.uint8, "r")
        self._bytes = self._file.data
        self._at = 0
        self.values: dict[str, Any] = {}
        try:
            magic, version, tensors, values = self._take("<4sIQQ")
            if magic != b"GGUF" or version not in _VERSIONS:
                raise ValueError("it is no GGUF file of version 2 or 3 in little-endian order")
            for _ in range(values):
                key = self._string()
                self.values[key] = self._value(GGUFValueType(self._take("<I")[0]))
            places = [self._tensor() for _ in range(tensors)]
        except struct.error as error:
            raise ValueError("the file ends too early") from error
        alignment = self.values.get("general.alignment", 32)
        start = -(-self._at // alignment) * alignment
        self.tensors: dict[str, GgufTensor] = {}
        end = 0
        for name, kind, shape, at in places:
            if name in self.tensors:
                raise ValueError(f"the file has two tensors of the name {name}")
            # Each follows the one before, as llama.cpp also demands: elsewhere lie another tensor's weights, or none.
            if at != end:
                raise ValueError(f"{name} is said to be at {at}, and the tensors before it end at {end}")
            self.tensors[name] = self._mapped(name, kind, shape, start + at)
            end += -(-self.tensors[name].data.nbytes // alignment) * alignment

    def _take(self, form: str) -> tuple[Any, ...]:
        found = struct.unpack_from(form, self._bytes, self._at)
        self._at += struct.calcsize(form)
        return found

    def _string(self) -> str:
        (length,) = self._take("<Q")
        return bytes(self._take(f"<{length}s")[0]).decode()

    def _value(self, kind: GGUFValueType) -> Any:
        if kind is GGUFValueType.STRING:
            return self._string()
        if kind is not GGUFValueType.ARRAY:
            return self._take(f"<{_FORMATS[kind]}")[0]
        of, length = self._take("<IQ")
        if of == GGUFValueType.STRING:
            self._skip_strings(length)
            return StringList(length)
        if of == GGUFValueType.ARRAY:
            return [self._value(GGUFValueType.ARRAY) for _ in range(length)]
        return list(self._take(f"<{length}{_FORMATS[GGUFValueType(of)]}"))

    def _skip_strings(self, count: int) -> None:
        at, read, size = self._at, struct.Struct("<Q").unpack_from, self._bytes
        for _ in range(count):
            at += 8 + read(size, at)[0]
        self._at = at

    def _tensor(self) -> tuple[str, GGMLQuantizationType, tuple[int, ...], int]:
        name = self._string()
        (dimensions,) = self._take("<I")
        shape = self._take(f"<{dimensions}Q")
        kind, at = self._take("<IQ")
        return name, GGMLQuantizationType(kind), shape, at

    def _mapped(self, name: str, kind: GGMLQuantizationType, shape: tuple[int, ...], at: int) -> GgufTensor:
        weights, size = GGML_QUANT_SIZES[kind]
        if shape and shape[0] % weights:
            raise ValueError(
                f"{name} has rows of {shape[0]} weights, which are no whole {kind.name} blocks of {weights}"
            )
        num_bytes = math.prod(shape) // weights * size
        content = self._file[at : at + num_bytes]
        if len(content) < num_bytes:
            raise ValueError(f"the file ends within {name}")
        dtype = _PLAIN.get(kind)
        outer_first = shape[::-1]
        if dtype is None:
            content = content.reshape(quant_shape_to_byte_shape(outer_first, kind))
        else:
            content = content.view(dtype).reshape(outer_first)
        return GgufTensor(name, kind, shape, content)
