"""Writes checkpoints of EAGLE heads with random weights, and computes their guesses from a whole text, as a reference."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

LAYERS_READ = [0, 1, 1]  # of a model of two
_LIKELY = 5  # a token that the biased models often sample, and their heads often guess


def likely_words(model: Path, folder: Path) -> Path:
    """A copy whose head is biased, so that some guesses of a head with random weights are right."""
    made: Any = AutoModelForCausalLM.from_pretrained(model)
    with torch.no_grad():
        made.get_input_embeddings().weight[_LIKELY] *= 4
    path = folder / "likely"
    made.save_pretrained(path)
    return path


def save_head(model: Path, folder: Path, **changes: Any) -> Path:
    config = json.loads((model / "config.json").read_text())
    config |= {"num_hidden_layers": 1, "architectures": ["EagleLlamaForCausalLM"]} | changes
    torch.manual_seed(3)
    layer = LlamaForCausalLM(LlamaConfig.from_dict(config)).model.layers[0]
    weights = {f"layers.0.{name}": value.detach() for name, value in layer.state_dict().items()}
    del weights["layers.0.input_layernorm.weight"]
    size = config["hidden_size"]
    weights |= {"fc.weight": 0.3 * torch.randn(size, 2 * size), "fc.bias": 0.3 * torch.randn(size)}
    path = folder / "head"
    path.mkdir(parents=True)
    save_file(weights, path / "model.safetensors")
    (path / "config.json").write_text(json.dumps(config))
    return path


def save_third_head(model: Path, folder: Path, **changes: Any) -> Path:
    """Saves an EAGLE-3 head whose vocabulary is half of the model's."""
    config = json.loads((model / "config.json").read_text())
    size, words = config["hidden_size"], config["vocab_size"] // 2
    config |= {"num_hidden_layers": 1, "architectures": ["Eagle3LlamaForCausalLM"], "draft_vocab_size": words}
    config |= {"eagle_aux_hidden_state_layer_ids": LAYERS_READ} | changes
    torch.manual_seed(4)
    layer = LlamaForCausalLM(LlamaConfig.from_dict(config)).model.layers[0]
    weights = {f"midlayer.{name}": value.detach() for name, value in layer.state_dict().items()}
    for name in ("q_proj", "k_proj", "v_proj"):
        full = f"midlayer.self_attn.{name}.weight"
        weights[full] = 0.3 * torch.randn(weights[full].shape[0], 2 * size)
    for name in ("input_layernorm", "post_attention_layernorm", "hidden_norm"):
        weights[f"midlayer.{name}.weight"] = 1 + 0.2 * torch.randn(size)
    known = torch.arange(1, 2 * words, 2)  # among them the likely one
    weights |= {
        "fc.weight": 0.3 * torch.randn(size, 3 * size),
        "norm.weight": 1 + 0.2 * torch.randn(size),
        "lm_head.weight": 0.3 * torch.randn(words, size),
        "d2t": known - torch.arange(words),
        "t2d": torch.isin(torch.arange(config["vocab_size"]), known),
    }
    weights["lm_head.weight"][int((known == _LIKELY).nonzero()[0])] *= 4
    path = folder / "third"
    path.mkdir(parents=True)
    save_file(weights, path / "model.safetensors")
    (path / "config.json").write_text(json.dumps(config))
    return path


class ReferenceThirdHead:
    """EAGLE-3 computed over the whole text at once."""

    def __init__(self, model: Path, head: Path) -> None:
        self._model: Any = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
        self._config = LlamaConfig.from_dict(json.loads((head / "config.json").read_text()))
        self._rotary = LlamaRotaryEmbedding(self._config)
        self._weights = load_file(head / "model.safetensors")

    def after(self, tokens: list[int], count: int, begin: int = 0) -> list[int]:
        """`begin`: the first token that it knows."""
        with torch.inference_mode():
            embed = self._model.get_input_embeddings()
            # The first hidden state is the embeddings, so number i is the input of layer i.
            inputs = self._model(torch.tensor([tokens[:-1]]), output_hidden_states=True).hidden_states
            three = torch.cat([inputs[layer][0, begin:] for layer in LAYERS_READ], dim=-1)
            hidden = three @ self._weights["fc.weight"].T
            embeddings = embed(torch.tensor(tokens[begin + 1 :]))
            found: list[int] = []
            while True:
                out = self._layer(embeddings, hidden)[-1:]
                own = int((self._norm(out, "norm") @ self._weights["lm_head.weight"].T).argmax())
                found.append(own + int(self._weights["d2t"][own]))
                if len(found) == count:
                    return found
                embeddings = torch.cat([embeddings, embed(torch.tensor(found[-1:]))])
                hidden = torch.cat([hidden, out])

    def _norm(self, rows: torch.Tensor, name: str) -> torch.Tensor:
        scale = (rows.pow(2).mean(-1, keepdim=True) + self._config.rms_norm_eps).rsqrt()
        return rows * scale * self._weights[f"{name}.weight"]

    def _layer(self, embeddings: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        weights, config, count = self._weights, self._config, hidden.shape[0]
        both = torch.cat(
            [self._norm(embeddings, "midlayer.input_layernorm"), self._norm(hidden, "midlayer.hidden_norm")], -1
        )

        def heads(name: str, number: int) -> torch.Tensor:
            rows = both @ weights[f"midlayer.self_attn.{name}.weight"].T
            return rows.view(1, count, number, -1).transpose(1, 2)

        query, key = heads("q_proj", config.num_attention_heads), heads("k_proj", config.num_key_value_heads)
        query, key = apply_rotary_pos_emb(query, key, *self._rotary(both, torch.arange(count)[None]))
        value = heads("v_proj", config.num_key_value_heads)
        attended = torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        attended = attended.transpose(1, 2).reshape(count, -1)
        hidden = hidden + attended @ weights["midlayer.self_attn.o_proj.weight"].T
        rows = self._norm(hidden, "midlayer.post_attention_layernorm")
        gate, up, down = (weights[f"midlayer.mlp.{name}_proj.weight"].T for name in ("gate", "up", "down"))
        return hidden + (torch.nn.functional.silu(rows @ gate) * (rows @ up)) @ down


class ReferenceHead:
    """EAGLE-1 computed over the whole text at once, with transformers' own layer."""

    def __init__(self, model: Path, head: Path) -> None:
        self._model: Any = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
        weights = load_file(head / "model.safetensors")
        self._fc = weights.pop("fc.weight"), weights.pop("fc.bias")
        made: Any = LlamaForCausalLM(LlamaConfig.from_dict(json.loads((head / "config.json").read_text())))
        made.model.load_state_dict(weights, strict=False)
        made.model.layers[0].input_layernorm = torch.nn.Identity()
        made.model.norm = torch.nn.Identity()
        self._layer = made.model.eval()

    def after(self, tokens: list[int], count: int, begin: int = 0) -> list[int]:
        """`begin`: the first token that it knows."""
        with torch.inference_mode():
            embed = self._model.get_input_embeddings()
            hidden = self._model.model(torch.tensor([tokens[:-1]])).last_hidden_state[0, begin:]
            rows = self._rows(embed(torch.tensor(tokens[begin + 1 :])), hidden)
            found: list[int] = []
            while True:
                out = self._layer(inputs_embeds=rows[None]).last_hidden_state[0, -1:]
                found.append(int(self._model.lm_head(out).argmax()))
                if len(found) == count:
                    return found
                rows = torch.cat([rows, self._rows(embed(torch.tensor(found[-1:])), out)])

    def _rows(self, embeddings: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.linear(torch.cat([embeddings, hidden], dim=-1), *self._fc)
