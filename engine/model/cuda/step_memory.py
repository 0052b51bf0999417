"""How much of a device's memory a step takes besides the KV cache."""

from __future__ import annotations

import torch
from transformers import PreTrainedModel

from tandem.engine.model.attention.layers import AttentionLayer
from tandem.engine.model.cuda import flashinfer
from tandem.engine.model.cuda.decode_graphs import memory_of_graphs, recorded_tokens
from tandem.engine.model.loaded import ForwardShape
from tandem.engine.model.transformers_forward import run_without_attention


def bytes_of_step(
    model: PreTrainedModel,
    layers: tuple[AttentionLayer, ...],
    vocab_size: int,
    device: torch.device,
    shape: ForwardShape,
    tokens: int,
) -> int:
    recorded = recorded_tokens(shape)
    # The sampler holds float32 logits, the restricted logits, and its noise.
    sampling = 3 * 4 * shape.max_requests * vocab_size
    step = peak_of_step(model, tokens, shape.max_requests, device)
    graphs = memory_of_graphs(recorded, vocab_size, model.dtype.itemsize)
    listed = flashinfer.bytes_of_pages(layers, recorded, shape.max_model_len, shape.block_size)
    return step + sampling + graphs + listed + flashinfer.WORKSPACE_BYTES


def peak_of_step(model: PreTrainedModel, tokens: int, rows: int, device: torch.device) -> int:
    """The peak of the device's memory, in bytes, during such a pass."""
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    run_without_attention(model, tokens, rows, device)
    torch.cuda.synchronize(device)
    peak = int(torch.cuda.max_memory_allocated(device)) - before
    # Memory that torch keeps for later must not look used when the cache's size is computed.
    torch.cuda.empty_cache()
    return peak
