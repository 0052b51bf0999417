"""What a model's tokens cost at best, computed from its checkpoint."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import msgspec
import torch
from safetensors import safe_open

from benchmarks.lib.machine import MachineLimits


class Costs(msgspec.Struct, frozen=True):
    """The costs of one token. `layers` and `head` count elements of the checkpoint's matrices; a step reads each of
    them once."""

    layers: int
    head: int  # needed only for tokens from which a next one is sampled
    element_bytes: int
    kv_bytes: int  # of one token in all layers
    attention_flops: int  # for one pair of a query and a key in all layers
    experts: int = 0  # elements of all experts' matrices, which are not among `layers`
    chosen: float = 0.0  # the share of the experts that a token chooses

    def prefill_flops(self, length: int) -> int:
        """The operations for a prompt and the one token that is sampled after it."""
        matrices = self.layers + int(self.chosen * self.experts)
        return 2 * (matrices * length + self.head) + self.attention_flops * length * (length + 1) // 2

    def decode_bytes(self, batch: int, context: int) -> int:
        """The bytes of all weights and of all requests' KV. Of experts those that some request chooses, if each chooses at random."""
        read = int(self.experts * (1 - (1 - self.chosen) ** batch))
        return (self.layers + self.head + read) * self.element_bytes + batch * context * self.kv_bytes

    def least_seconds(self, counts: Sequence[int], contexts: Sequence[int], limits: MachineLimits) -> float:
        """Returns what a step of requests takes at best that compute so many tokens each, and then have so many: its operations, or reading
        the weights and every request's keys and values once."""
        flops = read = 0
        for count, context in zip(counts, contexts, strict=True):
            # A chunk behind a prefix is the whole prompt without the prompt of the prefix.
            flops += self.prefill_flops(context) - self.prefill_flops(context - count) + 2 * self.head
            read += context * self.kv_bytes
        read += self.decode_bytes(sum(counts), 0)
        return max(flops / limits.gemm_flops, read / limits.read_bytes)


def read_costs(folder: Path, dtype: torch.dtype, kv_bytes: int) -> Costs:
    """Reads the checkpoint's own matrices. FP8's scales count among them."""
    matrices: dict[str, tuple[int, ...]] = {}
    narrow = False
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, framework="pt") as opened:
            for name in opened.keys():  # noqa: SIM118 - it is no mapping
                part = opened.get_slice(name)
                shape = tuple(part.get_shape())
                narrow |= str(part.get_dtype()).startswith("F8")
                if len(shape) == 2:
                    matrices[name] = shape
    sizes = {name: shape[0] * shape[1] for name, shape in matrices.items()}
    embedding = sum(size for name, size in sizes.items() if "embed" in name)
    head = sizes.get("lm_head.weight", embedding)
    experts = sum(size for name, size in sizes.items() if ".experts." in name)
    layers = sum(sizes.values()) - embedding - sizes.get("lm_head.weight", 0) - experts
    config = json.loads((folder / "config.json").read_text())
    heads = config["num_attention_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    attention = 4 * config["num_hidden_layers"] * heads * head_dim
    chosen = config.get("num_experts_per_tok", 0) / max(1, config.get("num_experts") or 1) if experts else 0.0
    return Costs(layers, head, 1 if narrow else dtype.itemsize, kv_bytes, attention, experts, chosen)
