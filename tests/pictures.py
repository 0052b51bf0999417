"""Makes image files, and the files of a tiny model's folder that say how it reads images: like SmolVLM, with tiles of 16 pixels.
Needs no torch."""

from __future__ import annotations

import base64
import io
import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import tokenizers
from PIL import Image
from tokenizers import AddedToken, decoders, models, pre_tokenizers

from tandem.wire.images import GriddedImages, TiledImages

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
# Like SmolVLM's own template, it takes a message's content only as a list of parts.
CHAT_TEMPLATE = (
    "<|im_start|>{% for message in messages %}{{ message['role'] | capitalize }}"
    "{% if message['content'][0]['type'] == 'image' %}:{% else %}: {% endif %}"
    "{% for line in message['content'] %}{% if line['type'] == 'text' %}{{ line['text'] }}"
    "{% elif line['type'] == 'image' %}<image>{% endif %}{% endfor %}<end_of_utterance>\n{% endfor %}"
    "{% if add_generation_prompt %}Assistant:{% endif %}"
)


def tokenizer(special: Sequence[str] = _SPECIAL) -> tokenizers.Tokenizer:
    """A tokenizer with one token for each byte, and the special tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = tokenizers.Tokenizer(models.BPE({piece: place for place, piece in enumerate(alphabet)}, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in special])
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
    """Writes the tokenizer, the chat template and the image processor's settings."""
    tokenizer().save(str(folder / "tokenizer.json"))
    settings = {"eos_token": "<end_of_utterance>", "chat_template": CHAT_TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    processor = {**PROCESSOR, "image_processor_type": f"{kind}ImageProcessor"}
    (folder / "preprocessor_config.json").write_text(json.dumps(processor))


def save_config(folder: Path) -> None:
    """Writes the part of a config.json that a router reads."""
    config = {
        "model_type": "smolvlm",
        "vision_config": {"patch_size": PATCH},
        "scale_factor": SCALE,
        "image_token_id": RULES.token_id,
    }
    (folder / "config.json").write_text(json.dumps(config))


def data_url(file: bytes, kind: str = "image/png") -> str:
    return f"data:{kind};base64,{base64.b64encode(file).decode()}"


QWEN_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{% if message['content'] is string %}{{ message['content'] }}"
    "{% else %}{% for line in message['content'] %}{% if line['type'] == 'image' %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% else %}{{ line['text'] }}{% endif %}{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
QWEN_SPECIAL = [
    "<pad>",
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|image_pad|>",
    "<|video_pad|>",
]
QWEN_PROCESSOR: dict[str, Any] = {
    "do_convert_rgb": True,
    "do_normalize": True,
    "do_rescale": True,
    "do_resize": True,
    "image_mean": [0.48, 0.46, 0.41],
    "image_std": [0.27, 0.26, 0.28],
    "image_processor_type": "Qwen2VLImageProcessor",
    "merge_size": 2,
    "patch_size": PATCH,
    "temporal_patch_size": 2,
    "resample": 3,
    "rescale_factor": 1 / 255,
    "min_pixels": 4 * 64,
    "max_pixels": 24 * 64,
}


def save_qwens_words(folder: Path) -> None:
    tokenizer(QWEN_SPECIAL).save(str(folder / "tokenizer.json"))
    settings = {"eos_token": "<|im_end|>", "chat_template": QWEN_TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "preprocessor_config.json").write_text(json.dumps(QWEN_PROCESSOR))


RULES = TiledImages(tile=TILE, longest=LONGEST, is_cut=True, tokens=TOKENS, token_id=tokenizer().token_to_id("<image>"))


QWEN_RULES = GriddedImages(
    side=2 * PATCH, fewest=4 * 64, most=24 * 64, token_id=tokenizer(QWEN_SPECIAL).token_to_id("<|image_pad|>")
)


def picture(seed: int, width: int = 40, height: int = 30, kind: str = "PNG") -> bytes:
    """An image file."""
    noise = random.Random(seed).randbytes(width * height * 3)
    file = io.BytesIO()
    Image.frombytes("RGB", (width, height), noise).save(file, kind)
    return file.getvalue()
