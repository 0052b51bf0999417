"""Images in messages: what a client may send, the errors for everything else, and what nodes get."""

from __future__ import annotations

import asyncio
import base64
import io
import json
import struct
import threading
import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from tandem.api.images.files import ImageFile, read_file
from tandem.api.images.reader import image_reader
from tandem.api.openai.chat_request import ImagePart
from tandem.api.settings import RequestLimits
from tandem.api.text.tokenizer import Tokenizer
from tandem.base.errors import InvalidImage
from tandem.router.config import Limits
from tandem.wire.images import digest_of_image
from tests.pictures import (
    QWEN_RULES,
    QWEN_SPECIAL,
    RULES,
    TOKENS,
    data_url,
    picture,
    save_config,
    save_qwens_words,
    save_words,
    tokenizer,
)
from tests.router.conftest import RunningRouter, StartRouter, error_of
from tests.router.paths import SERVED

LIMITS = Limits(image_bytes=20_000, image_pixels=10_000, images_per_request=3)


@pytest.fixture(scope="module")
def image_folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder: Path = tmp_path_factory.mktemp("images")
    save_words(folder)
    save_config(folder)
    return str(folder)


@pytest.fixture(scope="module")
def kept_router(keep_router: StartRouter, image_folder: str) -> RunningRouter:
    return keep_router(tokenizer_path=image_folder, limits=LIMITS)


def ask(router: RunningRouter, *parts: Any, **fields: Any) -> Any:
    content = [{"type": "text", "text": part} if isinstance(part, str) else part for part in parts]
    body = {"model": "fake", "messages": [{"role": "user", "content": content}], "max_tokens": 2, **fields}
    return router.client.post("/v1/chat/completions", json=body)


def image(url: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url}}


def written(*parts: str | bytes) -> str:
    """The user's turn as SmolVLM's own processor writes it."""
    text = ""
    for part in parts:
        if isinstance(part, str):
            text += part
            continue
        rows, columns = RULES.grid(*Image.open(io.BytesIO(part)).size)
        run, around = "<image>" * TOKENS, "<fake_token_around_image>"
        for row in range(1, rows + 1):
            text += "".join(f"{around}<row_{row}_col_{at}>{run}" for at in range(1, columns + 1)) + "\n"
        text += ("\n" if rows else "") + f"{around}<global-img>{run}{around}"
    colon = ":" if isinstance(parts[0], bytes) else ": "
    return f"<|im_start|>User{colon}{text}<end_of_utterance>\nAssistant:"


def test_both_nodes_get_the_prompt_the_files_and_where_they_stand(router: RunningRouter) -> None:
    one, two = picture(1), picture(2, 48, 20, "JPEG")
    answer = ask(router, "Compare ", image(data_url(one)), image(data_url(two, "image/jpeg")), "!")
    assert answer.status_code == 200, answer.text
    prompt = tokenizer().encode(written("Compare ", one, two, "!"), add_special_tokens=False).ids
    assert answer.json()["usage"]["prompt_tokens"] == len(prompt)
    submits = [submit for node in router.nodes.values() for submit in node.submits]
    assert len(submits) == 2
    for submit in submits:
        assert submit.prompt_token_ids == prompt
        assert submit.images == [one, two]
        tiles = [[places.length for places in RULES.parts(*Image.open(io.BytesIO(each)).size)] for each in (one, two)]
        assert [each.length for each in submit.media] == tiles[0] + tiles[1]
        for each in submit.media:
            run = prompt[each.offset : each.offset + each.length]
            assert run == [RULES.token_id] * each.length
            assert each.identifier == f"{digest_of_image([one, two][each.image])}/{each.part}"


def test_text_alone_reaches_a_template_that_knows_parts_alone(router: RunningRouter) -> None:
    assert router.chat("Hello", max_tokens=2).status_code == 200
    submit = router.nodes["d0"].submits[-1]
    assert tokenizer().decode(submit.prompt_token_ids, skip_special_tokens=False) == written("Hello")
    assert not submit.media


WEATHER = {
    "type": "function",
    "function": {"name": "weather", "description": "weather somewhere", "parameters": {"type": "object"}},
}


