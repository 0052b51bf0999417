"""Prompts as tensors: what is read of a file, without torch and without running what a pickle says, what nodes get, and what is refused."""

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

from tandem.api.openai.prompt_embeds import read_embeds
from tandem.base.errors import InvalidRequest
from tandem.router.config import Limits
from tandem.wire.embeds import PromptEmbeds
from tests.router.conftest import RunningRouter, StartRouter

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
    "a size below zero": (
        with_header({"x": {"dtype": "F32", "shape": [-2, -8], "data_offsets": [0, 64]}}, bytes(64)),
        "neither a safetensors file",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_what_is_no_prompt_is_refused_in_a_sentence(name: str) -> None:
    given_text, why = BAD[name]
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


@pytest.mark.parametrize("byte", [0x00, 0x81, 0xFF])
def test_any_one_damaged_byte_is_another_tensor_or_a_refusal(byte: int) -> None:
    whole = base64.b64decode(by_torch(rows(1)))
    for place in range(len(whole)):
        try:
            embeds = read_embeds(
                base64.b64encode(whole[:place] + bytes([byte]) + whole[place + 1 :]).decode(), MOST
            )
        except InvalidRequest:
            continue
        assert embeds.is_whole


@given(st.lists(st.sampled_from(range(256)), max_size=200).map(bytes))
def test_any_program_ends_in_a_refusal(program: bytes) -> None:
    with pytest.raises(InvalidRequest):
        read_embeds(zipped({"data.pkl": program, "data/0": bytes(64)}), MOST)


# --- a request


@pytest.fixture
def router(start_router: StartRouter) -> RunningRouter:
    return start_router(prefill=1, decode=1, prompt_embeds=True, limits=Limits(prompt_embeds_bytes=200_000))


def ask(router: RunningRouter, given_embeds: Any, **fields: Any) -> Any:
    body = {"model": "fake", "prompt_embeds": given_embeds, "max_tokens": 3, **fields}
    return router.client.post("/v1/completions", json=body)


@pytest.mark.parametrize("prompt", [..., None, ""])
def test_both_nodes_get_the_rows_and_what_they_are_called(router: RunningRouter, prompt: Any) -> None:
    tensor = rows(40)
    fields = {} if prompt is ... else {"prompt": prompt}
    answer = ask(router, by_torch(tensor), return_token_ids=True, **fields)
    assert answer.status_code == 200, answer.text
    assert answer.json()["usage"]["prompt_tokens"] == 40
    assert answer.json()["choices"][0]["prompt_token_ids"] == []
    submits = [submit for node in router.nodes.values() for submit in node.submits]
    assert len(submits) == 2
    for submit in submits:
        assert submit.embeds is not None
        assert tensor_of(submit.embeds).equal(tensor)
        assert submit.prompt_token_ids == [0] * 40
        assert submit.media == submit.embeds.features()
        assert [each.length for each in submit.media] == [16, 16, 8]


def test_several_prompts_and_choices_keep_their_rows(router: RunningRouter) -> None:
    tensors = [rows(20, seed) for seed in range(3)]
    answer = ask(router, [by_torch(tensors[0]), by_safetensors(x=tensors[1]), by_torch(tensors[2])], n=2)
    assert answer.status_code == 200, answer.text
    assert len(answer.json()["choices"]) == 6
    submits = router.nodes["d0"].submits
    names = [submit.media[0].identifier for submit in submits]
    assert sorted(map(names.count, names)) == [2] * 6
    for submit in submits:
        assert submit.embeds is not None
        assert submit.media == submit.embeds.features()


def test_rows_that_begin_alike_are_called_alike_up_to_there() -> None:
    draw = random.Random(4)
    first = rows(50)
    for _ in range(20):
        same = draw.randrange(50)
        other = torch.cat([first[:same], rows(30, 9)])
        names = [
            [each.identifier for each in read_embeds(by_torch(each), MOST).features()]
            for each in (first, other)
        ]
        alike = [one == two for one, two in zip(*names, strict=False)]
        assert alike == [place < same // 16 for place in range(len(alike))]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": "and this"}, "prompt_embeds"),
        ({"prompt": [5]}, "prompt_embeds"),
        ({"echo": True}, "echo"),
        ({"prompt_logprobs": 0}, "prompt_logprobs"),
        ({"truncate_prompt_tokens": 3}, "truncate_prompt_tokens"),
        ({"prompt_embeds": [by_torch(rows(2)), "x"]}, "prompt_embeds[1]"),
        ({"prompt_embeds": []}, "prompt_embeds"),
        ({"prompt_embeds": 5}, "prompt_embeds"),
        ({"prompt_embeds": [by_torch(rows(1))] * 129}, "prompt"),
        ({"max_tokens": 2040}, "max_tokens"),
    ],
)
def test_what_does_not_go_together_is_refused_by_name(
    router: RunningRouter, fields: dict[str, Any], param: str
) -> None:
    answer = ask(router, **({"given_embeds": by_torch(rows(20))} | _renamed(fields)))
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == param
    assert not router.nodes["d0"].submits


def _renamed(fields: dict[str, Any]) -> dict[str, Any]:
    return {"given_embeds" if name == "prompt_embeds" else name: value for name, value in fields.items()}


def test_more_rows_than_the_context_are_too_long(router: RunningRouter) -> None:
    answer = ask(router, by_torch(rows(2048)))
    assert answer.status_code == 400
    assert answer.json()["error"]["code"] == "context_length_exceeded"


def test_they_are_off_unless_a_setting_says_otherwise(start_router: StartRouter) -> None:
    plain = start_router()
    answer = ask(plain, by_torch(rows(2)))
    assert answer.status_code == 400
    assert "router.prompt_embeds" in answer.json()["error"]["message"]
