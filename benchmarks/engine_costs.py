"""What a model's tokens cost at best, from its checkpoint alone."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import torch
from safetensors import safe_open


class Costs(msgspec.Struct, frozen=True):
    """What a token needs, in elements of the checkpoint's matrices; each is read once a step."""

    layers: int
    head: int  # only for tokens that are sampled from
    element_bytes: int
    kv_bytes: int  # of one token, in all layers
    attention_flops: int  # for one pair of a query and a key, in all layers

    def prefill_flops(self, length: int) -> int:
        """What a prompt takes, with one token sampled after it."""
        return 2 * (self.layers * length + self.head) + self.attention_flops * length * (length + 1) // 2

    def decode_flops(self, batch: int, context: int) -> int:
        return batch * (2 * (self.layers + self.head) + self.attention_flops * context)

    def decode_bytes(self, batch: int, context: int) -> int:
        """All weights, and all the requests' KV, read once."""
        return (self.layers + self.head) * self.element_bytes + batch * context * self.kv_bytes


def read_costs(folder: Path, dtype: torch.dtype, kv_bytes: int) -> Costs:
    """From the checkpoint's own matrices. A mixture of experts reads fewer: there the limit is too high."""
    matrices: dict[str, tuple[int, ...]] = {}
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, framework="pt") as opened:
            for name in opened.keys():  # noqa: SIM118 - it is no mapping
                shape = tuple(opened.get_slice(name).get_shape())
                if len(shape) == 2:
                    matrices[name] = shape
    sizes = {name: shape[0] * shape[1] for name, shape in matrices.items()}
    embedding = sum(size for name, size in sizes.items() if "embed" in name)
    head = sizes.get("lm_head.weight", embedding)
    layers = sum(sizes.values()) - embedding - sizes.get("lm_head.weight", 0)
    config = json.loads((folder / "config.json").read_text())
    heads = config["num_attention_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    attention = 4 * config["num_hidden_layers"] * heads * head_dim
    return Costs(layers, head, dtype.itemsize, kv_bytes, attention)
