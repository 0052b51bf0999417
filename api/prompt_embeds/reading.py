"""Reads prompts given as tensors of embeddings (`prompt_embeds`): base64 of a safetensors file or of a
`torch.save` file.

`torch.save` writes a zip whose `data.pkl` is a program for Python's unpickler, which could do anything. It is
never run, neither here nor on a node: `pickletools` lists its instructions, and the few that a plain tensor
needs are followed, none of which is a real call. Everything else is refused. Neither format is compressed, so
a file is never larger in memory than in the request.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import io
import math
import pickletools
import struct
import zipfile
from collections.abc import Mapping
from typing import Annotated, Any, NamedTuple

import msgspec
from msgspec import Meta

from tandem.api.openai.completion_request import CompletionRequest
from tandem.api.settings import ApiSettings
from tandem.base.errors import InvalidRequest
from tandem.wire.embeds import TYPES, PromptEmbeds

_WHERE = "prompt_embeds"
_OF_SAFETENSORS = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
_OF_TORCH = {"FloatStorage": "float32", "HalfStorage": "float16", "BFloat16Storage": "bfloat16"}
_ZIP = b"PK\x03\x04"
_MOST_HEADER = 64 << 10  # the most bytes of a tensor's description
_MOST_ENTRIES = 64
_MOST_DIMENSIONS = 8
_REBUILD = "torch._utils _rebuild_tensor_v2"


class _Tensor(NamedTuple):
    dtype: str
    shape: tuple[int, ...]
    data: bytes


async def embeds_of(request: CompletionRequest, config: ApiSettings) -> list[PromptEmbeds]:
    if request.prompt:
        raise InvalidRequest(
            "prompt_embeds: is a whole prompt; leave prompt out, or embed its tokens, too", "prompt_embeds"
        )
    for name in ("echo", "prompt_logprobs", "truncate_prompt_tokens"):
        value = getattr(request, name)
        if value is not None and value is not False:
            raise InvalidRequest(f"{name}: not with prompt_embeds, which have no tokens", name)
    given = request.prompt_embeds or []
    tensors = [given] if isinstance(given, str) else given
    found: list[PromptEmbeds] = []
    for index, tensor in enumerate(tensors):
        where = "prompt_embeds" if isinstance(given, str) else f"prompt_embeds[{index}]"
        found.append(await asyncio.to_thread(read_embeds, tensor, config.limits.prompt_embeds_bytes, where))
    return found


def read_embeds(given: str, most_bytes: int, where: str = _WHERE) -> PromptEmbeds:
    """Decodes one tensor. Blocks for as long as decoding takes. Raises InvalidRequest with the reason."""
    if len(given) * 3 // 4 > most_bytes + _MOST_HEADER:
        raise _refusal(where, f"may have {most_bytes} bytes, and has more")
    try:
        file = base64.b64decode(given, validate=True)
    except (binascii.Error, ValueError) as error:
        raise _refusal(where, f"is not base64: {error}") from error
    try:
        tensor = _from_torch(file) if file.startswith(_ZIP) else _from_safetensors(file)
    except _NoTensorError as error:
        raise _refusal(where, str(error)) from error
    shape = tensor.shape
    if len(shape) == 3 and shape[0] == 1:  # a batch of one prompt
        shape = shape[1:]
    if len(shape) != 2 or not all(shape):
        raise _refusal(where, f"must have the shape [tokens, hidden size], and has {list(tensor.shape)}")
    if len(tensor.data) > most_bytes:
        raise _refusal(where, f"may have {most_bytes} bytes, and has {len(tensor.data)}")
    return PromptEmbeds(tensor.dtype, shape[1], tensor.data)


class _NoTensorError(Exception):
    pass


def _refusal(where: str, why: str) -> InvalidRequest:
    return InvalidRequest(f"{where}: the tensor {why}", where)


def _check_dimensions(shape: tuple[int, ...]) -> None:
    """Must come before sizes are multiplied: a description has room for thousands of them."""
    if len(shape) > _MOST_DIMENSIONS:
        raise _NoTensorError(f"must have the shape [tokens, hidden size], and has {len(shape)} dimensions")


def _checked(dtype: str, shape: tuple[int, ...], data: bytes) -> _Tensor:
    wanted = math.prod(shape) * TYPES[dtype]
    if len(data) != wanted:
        raise _NoTensorError(f"has {len(data)} bytes, and {wanted} by its shape: it is cut off, or a part of another")
    return _Tensor(dtype, shape, data)


def _not_of_type(dtype: object) -> _NoTensorError:
    return _NoTensorError(f"must be of type {', '.join(TYPES)}, not {str(dtype)[:40]}")


class _Described(msgspec.Struct):
    dtype: str
    shape: list[Annotated[int, Meta(ge=0, le=2**31)]]
    data_offsets: tuple[int, int]


def _from_safetensors(file: bytes) -> _Tensor:
    length = struct.unpack("<Q", file[:8])[0] if len(file) >= 8 else 0
    if not 2 <= length <= min(_MOST_HEADER, len(file) - 8):
        raise _NoTensorError("is neither a safetensors file nor one of torch.save")
    try:
        header: dict[str, Any] = msgspec.json.decode(file[8 : 8 + length], type=dict[str, Any])
        header.pop("__metadata__", None)
        described = msgspec.convert(header, dict[str, _Described])
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise _NoTensorError(f"is neither a safetensors file nor one of torch.save: {error}") from error
    if len(described) != 1:
        raise _NoTensorError(f"must be alone in its file, where {len(described)} are")
    (one,) = described.values()
    if one.dtype not in _OF_SAFETENSORS:
        raise _not_of_type(one.dtype)
    begin, end = one.data_offsets
    body = file[8 + length :]
    if begin != 0 or end != len(body):
        raise _NoTensorError(f"is cut off: it ends at byte {end} of {len(body)}")
    _check_dimensions(tuple(one.shape))
    return _checked(_OF_SAFETENSORS[one.dtype], tuple(one.shape), body)


def _from_torch(file: bytes) -> _Tensor:
    try:
        return _in_zip(zipfile.ZipFile(io.BytesIO(file)))
    except (
        zipfile.BadZipFile,
        NotImplementedError,
        RuntimeError,
        EOFError,
        ValueError,
        OverflowError,  # a part that begins beyond what can be addressed
        struct.error,
    ) as error:
        raise _NoTensorError(f"is a zip that cannot be read: {error}") from error


def _in_zip(file: zipfile.ZipFile) -> _Tensor:
    entries = file.infolist()
    if len(entries) > _MOST_ENTRIES:
        raise _NoTensorError(f"must be alone in its file, where {len(entries)} parts are")
    # torch.save does not compress, so no part can be larger than the request.
    if any(entry.compress_type != zipfile.ZIP_STORED for entry in entries):
        raise _NoTensorError("is compressed, which torch.save does not do")
    by_name = {entry.filename.partition("/")[2]: entry for entry in entries}
    program = by_name.get("data.pkl")
    if program is None or program.file_size > _MOST_HEADER:
        raise _NoTensorError("is no file of torch.save with one tensor")
    order = by_name.get("byteorder")
    if order is not None and order.file_size <= 16 and file.read(order) != b"little":
        raise _NoTensorError("must have its bytes in little-endian order")
    dtype, key, offset, shape, stride = _followed(file.read(program))
    stored = by_name.get(f"data/{key}")
    if stored is None:
        raise _NoTensorError("has no numbers in its file")
    _check_dimensions(shape)
    row_by_row = tuple(math.prod(shape[place + 1 :]) for place in range(len(shape)))
    if any(size > 1 and has != wants for size, has, wants in zip(shape, stride, row_by_row, strict=True)):
        raise _NoTensorError("must lie row by row in memory: save tensor.contiguous()")
    start = offset * TYPES[dtype]
    return _checked(dtype, shape, file.read(stored)[start : start + math.prod(shape) * TYPES[dtype]])


class _Name(NamedTuple):
    """A name that the program would import."""

    name: str


class _Stored(NamedTuple):
    """A tensor's numbers, which the program would load from its file."""

    parts: tuple[object, ...]


