"""Loads the head for drafts that a checkpoint itself has (multi-token prediction: DeepSeek-V3, GLM-4.5, Qwen3-Next and their like).

It reads what an EAGLE head reads, the model's last hidden states, each beside the token after it, and has a layer of the model's own
kind. transformers' `MtpModel` knows its weights' names. Of several such layers the first makes all drafts.
"""

from __future__ import annotations

import re
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.modeling_layers import MtpModel

from tandem.base.errors import ConfigurationError
from tandem.engine.model.attention.interface import PAGED
from tandem.engine.model.attention.layers import CachePlan, plan_cache
from tandem.engine.model.general import keep_rotary_constant
from tandem.engine.model.leftovers import num_layers
from tandem.engine.model.probe import probe_attention
from tandem.engine.model.source import ModelSource
from tandem.engine.model.speculation.eagle_loading import LoadedHead, NoEmbeddings, tensors_of
from tandem.engine.model.weight_formats import weight_format

_BESIDE = r"(^|\.)mtp\."


class _Layer(torch.nn.Module):
    """The head's layer, whose rows are an embedding and a hidden state side by side."""

    def __init__(self, layer: torch.nn.Module) -> None:
        super().__init__()
        self.mtp = layer

    def forward(self, hidden_states: torch.Tensor, *_: Any, **options: Any) -> torch.Tensor:
        found: torch.Tensor = self.mtp(*hidden_states.chunk(2, dim=-1), **options)
        return found


def load_layer(source: ModelSource, model: PreTrainedModel) -> MtpModel:
    """Loads the weights. `model` is the checkpoint's, not fused yet."""
    config: Any = model.config.get_text_config()
    last = num_layers(config)
    ours = re.compile(rf"\.layers\.{last}\.|{_BESIDE}")
    if weight_format(source, config) is not None or getattr(config, "quantization_config", None):
        raise _refusal(source, "has quantized matrices, and its head would have them, too")
    if not any(ours.search(name) for _, _, name in tensors_of(source)):
        raise _refusal(source, "has no such head in its checkpoint")
    # transformers lists the numbers of such layers in the models that it has seen. The head has a layer that attends to all tokens.
    model._keys_to_ignore_on_load_unexpected = [rf"\.layers\.{last}\.", _BESIDE]
    config.num_mtp_layers = 1
    if getattr(config, "layer_types", None) and not getattr(config, "mtp_layer_types", None):
        config.mtp_layer_types = ["full_attention"]
    try:
        found = MtpModel.from_pretrained(model, device_map={"": str(model.device)})
    except (RuntimeError, ValueError, TypeError, AttributeError) as error:
        raise _refusal(source, f"has a head that transformers does not load: {str(error)[:300]}") from error
    # Fusing may replace what the two share.
    found.embed_tokens = found.shared_head = found.rotary_emb = None
    return found


def made_head(source: ModelSource, mtp: MtpModel, model: PreTrainedModel, plan: CachePlan) -> LoadedHead:
    """`model` and `plan` are of the model that drafts are made for. The head has its embeddings, and chooses its tokens."""
    config, embed = mtp.config, model.get_input_embeddings()
    with torch.device("meta"):
        made: Any = type(model)._from_config(config, dtype=model.dtype, attn_implementation=PAGED)
    base = made.base_model
    base.layers[0] = _Layer(mtp.layers[0])
    base.embed_tokens = NoEmbeddings(2 * config.hidden_size, model.dtype, model.device)
    base.norm = getattr(mtp, "shared_post_norm", None) or torch.nn.Identity()
    made.lm_head = model.get_output_embeddings()
    base.rotary_emb = type(base.rotary_emb)(config).to(model.device)
    made.eval().requires_grad_(False)
    keep_rotary_constant(made)
    parts = probe_attention(made).parts

    def rows(token_ids: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        return torch.cat([embed(token_ids), hidden], dim=-1)

    return LoadedHead(source, made, rows, parts, plan_cache(parts.layers, plan.block_size))


def _refusal(source: ModelSource, why: str) -> ConfigurationError:
    return ConfigurationError(f"model.draft is mtp, and {source.name} {why}: leave model.draft empty")
