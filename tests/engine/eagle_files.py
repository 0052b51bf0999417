"""An EAGLE head with random weights, as its checkpoints are written, and what it says of a text that it has seen from its first token on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

_LIKELY = 5  # a token that a model with such a head often says, and the head often guesses


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


class ReferenceHead:
    """All at once, with transformers' own layer."""

    def __init__(self, model: Path, head: Path) -> None:
        from safetensors.torch import load_file

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
