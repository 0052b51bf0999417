"""Writes checkpoints of tiny vision models, with random weights, a tokenizer and an image processor."""

from __future__ import annotations

import dataclasses
import functools
import io
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import tokenizers
import torch
import transformers
from PIL import Image
from transformers import AutoModelForImageTextToText
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.models.smolvlm.image_processing_pil_smolvlm import SmolVLMImageProcessorPil

from tandem.wire.images import ImageRules, MediaFeature, digest_of_image, media_features
from tests.pictures import (
    PATCH,
    PROCESSOR,
    QWEN_PROCESSOR,
    QWEN_RULES,
    QWEN_SPECIAL,
    RULES,
    SCALE,
    TILE,
    save_qwens_words,
    save_words,
    tokenizer,
)


def smolvlm(folder: Path, kind: str = "SmolVLM") -> Path:
    path = folder / kind.lower()
    words = tokenizer()
    image = words.token_to_id("<image>")
    text = {
        "model_type": "llama", "vocab_size": words.get_vocab_size(), "hidden_size": 32, "intermediate_size": 48,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512,
        # Large enough that the two best tokens are never almost equal.
        "initializer_range": 0.3, "bos_token_id": words.token_to_id("<|im_start|>"),
        "eos_token_id": words.token_to_id("<end_of_utterance>"), "pad_token_id": words.token_to_id("<pad>"),
    }  # fmt: skip
    vision = {
        "hidden_size": 24, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
        "image_size": TILE, "patch_size": PATCH, "initializer_range": 0.3,
    }  # fmt: skip
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
            # An image must change the logits by more than rounding.
            torch.nn.init.normal_(parameter, mean=0.0 if "bias" in name else 0.1, std=0.3)
    model.generation_config.eos_token_id = text["eos_token_id"]
    model.save_pretrained(path)
    save_words(path, kind)
    return path


def qwen(folder: Path, kind: str = "Qwen2_5_VL") -> Path:
    path = folder / kind.lower()
    words = tokenizer(QWEN_SPECIAL)
    ids = {name: words.token_to_id(f"<|{name}|>") for name in ("im_end", "vision_start", "vision_end", "video_pad")}
    text: dict[str, Any] = {
        "vocab_size": words.get_vocab_size(), "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3,
        "num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 512, "initializer_range": 0.3,
        "rope_parameters": {"rope_type": "default", "rope_theta": 100.0, "mrope_section": [2, 3, 3]},
        "bos_token_id": words.token_to_id("<|im_start|>"), "eos_token_id": ids["im_end"],
        "pad_token_id": words.token_to_id("<pad>"),
    }  # fmt: skip
    vision: dict[str, Any] = {"depth": 2, "num_heads": 2, "patch_size": PATCH, "spatial_merge_size": 2}
    if kind == "Qwen2VL":
        vision |= {"embed_dim": 24, "hidden_size": 32, "mlp_ratio": 2}
    elif kind.startswith("Qwen3VL"):
        # Rows for the first two layers of the language model; a grid of positions that is stretched over an image's.
        vision |= {"hidden_size": 24, "out_hidden_size": 32, "intermediate_size": 40}
        vision |= {"num_position_embeddings": 36, "deepstack_visual_indexes": [0, 1]}
        text |= {"head_dim": 16}
        if kind == "Qwen3VLMoe":
            text |= {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
    else:
        vision |= {"hidden_size": 24, "out_hidden_size": 32, "intermediate_size": 40, "window_size": 16}
        vision["fullatt_block_indexes"] = [1]
    config = getattr(transformers, f"{kind}Config")(
        text_config=text,
        vision_config=vision,
        image_token_id=QWEN_RULES.token_id,
        video_token_id=ids["video_pad"],
        vision_start_token_id=ids["vision_start"],
        vision_end_token_id=ids["vision_end"],
    )
    torch.manual_seed(7)
    model = AutoModelForImageTextToText.from_config(config, attn_implementation="eager").eval()
    for name, parameter in model.named_parameters():
        if "visual" in name and "norm" not in name and "ln_q" not in name:
            torch.nn.init.normal_(parameter, std=0.5)
    model.generation_config.eos_token_id = text["eos_token_id"]
    model.save_pretrained(path)
    save_qwens_words(path)
    return path


@dataclasses.dataclass(frozen=True)
class VisionFamily:
    rules: ImageRules
    words: tokenizers.Tokenizer
    placeholder: str
    begin: str  # the text that a chat template writes before an image
    end: str
    processor: Any  # transformers' own
    save: Callable[[Path], Path]


SMOLVLM = VisionFamily(
    RULES, tokenizer(), "<image>", "", "", SmolVLMImageProcessorPil(**PROCESSOR, return_row_col_info=True), smolvlm
)
IDEFICS3 = dataclasses.replace(SMOLVLM, save=functools.partial(smolvlm, kind="Idefics3"))
QWEN2_5_VL = VisionFamily(
    QWEN_RULES, tokenizer(QWEN_SPECIAL), "<|image_pad|>", "<|vision_start|>", "<|vision_end|>",
    Qwen2VLImageProcessorPil(**QWEN_PROCESSOR), qwen
)  # fmt: skip
QWEN2_VL = dataclasses.replace(QWEN2_5_VL, save=functools.partial(qwen, kind="Qwen2VL"))
QWEN3_VL = dataclasses.replace(QWEN2_5_VL, save=functools.partial(qwen, kind="Qwen3VL"))
QWEN3_VL_MOE = dataclasses.replace(QWEN2_5_VL, save=functools.partial(qwen, kind="Qwen3VLMoe"))


def prompt_of(
    parts: Sequence[str | bytes], family: VisionFamily = SMOLVLM
) -> tuple[list[int], list[MediaFeature], list[bytes]]:
    """The tokens of a text with images in it."""
    text, images, places = "", [], []
    for part in parts:
        if isinstance(part, str):
            text += part
            continue
        size = Image.open(io.BytesIO(part)).size
        text += family.begin + family.rules.written(family.placeholder, *size) + family.end
        images.append(part)
        places.append(family.rules.parts(*size))
    token_ids = family.words.encode(text, add_special_tokens=False).ids
    digests = [digest_of_image(each) for each in images]
    media = media_features(token_ids, family.rules.token_id, places, digests)
    assert media is not None
    return token_ids, media, images


def reference(
    path: Path, prompts: Sequence[Sequence[str | bytes]], num_tokens: int, family: VisionFamily = SMOLVLM
) -> list[list[int]]:
    """The answer of transformers' `generate` to each prompt alone. No token ends an answer."""
    model = AutoModelForImageTextToText.from_pretrained(path, dtype=torch.float32, attn_implementation="eager").eval()
    model.generation_config.eos_token_id = None
    answers = []
    for parts in prompts:
        token_ids, _, images = prompt_of(parts, family)
        ids = torch.tensor([token_ids])
        inputs: dict[str, Any] = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        if images:
            opened = [Image.open(io.BytesIO(each)).convert("RGB") for each in images]
            made = family.processor(images=[opened], return_tensors="pt")
            inputs |= {name: value for name, value in made.items() if name not in ("rows", "cols")}
            if "image_grid_thw" in made:
                inputs["mm_token_type_ids"] = (ids == family.rules.token_id).int()
        out = model.generate(**inputs, max_new_tokens=num_tokens, do_sample=False)
        answers.append(out[0, len(token_ids) :].tolist())
    return answers
