"""Writes checkpoints with a head of their own for drafts (multi-token prediction), and computes its guesses from a whole text."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM
from transformers.modeling_layers import MtpModel

from tests.engine.model import tiny

_LIKELY = 5  # a token that the models often sample, and their heads often guess
KINDS = ["deepseek-v3", "glm4-moe", "qwen3-next"]


def _config(kind: str) -> Any:
    if kind == "glm4-moe":
        routed = {name: value for name, value in tiny.LATENT.items() if "expert" in name or "group" in name}
        own = {"head_dim": 8, "moe_intermediate_size": 24, "first_k_dense_replace": 1}
        return transformers.Glm4MoeConfig(**tiny.COMMON | routed | own)
    config: Any = tiny.ALL[kind]()
    if kind == "qwen3-next":
        config.layer_types[-1] = "full_attention"  # as in all such models
    return config


def save(kind: str, folder: Path, *, right: bool = False) -> Path:
    """Saves a model whose checkpoint has a head. With `right` each token follows from the one before, and the head knows that."""
    config, beside = _config(kind), kind == "qwen3-next"
    count, spread = config.num_hidden_layers, 0.0 if right else 0.2
    config.num_hidden_layers = count + 1
    if beside:
        config.layer_types = [*config.layer_types, "full_attention"]
    torch.manual_seed(tiny.hash_of(kind))
    made: Any = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for name, weight in made.named_parameters():
            if "norm" in name:
                weight.add_(spread * torch.randn_like(weight))
            if right and any(part in name for part in ("o_proj", "out_proj", "down_proj")):
                weight.zero_()
        if not right:
            made.get_output_embeddings().weight[_LIKELY] *= 6
    path = folder / kind
    made.save_pretrained(path)
    # The last layer becomes the head's: it gets the names that its family gives it, and what only a head has.
    before = f"model.layers.{count}."
    prefix = "mtp.layers.0." if beside else before
    heads = ("mtp.fc", "mtp.norm", "mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden")
    if not beside:
        heads = tuple(before + name for name in ("eh_proj", "shared_head.norm", "enorm", "hnorm"))
    size, one = config.hidden_size, 0.0 if beside else 1.0
    embedding = torch.cat([torch.eye(size), torch.zeros(size, size)], dim=1)
    added = [embedding if right else 0.3 * torch.randn(size, 2 * size)]
    added += [one + spread * torch.randn(size) for _ in range(3)]
    weights = load_file(path / "model.safetensors")
    named = {name.replace(before, prefix): weight for name, weight in weights.items()}
    named |= {f"{name}.weight": weight for name, weight in zip(heads, added, strict=True)}
    if not beside:  # published checkpoints repeat these
        named[before + "embed_tokens.weight"] = weights["model.embed_tokens.weight"].clone()
        named[before + "shared_head.head.weight"] = weights["lm_head.weight"].clone()
    save_file(named, path / "model.safetensors", {"format": "pt"})
    described = json.loads((path / "config.json").read_text()) | {"num_hidden_layers": count}
    if beside:
        described["layer_types"] = described["layer_types"][:count]
    (path / "config.json").write_text(json.dumps(described))
    return path


class ReferenceHead:
    """transformers' own head, computed over the whole text at once."""

    def __init__(self, path: Path, kind: str) -> None:
        self._model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
        config = self._model.config
        if kind == "qwen3-next":
            config.num_mtp_layers, config.mtp_layer_types = 1, ["full_attention"]
        # transformers knows only the numbers of layers of the models that were published.
        self._model._keys_to_ignore_on_load_unexpected = [rf"\.layers\.{config.num_hidden_layers}\.", r"^mtp\."]
        self._head = MtpModel.from_pretrained(self._model).eval()

    def after(self, tokens: list[int], count: int) -> list[int]:
        with torch.inference_mode():
            hidden = self._model.base_model(torch.tensor([tokens[:-1]])).last_hidden_state
            known, found = list(tokens), []
            while len(found) < count:
                text = torch.tensor([known[1:]])
                numbers = torch.arange(text.shape[1])[None]
                out = self._head.forward_layer(0, hidden, numbers, None, input_ids=text)[:, -1:]
                found.append(int(self._model.lm_head(out).argmax()))
                known, hidden = [*known, found[-1]], torch.cat([hidden, out], dim=1)
            return found