class _Made(NamedTuple):
    """A call that the program would make, with its arguments."""

    what: object
    arguments: object


def _followed(program: bytes) -> tuple[str, str, int, tuple[int, ...], tuple[int, ...]]:
    """Reads a tensor's program. Returns the type, the name of its numbers, the offset in them, the shape and
    the strides."""
    try:
        match _result(program):
            case _Made(
                _Name(name),
                (
                    _Stored(("storage", _Name(kind), str(key), str(), int())),
                    int(offset),
                    tuple(shape),
                    tuple(stride),
                    *_,
                ),
            ) if name == _REBUILD:
                kind = kind.removeprefix("torch ")
                if kind not in _OF_TORCH:
                    raise _not_of_type(f"torch's {kind}")
                sizes = (offset, *shape, *stride)
                if len(shape) == len(stride) and all(type(size) is int and 0 <= size < 2**31 for size in sizes):
                    return _OF_TORCH[kind], key, offset, shape, stride
    except (IndexError, KeyError, ValueError, TypeError) as error:
        raise _NoTensorError("is no file of torch.save with one tensor: its description cannot be read") from error
    raise _NoTensorError("is no file of torch.save with one plain tensor: save tensor.detach().cpu()")


def _result(program: bytes) -> object:
    stack: list[Any] = []
    marks: list[int] = []
    memo: dict[Any, object] = {}
    constants: Mapping[str, object] = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False, "EMPTY_TUPLE": ()}
    for opcode, argument, _ in pickletools.genops(program):
        match opcode.name:
            case "PROTO" | "FRAME":
                pass
            case "GLOBAL":
                stack.append(_Name(str(argument)))
            case "STACK_GLOBAL":
                name, module = stack.pop(), stack.pop()
                stack.append(_Name(f"{module} {name}" if isinstance(name, str) and isinstance(module, str) else ""))
            case "BININT" | "BININT1" | "BININT2" | "LONG1" | "BINUNICODE" | "SHORT_BINUNICODE":
                stack.append(argument)
            case "NONE" | "NEWTRUE" | "NEWFALSE" | "EMPTY_TUPLE" as name:
                stack.append(constants[name])
            case "MARK":
                marks.append(len(stack))
            case "TUPLE" | "TUPLE1" | "TUPLE2" | "TUPLE3" as name:
                start = marks.pop() if name == "TUPLE" else len(stack) - int(name[-1])
                if start < 0:
                    raise IndexError(start)
                stack[start:] = [tuple(stack[start:])]
            case "BINPUT" | "LONG_BINPUT":
                memo[argument] = stack[-1]
            case "MEMOIZE":
                memo[len(memo)] = stack[-1]
            case "BINGET" | "LONG_BINGET":
                stack.append(memo[argument])
            case "BINPERSID":
                stack.append(_Stored(stack.pop()))
            case "REDUCE":
                arguments, what = stack.pop(), stack.pop()
                stack.append(_Made(what, arguments))
            case "STOP":
                return stack.pop()
            case name:
                raise _NoTensorError(f"is no file of torch.save with one plain tensor: its description has {name}")
    raise IndexError("no end")
