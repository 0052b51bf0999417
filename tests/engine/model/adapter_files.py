"""Writes LoRA adapters with random weights, by PEFT itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM, PreTrainedModel

from tests.engine.model import tiny


def loaded(path: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)


def save_adapter(model: Path, folder: Path, seed: int, **options: Any) -> Path:
    """Saves an adapter whose weights are large enough to change the answer."""
    wanted: dict[str, Any] = {"r": 4, "lora_alpha": 8, "target_modules": "all-linear", **options}
    adapted = get_peft_model(loaded(model), LoraConfig(task_type="CAUSAL_LM", **wanted))
    random = torch.Generator().manual_seed(seed)
    for name, weight in adapted.named_parameters():
        if "lora_" in name:
            weight.data = torch.randn(weight.shape, generator=random) * 0.15
    adapted.save_pretrained(folder)
    return folder


def merged_answers(
    model: Path, adapter: Path, prompts: list[list[int]], num_tokens: int, folder: Path
) -> list[list[int]]:
    """The answers of `generate` after PEFT has merged the adapter into the weights."""
    whole = PeftModel.from_pretrained(loaded(model), adapter).merge_and_unload()
    whole.save_pretrained(folder)
    return [answer.tokens for answer in tiny.reference(folder, prompts, num_tokens)]
