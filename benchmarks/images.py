"""What an encoder node gains: the first tokens of texts while images are encoded, with `pools.encode` and without.

    python -m benchmarks.images [--texts 24] [--every 1.0] [--senders 1] [--apart] [--out FOLDER]

The model has SmolVLM-256M's shape and random weights; an image is one tile of 512 pixels, 64 tokens. Each system runs alone on all of the
machine's cores: aggregated (with --apart one prefill and one decode node), then the same with an encoder node. Texts come at fixed times, first
alone and then while clients send one new image after another. Writes images.json and images.txt.

    images/s    images that were answered while the texts came
    gaps        between two tokens of a text's answer
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import io
import random
import tempfile
from itertools import count
from pathlib import Path

import httpx
import msgspec
import tokenizers
import torch
from PIL import Image
from transformers import AutoModelForImageTextToText, SmolVLMConfig

from benchmarks.lib.harness import parser_of, report, run, say
from benchmarks.lib.processes import adopt_orphans
from benchmarks.lib.servers import RunningSystem, System, check_alive, model_folder, played, running, tandem_system
from benchmarks.lib.tables import table_of
from tandem.base.errors import Unavailable
from tandem.base.flags import adder
from tandem.cluster.saving import results_folder
from tandem.loadgen.api import RequestShape
from tandem.loadgen.metrics import percentile
from tandem.loadgen.workload import single

_TILE = 512
_WORDS = 48  # of a text's prompt
_TOKENS = 16  # of its answer
_PATIENCE_S = 120.0
_ENCODER_READY_S = 120.0
_SPECIAL = ("<image>", "<fake_token_around_image>", "<global-img>", "<end_of_utterance>")
_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] }}: {% for line in message['content'] %}"
    "{% if line['type'] == 'image' %}<image>{% else %}{{ line['text'] }}{% endif %}{% endfor %}\n{% endfor %}assistant:"
)


class Texts(msgspec.Struct, frozen=True):
    """Values in milliseconds."""

    ttft_p50: float
    ttft_p90: float
    ttft_max: float
    gap_p99: float
    failed: int


class ImagesFigures(msgspec.Struct, frozen=True):
    system: str
    alone: Texts
    beside_images: Texts
    images_per_s: float
    image_ms_p50: float  # from the request to the end of its answer, of four tokens
    encoded_by: dict[str, int]  # tokens of images, by the role of the node


def main() -> int:
    parser = parser_of(__doc__, out="results/images")
    add = adder(parser)
    add("--texts", "N", 24, "alone, and as many beside images (%(default)s)")
    add("--every", "S", 1.0, "a text (%(default)g)")
    add("--senders", "N", 1, "clients that send images (%(default)s)")
    add("--apart", None, False, "a prefill and a decode node, not an aggregated one")
    options = parser.parse_args()
    folder, found = results_folder(options.out), []
    adopt_orphans()
    with tempfile.TemporaryDirectory() as model:
        write_model(Path(model))
        for system in _systems(Path(model), apart=options.apart):
            with running(system, folder / system.key) as started:
                say(f"{system.title}: ready after {started.ready_s:.1f} s")
                found.append(asyncio.run(measure(started, options)))
                check_alive(started)
    rows = []
    for one in found:
        of_images = {"images_per_s": one.images_per_s, "image_ms_p50": one.image_ms_p50}
        rows.append({"system": one.system, "beside": "alone", **msgspec.to_builtins(one.alone)})
        beside = {"beside": "beside images", **msgspec.to_builtins(one.beside_images), **of_images}
        rows.append({"system": one.system, **beside})
    table = table_of("Texts, alone and while images are encoded", rows, _COLUMNS, left=2)
    said = [f"{one.system}: tokens of images encoded by {one.encoded_by}" for one in found]
    return report(options, found, table, *said)


def _systems(model: Path, *, apart: bool) -> list[System]:
    flags = ("--prefill", "1", "--decode", "1") if apart else ("--aggregated", "1")
    name = "1P+1D" if apart else "aggregated"
    return [
        tandem_system("alone", name, model, *flags),
        tandem_system("with-encoder", f"{name}, and an encoder node", model, "--encode", "1", *flags),
    ]


def write_model(folder: Path) -> None:
    """Writes a model with SmolVLM-256M's sizes and SmolLM2's words. An image stays one tile, which takes a core long enough."""
    words = tokenizers.Tokenizer.from_file(str(model_folder("smollm2") / "tokenizer.json"))
    words.add_special_tokens([tokenizers.AddedToken(one, special=True, normalized=False) for one in _SPECIAL])
    words.save(str(folder / "tokenizer.json"))
    config = SmolVLMConfig(
        text_config={
            "model_type": "llama", "vocab_size": words.get_vocab_size(), "hidden_size": 576, "intermediate_size": 1536,
            "num_hidden_layers": 30, "num_attention_heads": 9, "num_key_value_heads": 3, "max_position_embeddings": 8192,
            "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2,
        },
        vision_config={
            "hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12, "num_attention_heads": 12,
            "image_size": _TILE, "patch_size": 16,
        },
        scale_factor=4, image_token_id=words.token_to_id("<image>"), pad_token_id=2,
    )  # fmt: skip
    torch.manual_seed(0)
    AutoModelForImageTextToText.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)
    processor = {
        "image_processor_type": "SmolVLMImageProcessor", "do_convert_rgb": True, "do_image_splitting": False, "do_normalize": True,
        "do_pad": True, "do_rescale": True, "do_resize": True, "image_mean": [0.5] * 3, "image_std": [0.5] * 3, "resample": 1,
        "rescale_factor": 1 / 255, "max_image_size": {"longest_edge": _TILE}, "size": {"longest_edge": _TILE},
    }  # fmt: skip
    (folder / "preprocessor_config.json").write_bytes(msgspec.json.encode(processor))
    settings = {"eos_token": "<end_of_utterance>", "chat_template": _TEMPLATE}
    (folder / "tokenizer_config.json").write_bytes(msgspec.json.encode(settings))


async def measure(started: RunningSystem, options: argparse.Namespace) -> ImagesFigures:
    numbers = count()
    rng = random.Random(0)
    async with httpx.AsyncClient(base_url=started.system.url, timeout=_PATIENCE_S, trust_env=False) as http:
        if "encoder" in started.system.key:
            await _until_encoder(http)
        await _send_image(http, started.model, next(numbers))  # the first image of each system is slower
        await _texts(started, rng, 2, 0.1)
        alone = await _texts(started, rng, options.texts, options.every)
        before = await _encoded(http)
        took: list[float] = []
        senders = [asyncio.create_task(_send_on(http, started.model, numbers, took)) for _ in range(options.senders)]
        clock = asyncio.get_running_loop().time
        begun = clock()
        beside = await _texts(started, rng, options.texts, options.every)
        lasted = clock() - begun
        for sender in senders:
            sender.cancel()
        ended = await asyncio.gather(*senders, return_exceptions=True)
        for error in ended:
            if isinstance(error, Exception):
                raise Unavailable(f"an image was not answered: {error}") from error
        await asyncio.sleep(1.5)  # counters can be a second old
        after = await _encoded(http)
    if not took:
        raise Unavailable("no image was answered while the texts came: ask for more --texts")
    return ImagesFigures(
        started.system.title, alone, beside, len(took) / lasted, 1e3 * percentile(sorted(took), 50),
        {role: tokens - before.get(role, 0) for role, tokens in after.items()},
    )  # fmt: skip


async def _texts(started: RunningSystem, rng: random.Random, number: int, every_s: float) -> Texts:
    prompts = [" ".join(str(rng.randrange(1000)) for _ in range(_WORDS)) for _ in range(number)]
    sessions = [single(prompt, _WORDS, _TOKENS) for prompt in prompts]
    shape = RequestShape(started.model, temperature=0.0, timeout_s=_PATIENCE_S)
    arrivals = [every_s * place for place in range(number)]
    asked = (await played(started.system.url, shape, sessions, arrivals=arrivals)).timelines
    whole = [one for one in asked if one.succeeded]
    if not whole:
        raise Unavailable(f"no text was answered: {asked[0].failure}")
    firsts = sorted(timeline.ttft for timeline in whole)
    gaps = sorted(gap for timeline in whole for gap in timeline.inter_token)
    return Texts(
        ttft_p50=1e3 * percentile(firsts, 50),
        ttft_p90=1e3 * percentile(firsts, 90),
        ttft_max=1e3 * firsts[-1],
        gap_p99=1e3 * percentile(gaps, 99) if gaps else 0.0,
        failed=len(asked) - len(whole),
    )


async def _send_on(http: httpx.AsyncClient, model: str, numbers: count[int], took: list[float]) -> None:
    clock = asyncio.get_running_loop().time
    while True:
        begun = clock()
        await _send_image(http, model, next(numbers))
        took.append(clock() - begun)


async def _send_image(http: httpx.AsyncClient, model: str, number: int) -> None:
    file = io.BytesIO()
    noise = random.Random(number).randbytes(64 * 64 * 3)  # a small file of a large image
    Image.frombytes("RGB", (64, 64), noise).resize((_TILE, _TILE)).save(file, "JPEG")
    url = f"data:image/jpeg;base64,{base64.b64encode(file.getvalue()).decode()}"
    content = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "What is this?"}]
    body = {
        "model": model, "messages": [{"role": "user", "content": content}], "max_tokens": 4, "ignore_eos": True, "temperature": 0,
    }  # fmt: skip
    answer = await http.post("/v1/chat/completions", json=body)
    if answer.status_code != 200:
        raise Unavailable(f"status {answer.status_code}: {answer.text[:300]}")


async def _encoded(http: httpx.AsyncClient) -> dict[str, int]:
    nodes = (await http.get("/cluster")).raise_for_status().json()["nodes"]
    return {node["role"]: int(node["counters"]["encoder_tokens"]) for node in nodes if node["counters"]}


async def _until_encoder(http: httpx.AsyncClient) -> None:
    async with asyncio.timeout(_ENCODER_READY_S):
        while True:
            nodes = (await http.get("/cluster")).raise_for_status().json()["nodes"]
            if any((node["role"], node["state"]) == ("encode", "ready") for node in nodes):
                return
            await asyncio.sleep(0.2)


_COLUMNS = {
    "system": "{system}",
    "texts": "{beside}",
    "TTFT p50 ms": "{ttft_p50:.0f}",
    "p90": "{ttft_p90:.0f}",
    "max": "{ttft_max:.0f}",
    "gaps p99 ms": "{gap_p99:.0f}",
    "images/s": "{images_per_s:.2f}",
    "image p50 ms": "{image_ms_p50:.0f}",
}


if __name__ == "__main__":
    run(main)
