"""Tiny models that read images, with random weights, a tokenizer and an image processor, saved as checkpoints load."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from PIL import Image
from transformers import AutoModelForImageTextToText
from transformers.models.smolvlm.image_processing_pil_smolvlm import SmolVLMImageProcessorPil

from tandem.wire.images import MediaFeature, digest_of_image, media_features
from tests.pictures import PATCH, PROCESSOR, RULES, SCALE, TILE, TOKENS, save_words, tokenizer


def smolvlm(folder: Path, kind: str = "SmolVLM") -> Path:
    path = folder / kind.lower()
    words = tokenizer()
    image = words.token_to_id("<image>")
    text = {
        "model_type": "llama",
        "vocab_size": words.get_vocab_size(),
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        # Large enough that the two best tokens are never almost equal.
        "initializer_range": 0.3,
        "bos_token_id": words.token_to_id("<|im_start|>"),
        "eos_token_id": words.token_to_id("<end_of_utterance>"),
        "pad_token_id": words.token_to_id("<pad>"),
    }
    vision = {
        "hidden_size": 24,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "image_size": TILE,
        "patch_size": PATCH,
        "initializer_range": 0.3,
    }
    config = getattr(transformers, f"{kind}Config")(
        text_config=text,
        vision_config=vision,
        scale_factor=SCALE,
        image_token_id=image,
        pad_token_id=text["pad_token_id"],
    )
    torch.manual_seed(5)
    model = AutoModelForImageTextToText.from_config(config, attn_implementation="eager").eval()
    for name, parameter in model.named_parameters():
        if "vision_model" in name or "connector" in name:
            # An image must change what the model says by more than rounding.
            torch.nn.init.normal_(parameter, mean=0.0 if "bias" in name else 0.1, std=0.3)
    model.generation_config.eos_token_id = text["eos_token_id"]
    model.save_pretrained(path)
    save_words(path, kind)
    return path


def processor() -> Any:
    """transformers' own."""
    return SmolVLMImageProcessorPil(**PROCESSOR, return_row_col_info=True)


def prompt_of(parts: Sequence[str | bytes]) -> tuple[list[int], list[MediaFeature], list[bytes]]:
    """The tokens of a text with images in it, as transformers' processor writes them."""
    text, images, lengths = "", [], []
    for part in parts:
        if isinstance(part, str):
            text += part
            continue
        size = Image.open(io.BytesIO(part)).size
        rows, columns = RULES.grid(*size)
        around, run = "<fake_token_around_image>", "<image>" * TOKENS
        for row in range(rows):
            text += "".join(f"{around}<row_{row + 1}_col_{at + 1}>{run}" for at in range(columns)) + "\n"
        text += ("\n" if rows else "") + f"{around}<global-img>{run}{around}"
        images.append(part)
        lengths.append(RULES.parts(*size))
    token_ids = tokenizer().encode(text, add_special_tokens=False).ids
    media = media_features(token_ids, RULES.token_id, lengths, [digest_of_image(each) for each in images])
    assert media is not None
    return token_ids, media, images


def reference(path: Path, prompts: Sequence[Sequence[str | bytes]], num_tokens: int) -> list[list[int]]:
    """What transformers' `generate` says to each, alone."""
    model = AutoModelForImageTextToText.from_pretrained(
        path, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    answers = []
    for parts in prompts:
        token_ids, _, images = prompt_of(parts)
        inputs: dict[str, Any] = {"input_ids": torch.tensor([token_ids])}
        inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
        if images:
            opened = [Image.open(io.BytesIO(each)).convert("RGB") for each in images]
            made = processor()(images=[opened], return_tensors="pt")
            inputs |= {name: made[name] for name in ("pixel_values", "pixel_attention_mask")}
        out = model.generate(**inputs, max_new_tokens=num_tokens, min_new_tokens=num_tokens, do_sample=False)
        answers.append(out[0, len(token_ids) :].tolist())
    return answers
