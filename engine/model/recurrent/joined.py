"""See engine.model.states.StatesWing."""

from __future__ import annotations

import types
from typing import Any

import torch
import torch.nn.functional as F
from transformers import PreTrainedModel

from tandem.engine.model.recurrent.mixers import StateNotingCache

noting_cache = StateNotingCache

__all__ = ["noting_cache", "take_states_out"]


def take_states_out(model: PreTrainedModel) -> None:
    """Replaces the forward of such modules. Call it before probing, which checks that the states are kept correctly."""
    index = 0
    for module in model.modules():
        if type(module).__name__ == "RecurrentGemmaDecoderLayer":
            block = module.temporal_block
            if type(block).__name__ == "RecurrentGemmaRecurrentBlock":
                block.layer_idx = index
                block.forward = types.MethodType(_recurrent_gemma, block)
            index += 1


def _recurrent_gemma(
    block: Any,
    input_states: torch.Tensor,
    position_ids: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
    use_cache: bool = True,
    cache: Any = None,
    past_key_values: Any = None,  # the cache's name before transformers 5.24
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """RecurrentGemma's block: a convolution over the last tokens, then a gated linear recurrence."""
    layer, lru = block.layer_idx, block.rg_lru
    cache = past_key_values if cache is None else cache
    gate = block.act_fn(block.linear_y(input_states))
    x = block.linear_x(input_states).transpose(1, 2)  # [batch, width, rows]
    rows, before = x.shape[-1], block.conv1d_width - 1
    state = None
    if cache is not None:
        begun = cache.has_previous_state(layer)
        x = cache.update_conv_state(x, layer, conv_kernel_size=before)
        x = F.pad(x, (before, 0))[..., -(rows + before) :]
        convolved = F.conv1d(x, block.conv_1d.weight, block.conv_1d.bias, groups=x.shape[1])
        state = cache.get_recurrent_state(layer) if begun else None
    else:
        convolved = block.conv_1d(x)[..., :rows]
    out, state = _rg_lru(lru, convolved.transpose(1, 2), position_ids, state)
    if cache is not None:
        cache.update_recurrent_state(state, layer)
    return block.linear_out(out * gate), None


def _rg_lru(
    lru: Any, x: torch.Tensor, positions: torch.Tensor, state: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Computes h = a * h + b * x for each token, with a and b from its gates; the recurrence is in float32, as in transformers."""
    batch, rows, width = x.shape
    heads = x.reshape(batch * rows, lru.num_attention_heads, lru.block_width).transpose(0, 1)

    def gate(weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        product = torch.baddbmm(bias[:, None, :], heads, weight)
        return torch.sigmoid(product.transpose(0, 1).reshape(batch, rows, width))

    kept = -8.0 * gate(lru.recurrent_gate_weight, lru.recurrent_gate_bias) * F.softplus(lru.recurrent_param)
    first = positions[..., None] == 0
    share = torch.where(first, 1.0, (1 - torch.exp(2 * kept)).sqrt())
    new = (x * gate(lru.input_gate_weight, lru.input_gate_bias) * share.to(x.dtype)).float()
    decay = (torch.exp(kept) * ~first).float()
    state = new.new_zeros(batch, width) if state is None else state
    out = torch.empty_like(x)
    for row in range(rows):
        state = decay[:, row] * state + new[:, row]
        out[:, row] = state.to(x.dtype)
    return out, state
