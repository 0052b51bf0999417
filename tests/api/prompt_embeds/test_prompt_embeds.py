"""Prompts as tensors: read from their files, or refused in a sentence."""

from __future__ import annotations

import base64
import io
import json
import pickle
import random
import struct
import zipfile
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save

from tandem.api.prompt_embeds.reading import read_embeds
from tandem.base.errors import InvalidRequest
from tandem.wire.embeds import PromptEmbeds

WIDTH = 8
MOST = 20_000


def rows(count: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(count, WIDTH, generator=torch.Generator().manual_seed(seed))


def by_torch(value: object, **options: Any) -> str:
    file = io.BytesIO()
    torch.save(value, file, **options)
    return base64.b64encode(file.getvalue()).decode()


def by_safetensors(**tensors: torch.Tensor) -> str:
    return base64.b64encode(save(tensors)).decode()


def tensor_of(embeds: PromptEmbeds) -> torch.Tensor:
    flat = torch.frombuffer(bytearray(embeds.data), dtype=getattr(torch, embeds.dtype))
    return flat.view(embeds.count, embeds.width)


# --- reading


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    "made",
    [
        by_torch,
        lambda tensor: by_torch(tensor[None]),
        lambda tensor: by_torch(torch.cat([tensor, tensor])[5:]),  # a part of what is saved
        lambda tensor: by_torch(tensor.requires_grad_()),
        lambda tensor: by_torch(tensor, pickle_protocol=4),
        lambda tensor: by_safetensors(anything=tensor),
    ],
    ids=["torch", "a batch of one", "a view", "with gradients", "another protocol", "safetensors"],
)
def test_a_tensor_is_read_as_it_was_saved(dtype: torch.dtype, made: Callable[[torch.Tensor], str]) -> None:
    tensor = rows(5).to(dtype)
    assert tensor_of(read_embeds(made(tensor.clone()), MOST)).equal(tensor)


class Program:
    """What an unpickler would run."""

    ran = False

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return setattr, (Program, "ran", True)


def zipped(parts: dict[str, bytes], how: int = zipfile.ZIP_STORED) -> str:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", how) as archive:
        for name, content in parts.items():
            archive.writestr(f"archive/{name}", content)
    return base64.b64encode(file.getvalue()).decode()