@pytest.mark.parametrize("first", ["image", "words"])
def test_tools_are_told_beside_an_image(router: RunningRouter, first: str) -> None:
    file = picture(1)
    parts = [image(data_url(file)), "What is it?"]
    answer = ask(router, *(parts if first == "image" else reversed(parts)), tools=[WEATHER])
    assert answer.status_code == 200, answer.text
    (submit,) = router.nodes["d0"].submits[-1:]
    prompt = tokenizer().decode(submit.prompt_token_ids, skip_special_tokens=False)
    assert prompt.startswith("<|im_start|>System:")
    assert prompt.index("weather somewhere") < min(prompt.index("<image>"), prompt.index("What is it?"))
    assert submit.images == [file]


def test_without_a_system_message_the_users_first_tells_the_tools(start_router: StartRouter, image_folder: str) -> None:
    template = (
        "{% for message in messages %}{% if message.role == 'system' %}{{ raise_exception('none') }}{% endif %}"
        "{% for part in message.content %}{{ '<image>' if part.type == 'image' else part.text }}{% endfor %}{% endfor %}"
    )
    router = start_router(prefill=0, tokenizer_path=image_folder, chat_template=template)
    assert ask(router, image(data_url(picture(1))), "What is it?", tools=[WEATHER]).status_code == 200
    (submit,) = router.nodes["d0"].submits
    prompt = tokenizer().decode(submit.prompt_token_ids, skip_special_tokens=False)
    assert prompt.index("weather somewhere") < prompt.index("<image>") < prompt.index("What is it?")


def test_words_that_look_like_placeholders_are_words(router: RunningRouter) -> None:
    answer = ask(router, "I write <image> and <fake_token_around_image>", image(data_url(picture(1))))
    assert answer.status_code == 200, answer.text
    submit = router.nodes["d0"].submits[-1]
    assert submit.prompt_token_ids.count(RULES.token_id) == sum(each.length for each in submit.media)


def test_the_other_apis_have_their_own_words_for_it(router: RunningRouter) -> None:
    file = picture(4)
    source = {"type": "base64", "media_type": "image/png", "data": base64.b64encode(file).decode()}
    content = [{"type": "image", "source": source}, {"type": "text", "text": "What?"}]
    message = {"messages": [{"role": "user", "content": content}]}
    parts = [{"type": "input_image", "image_url": data_url(file)}, {"type": "input_text", "text": "What?"}]
    asked: dict[str, dict[str, Any]] = {
        "/v1/messages": {"max_tokens": 2, **message},
        "/v1/messages/count_tokens": message,
        "/v1/responses": {"input": [{"role": "user", "content": parts}], "max_output_tokens": 2},
    }
    answers = {path: router.client.post(path, json=asked[path]) for path in asked.keys() & SERVED}
    assert {answer.status_code for answer in answers.values()} <= {200}
    ids = tokenizer().encode(written(file, "What?"), add_special_tokens=False).ids
    assert {tuple(submit.prompt_token_ids) for submit in router.nodes["d0"].submits} <= {tuple(ids)}
    if (counted := answers.get("/v1/messages/count_tokens")) is not None:
        assert counted.json()["input_tokens"] == len(ids)
    tokenized = router.client.post(
        "/tokenize",
        json={"messages": [{"role": "user", "content": [image(data_url(file)), {"type": "text", "text": "What?"}]}]},
    )
    assert tokenized.json()["tokens"] == ids


def saved(mode: str, kind: str, **options: Any) -> bytes:
    made, file = Image.new("RGB", (40, 24), (200, 30, 90)).convert(mode), io.BytesIO()
    made.save(file, kind, **options)
    return file.getvalue()


def turned() -> bytes:
    """A picture taken upright, as a camera writes it: rotated, with its orientation in EXIF."""
    exif = Image.Exif()
    exif[0x0112] = 6
    return saved("RGB", "JPEG", exif=exif)


KINDS = {
    "grey": ("image/png", saved("L", "PNG")),
    "a palette": ("image/png", saved("P", "PNG")),
    "a palette with a hole": ("image/png", saved("P", "PNG", transparency=0)),
    "transparent": ("image/png", saved("RGBA", "PNG")),
    "16 bits": ("image/png", saved("I;16", "PNG")),
    "one bit": ("image/png", saved("1", "PNG")),
    "for print": ("image/jpeg", saved("CMYK", "JPEG")),
    "called jpg": ("image/jpg", saved("RGB", "JPEG")),
    "of two pictures": ("image/jpeg", saved("RGB", "MPO", save_all=True, append_images=[Image.new("RGB", (40, 24))])),
    "WebP": ("image/webp", saved("RGB", "WEBP")),
    "GIF": ("image/gif", saved("P", "GIF")),
    "moving": ("image/gif", saved("P", "GIF", save_all=True, append_images=[Image.new("P", (40, 24))])),
}


