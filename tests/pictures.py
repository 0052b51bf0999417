"""Image files, and what of a tiny model's folder says how its images are read: as SmolVLM's, with tiles of 16 pixels. No torch."""

from __future__ import annotations

import base64
import io
import json
import random
from pathlib import Path
from typing import Any

import tokenizers
from PIL import Image
from tokenizers import AddedToken, decoders, models, pre_tokenizers

from tandem.wire.images import TiledImages

TILE, LONGEST, PATCH, SCALE = 16, 48, 4, 2
TOKENS = (TILE // PATCH // SCALE) ** 2
_SPECIAL = [
    "<pad>",
    "<|im_start|>",
    "<end_of_utterance>",
    "<image>",
    "<fake_token_around_image>",
    "<global-img>",
    *(f"<row_{row}_col_{column}>" for row in range(1, 5) for column in range(1, 5)),
]
# As SmolVLM's own: it takes contents as lists of parts, and nothing else.
CHAT_TEMPLATE = (
    "<|im_start|>{% for message in messages %}{{ message['role'] | capitalize }}"
    "{% if message['content'][0]['type'] == 'image' %}:{% else %}: {% endif %}"
    "{% for line in message['content'] %}{% if line['type'] == 'text' %}{{ line['text'] }}"
    "{% elif line['type'] == 'image' %}<image>{% endif %}{% endfor %}<end_of_utterance>\n{% endfor %}"
    "{% if add_generation_prompt %}Assistant:{% endif %}"
)


def tokenizer() -> tokenizers.Tokenizer:
    """One token for each byte, and the special ones."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = tokenizers.Tokenizer(models.BPE({piece: place for place, piece in enumerate(alphabet)}, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in _SPECIAL])
    return made


PROCESSOR: dict[str, Any] = {
    "do_convert_rgb": True,
    "do_image_splitting": True,
    "do_normalize": True,
    "do_pad": True,
    "do_rescale": True,
    "do_resize": True,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
    "max_image_size": {"longest_edge": TILE},
    "resample": 1,
    "rescale_factor": 1 / 255,
    "size": {"longest_edge": LONGEST},
}


def save_words(folder: Path, kind: str = "SmolVLM") -> None:
    """The tokenizer, the template, and how images are prepared."""
    tokenizer().save(str(folder / "tokenizer.json"))
    settings = {"eos_token": "<end_of_utterance>", "chat_template": CHAT_TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    processor = {**PROCESSOR, "image_processor_type": f"{kind}ImageProcessor"}
    (folder / "preprocessor_config.json").write_text(json.dumps(processor))


def save_config(folder: Path) -> None:
    """As much of a config.json as a router reads."""
    config = {
        "model_type": "smolvlm",
        "vision_config": {"patch_size": PATCH},
        "scale_factor": SCALE,
        "image_token_id": RULES.token_id,
    }
    (folder / "config.json").write_text(json.dumps(config))


def data_url(file: bytes, kind: str = "image/png") -> str:
    return f"data:{kind};base64,{base64.b64encode(file).decode()}"


RULES = TiledImages(
    tile=TILE, longest=LONGEST, is_cut=True, tokens=TOKENS, token_id=tokenizer().token_to_id("<image>")
)


def picture(seed: int, width: int = 40, height: int = 30, kind: str = "PNG") -> bytes:
    """An image file."""
    noise = random.Random(seed).randbytes(width * height * 3)
    file = io.BytesIO()
    Image.frombytes("RGB", (width, height), noise).save(file, kind)
    return file.getvalue()