def program_of(shape: list[int]) -> bytes:
    """A description, as torch.save writes it, of a tensor with this shape."""
    sizes = b"(" + b"".join(b"J" + struct.pack("<i", size) for size in shape) + b"t"
    storage = b"(X\x07\x00\x00\x00storagectorch\nFloatStorage\nX\x01\x00\x00\x000X\x03\x00\x00\x00cpuK\x10tQ"
    return b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\n(" + storage + b"K\x00" + sizes + sizes + b"\x89NtR."


def with_header(header: object, body: bytes = b"") -> str:
    text = json.dumps(header).encode()
    return base64.b64encode(struct.pack("<Q", len(text)) + text + body).decode()


def half(text: str) -> str:
    return text[: len(text) // 8 * 4]


BAD: dict[str, tuple[str, str]] = {
    "no base64": ("&&&&", "is not base64"),
    "base64 that is cut off": (by_torch(rows(5))[:-3], "is not base64"),
    "a file that is cut off": (half(by_torch(rows(5))), "cannot be read"),
    "safetensors that are cut off": (half(by_safetensors(x=rows(50))), "is cut off"),
    "nothing": ("", "neither a safetensors file nor one of torch.save"),
    "no tensor": (base64.b64encode(b"what is this?" * 9).decode(), "neither a safetensors file"),
    "a list": (by_torch([rows(5)]), "no file of torch.save with one plain tensor"),
    "a dictionary": (by_torch({"x": rows(5)}), "no file of torch.save with one plain tensor"),
    "a number": (by_torch(5), "no file of torch.save with one plain tensor"),
    "a parameter": (by_torch(torch.nn.Parameter(rows(5))), "save tensor.detach().cpu()"),
    "a program": (by_torch(Program()), "no file of torch.save with one plain tensor"),
    "a program alone": (base64.b64encode(pickle.dumps(Program())).decode(), "neither a safetensors file"),
    "of the older format": (by_torch(rows(5), _use_new_zipfile_serialization=False), "neither a safetensors"),
    "two tensors": (by_safetensors(x=rows(5), y=rows(5, 1)), "must be alone in its file, where 2 are"),
    "eight bytes a number": (by_torch(rows(5).double()), "must be of type float32, float16, bfloat16"),
    "whole numbers": (by_safetensors(x=rows(5).long()), "must be of type float32, float16, bfloat16"),
    "one row": (by_torch(rows(5)[0]), "must have the shape [tokens, hidden size], and has [8]"),
    "two prompts": (by_torch(torch.stack([rows(5), rows(5)])), "and has [2, 5, 8]"),
    "no rows": (by_torch(rows(0)), "and has [0, 8]"),
    "columns first": (by_torch(rows(8).T), "save tensor.contiguous()"),
    "some columns": (by_torch(rows(8)[:, :4]), "save tensor.contiguous()"),
    "too large": (by_torch(rows(5000)), "bytes, and has"),
    "a little too large": (by_torch(rows(700)), "bytes, and has"),
    "a zip of something else": (zipped({"x": b"1"}), "no file of torch.save"),
    "a zip that is packed": (zipped({"data.pkl": b"0" * 9000}, zipfile.ZIP_DEFLATED), "is compressed"),
    "a zip of many parts": (zipped({str(part): b"" for part in range(99)}), "must be alone"),
    "no numbers in the zip": (zipped({"data.pkl": b"\x80\x02."}), "description cannot be read"),
    "an offset beyond": (
        with_header({"x": {"dtype": "F32", "shape": [2, 8], "data_offsets": [64, 128]}}, bytes(64)),
        "is cut off",
    ),
    "another shape than its bytes": (
        with_header({"x": {"dtype": "F32", "shape": [3, 8], "data_offsets": [0, 64]}}, bytes(64)),
        "has 64 bytes, and 96 by its shape",
    ),
    "a thousand dimensions": (
        with_header({"x": {"dtype": "F32", "shape": [2**31] * 1000, "data_offsets": [0, 64]}}, bytes(64)),
        "and has 1000 dimensions",
    ),
    "a program of a thousand dimensions": (
        zipped({"data.pkl": program_of([2**30] * 1000), "data/0": bytes(64)}),
        "and has 1000 dimensions",
    ),
    "a size below zero": (
        with_header({"x": {"dtype": "F32", "shape": [-2, -8], "data_offsets": [0, 64]}}, bytes(64)),
        "neither a safetensors file",
    ),
}  # fmt: skip


def test_what_is_no_prompt_is_refused_in_a_sentence() -> None:
    for given_text, why in BAD.values():
        with pytest.raises(InvalidRequest) as refused:
            read_embeds(given_text, MOST)
        assert why in str(refused.value)
        assert refused.value.param == "prompt_embeds"
        assert len(str(refused.value)) < 400
    assert not Program.ran


@given(st.data(), st.sampled_from([by_torch, lambda tensor: by_safetensors(x=tensor)]))
def test_a_damaged_file_is_another_tensor_or_a_refusal(
    data: st.DataObject, made: Callable[[torch.Tensor], str]
) -> None:
    file = bytearray(base64.b64decode(made(rows(4))))
    for _ in range(data.draw(st.integers(1, 4))):
        file[data.draw(st.integers(0, len(file) - 1))] = data.draw(st.integers(0, 255))
    try:
        embeds = read_embeds(base64.b64encode(file).decode(), MOST)
    except InvalidRequest:
        return
    assert embeds.is_whole


@pytest.mark.parametrize("byte", [0x00, 0xFF])
def test_any_one_damaged_byte_is_another_tensor_or_a_refusal(byte: int) -> None:
    whole = base64.b64decode(by_torch(rows(1)))
    for place in range(len(whole)):
        try:
            embeds = read_embeds(base64.b64encode(whole[:place] + bytes([byte]) + whole[place + 1 :]).decode(), MOST)
        except InvalidRequest:
            continue
        assert embeds.is_whole


@given(st.lists(st.sampled_from(range(256)), max_size=200).map(bytes))
def test_any_program_ends_in_a_refusal(program: bytes) -> None:
    with pytest.raises(InvalidRequest):
        read_embeds(zipped({"data.pkl": program, "data/0": bytes(64)}), MOST)


def test_rows_that_begin_alike_are_called_alike_up_to_there() -> None:
    draw = random.Random(4)
    first = rows(50)
    for _ in range(20):
        same = draw.randrange(50)
        other = torch.cat([first[:same], rows(30, 9)])
        names = [[each.identifier for each in read_embeds(by_torch(each), MOST).features()] for each in (first, other)]
        alike = [one == two for one, two in zip(*names, strict=False)]
        assert alike == [place < same // 16 for place in range(len(alike))]