def test_all_kinds_of_pictures(router: RunningRouter) -> None:
    for what, (kind, file) in KINDS.items():
        answer = ask(router, image(data_url(file, kind)))
        assert answer.status_code == 200, (what, answer.text)
        assert len(router.nodes["d0"].submits[-1].media) == len(RULES.parts(40, 24)), what


def test_a_picture_is_read_as_it_was_taken(router: RunningRouter) -> None:
    assert RULES.grid(40, 24) != RULES.grid(24, 40)
    assert ask(router, image(data_url(turned(), "image/jpeg"))).status_code == 200
    rows = f"<row_{RULES.grid(24, 40)[0]}_col_1>"
    assert tokenizer().token_to_id(rows) in router.nodes["d0"].submits[-1].prompt_token_ids


def bomb() -> bytes:
    """A PNG whose header claims far more pixels than its data has."""

    def chunk(kind: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))

    head = struct.pack(">IIBBBBB", 60_000, 60_000, 8, 2, 0, 0, 0)
    rows = chunk(b"IDAT", zlib.compress(bytes(10_000)))
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + rows + chunk(b"IEND", b"")


GOOD = picture(1)
BAD: dict[str, tuple[str, str]] = {
    "an address": ("https://example.com/a.png", "fetches no addresses"),
    "an address of this machine": ("http://127.0.0.1:1/a.png", "fetches no addresses"),
    "a file": ("file:///etc/passwd", "fetches no addresses"),
    "no url": ("a.png", "must be a data URL"),
    "empty": ("", "must be a data URL"),
    "no base64": (data_url(GOOD).replace(";base64", ""), "must be encoded as base64"),
    "broken base64": (data_url(GOOD)[:-3] + "*==", "is not base64"),
    "another type": (data_url(GOOD, "image/svg+xml"), "must be of type"),
    "text": (data_url(b"<html>", "text/html"), "must be of type"),
    "a type that lies": (data_url(GOOD, "image/jpeg"), "says that it is image/jpeg, and is PNG"),
    "no image": (data_url(b"not an image at all"), "cannot be read as image/png"),
    "nothing": (data_url(b""), "cannot be read as image/png"),
    "cut off": (data_url(GOOD[: len(GOOD) // 2]), "cannot be read as image/png"),
    "a JPEG cut off": (data_url(picture(1, kind="JPEG")[:-200], "image/jpeg"), "cannot be read as image/jpeg"),
    "too many pixels": (data_url(picture(1, 101, 100, "JPEG"), "image/jpeg"), "101 x 100 pixels, more than"),
    "a bomb": (data_url(bomb()), "too many pixels"),
    "too many bytes": (data_url(bytes(20_001)), "may have 20000 bytes, and has 20001"),
    "a line": (data_url(picture(1, 900, 4)), "at most 200 times"),
    "too small": (data_url(picture(1, 3, 3)), "at least 4"),
}


def test_what_is_no_image_is_refused_with_the_reason(router: RunningRouter) -> None:
    for what, (url, why) in BAD.items():
        answer = ask(router, "See", image(url))
        assert answer.status_code == 400, (what, answer.text)
        error = answer.json()["error"]
        assert why in error["message"], what
        assert error["message"].startswith("messages[0].content[1]: the image ")
        assert error["param"] == "messages[0].content[1]"
    assert not any(node.submits for node in router.nodes.values())


def drawn_again(times: int) -> bytes:
    """A small JPEG whose last scan comes so many times more."""
    file = saved("RGB", "JPEG", progressive=True)
    last = file[file.rindex(b"\xff\xda") : -2]
    return file[:-2] + times * last + file[-2:]


def test_a_jpeg_of_many_scans_is_refused_before_it_is_decoded(router: RunningRouter) -> None:
    assert ask(router, image(data_url(drawn_again(20), "image/jpeg"))).status_code == 200
    answer = ask(router, image(data_url(drawn_again(60), "image/jpeg")))
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "invalid_image")
    assert "scans, more than 50" in answer.json()["error"]["message"]


def test_a_jpeg_of_many_parts_is_refused_before_it_is_opened() -> None:
    """A part of four bytes takes as long as any other."""
    file = saved("RGB", "JPEG")
    for of_nothing in (b"\xff\xe2\x00\x02", b"\xff\x00", b"\xff\xff"):
        many = file[:2] + of_nothing * 200_001 + file[2:]
        part = ImagePart(url=data_url(many, "image/png"), where="here")
        with pytest.raises(InvalidImage, match="marks that a JPEG may have"):
            read_file(part, RequestLimits())


def test_further_refusals(router: RunningRouter) -> None:
    good = image(data_url(GOOD))
    assert "at most 3 images" in ask(router, *[good] * 4).json()["error"]["message"]
    assert "truncate_prompt_tokens" in ask(router, good, truncate_prompt_tokens=8).json()["error"]["message"]
    assert ask(router, {"type": "image_url"}).status_code == 400
    assert ask(router, {"type": "image_url", "image_url": {"detail": "low"}}).status_code == 400
    assert "no 'input_audio'" in ask(router, {"type": "input_audio"}).json()["error"]["message"]
    body = {"model": "fake", "messages": [{"role": "assistant", "content": [good]}]}
    answer = router.client.post("/v1/chat/completions", json=body)
    assert "only a user's message has images" in answer.json()["error"]["message"]


def test_a_model_without_a_tower_reads_none(start_router: StartRouter) -> None:
    plain = start_router()
    assert "this model reads no 'image_url'" in error_of(ask(plain, "See", image(data_url(GOOD))), 400)["message"]


@pytest.mark.parametrize("kind", ["qwen2_5_vl", "qwen3_vl"])
def test_qwens_classes_count_rows_and_columns(start_router: StartRouter, tmp_path: Path, kind: str) -> None:
    save_qwens_words(tmp_path)
    config = {"model_type": kind, "image_token_id": QWEN_RULES.token_id}
    (tmp_path / "config.json").write_text(json.dumps(config))
    router = start_router(tokenizer_path=str(tmp_path))
    answer = ask(router, image(data_url(picture(1, 40, 30))), "What?")
    assert answer.status_code == 200, answer.text
    assert router.chat("Hello", max_tokens=2).status_code == 200
    with_image, alone = router.nodes["d0"].submits
    rows, columns = QWEN_RULES.grid(40, 30)
    (feature,) = with_image.media
    assert (feature.length, feature.columns) == (rows * columns, columns)
    words = tokenizer(QWEN_SPECIAL)
    run = "<|vision_start|>" + "<|image_pad|>" * rows * columns + "<|vision_end|>"
    said = words.decode(with_image.prompt_token_ids, skip_special_tokens=False)
    assert said == f"<|im_start|>user\n{run}What?<|im_end|>\n<|im_start|>assistant\n"
    said = words.decode(alone.prompt_token_ids, skip_special_tokens=False)
    assert said == "<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n"


def test_a_request_that_moves_to_another_node_takes_its_images_along(
    start_router: StartRouter, image_folder: str
) -> None:
    router = start_router(prefill=1, decode=2, tokenizer_path=image_folder)
    decode = [node for name, node in router.nodes.items() if name.startswith("d")]
    for node in decode:
        node.set(pause_at=3)
    with ThreadPoolExecutor(1) as at_once:
        answer = at_once.submit(ask, router, "See", image(data_url(GOOD)), max_tokens=6)
        router.wait_for(lambda: any(node.submits for node in decode), "it is at a decode node")
        lost, successor = sorted(decode, key=lambda node: len(node.submits), reverse=True)
        successor.resume()
        router.remove(lost.info.node_id).kill()
        assert answer.result(20).status_code == 200
    before, after = lost.submits[0], successor.submits[-1]
    assert after.images == before.images == [GOOD]
    assert after.media == before.media


async def test_the_images_of_one_key_leave_a_decoder_for_anothers(
    image_folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: asyncio.Queue[str] = asyncio.Queue()
    loop, go = asyncio.get_running_loop(), threading.Event()

    def slow(part: ImagePart, _: RequestLimits) -> ImageFile:
        loop.call_soon_threadsafe(begun.put_nowait, part.where)
        assert go.wait(20)
        return ImageFile(part.where.encode(), 1, 1)

    monkeypatch.setattr("tandem.api.images.reader.read_file", slow)
    reader = image_reader(image_folder, Tokenizer.from_folder(image_folder), LIMITS)
    assert reader is not None
    asked = [
        asyncio.create_task(reader.read([ImagePart("", name)], name.partition(" ")[0]))
        for name in ("greedy 1", "greedy 2", "greedy 3", "other")
    ]
    try:
        assert [await begun.get() for _ in range(2)] == ["greedy 1", "other"]
    finally:
        go.set()
        await asyncio.gather(*asked)
