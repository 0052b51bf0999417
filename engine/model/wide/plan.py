"""Decides whether a model can be cut into a number of parts. Transformers' plan in the model's configuration names a style of cutting
for each kind of layer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

from tandem.base.errors import ConfigurationError
from tandem.engine.model.compressed import EXPANDS
from tandem.engine.model.shard import fits

# Every rank has the whole layer.
WHOLE = {"replicate", "replicated_with_grad_allreduce", "mla_kv_a_proj"}
OUTPUTS = {"colwise"}  # each rank computes some of the outputs, and the next layer needs no others
GATHERED = {"colwise_gather_output", "colwise_rep"}  # the same, and every rank gets all outputs
INPUTS = {"rowwise", "moe_tp_experts"}  # each rank has some of the inputs, and the results are summed
SPLIT = {"rowwise_split_input", "rowwise_rep"}  # the same, but each rank gets all inputs
VOCABULARY = {"embedding_rowwise"}  # each rank has the embeddings of some tokens
PACKED = {"packed_colwise", "packed_rowwise"}  # for parameters only: two matrices in one, each is cut
EXPERTS = {"grouped_gemm"}  # for parameters only: each rank has some whole experts
KNOWN = WHOLE | OUTPUTS | GATHERED | INPUTS | SPLIT | VOCABULARY | PACKED | EXPERTS

KEYS_AND_VALUES = ("k_proj", "v_proj")
# Types of models with latents whose plan in transformers leaves attention whole. The paths of the layers that have a part for each head.
_WHOLE_LATENTS = ("deepseek_v3", "axk1", "youtu")
_ATTENTION = "layers.*.self_attn."
_SETTING = "pools.<pool>.tensor_parallel"


def overrides(name: str, config: Any, size: int) -> dict[str, str]:
    """Changes to the model's own plan. Raises a ConfigurationError for a model that cannot be cut into `size` parts."""
    text = config.get_text_config()
    own: dict[str, str] = dict(getattr(text, "base_model_tp_plan", None) or {})
    heads_of_latents = _of_latents(text, own)
    plan = own | heads_of_latents
    if not (INPUTS | SPLIT) & set(plan.values()):
        raise ConfigurationError(
            f"{name} cannot be served on {size} ranks: transformers has no plan that cuts a model of type {text.model_type}. "
            f"Set {_SETTING} to 1"
        )
    unknown = sorted(set(plan.values()) - KNOWN)
    if unknown:
        raise ConfigurationError(
            f"{name} cannot be served on {size} ranks: transformers' plan for a model of type {text.model_type} cuts layers in a "
            f"way that Tandem does not know ({', '.join(unknown)}). Set {_SETTING} to 1"
        )
    prefix = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)].base_model_prefix
    changed = heads_of_latents | _of_experts(text, plan, size)
    rules = {f"{prefix}.{key}": style for key, style in changed.items()}
    latents = any(key.endswith(EXPANDS) and style in OUTPUTS for key, style in plan.items())
    cut = [key for key, style in plan.items() if key.endswith(KEYS_AND_VALUES) and style in OUTPUTS]
    if not cut and not latents:
        return rules
    heads = int(text.num_attention_heads)
    kv_heads = heads if latents else int(getattr(text, "num_key_value_heads", None) or heads)
    if not fits(heads, kv_heads, size):
        fitting = [str(width) for width in range(1, heads + 1) if fits(heads, kv_heads, width)]
        raise ConfigurationError(
            f"{name} cannot be served on {size} ranks: its {heads} heads of queries and {kv_heads} of keys and values cannot be "
            f"shared equally. Set {_SETTING} to one of {', '.join(fitting)}"
        )
    if kv_heads < size:
        rules |= {f"{prefix}.{key}": "replicate" for key in cut}
    return rules


def _of_latents(text: Any, plan: Mapping[str, str]) -> dict[str, str]:
    """Each rank gets some heads of a model with latents that transformers' plan does not cut."""
    if text.model_type not in _WHOLE_LATENTS or any(key.startswith(_ATTENTION) for key in plan):
        return {}
    queries = "q_proj" if getattr(text, "q_lora_rank", None) is None else "q_b_proj"
    cut = {queries: "colwise", EXPANDS: "colwise", "o_proj": "rowwise"}
    return {f"{_ATTENTION}{name}": style for name, style in cut.items()}


def _of_experts(text: Any, plan: Mapping[str, str], size: int) -> dict[str, str]:
    """Each rank gets some whole experts if the model has a plan for that and they can be shared equally; otherwise a part of each."""
    experts = dict(getattr(text, "base_model_ep_plan", None) or {})
    kept = {key: style for key, style in experts.items() if style in EXPERTS}
    others = set(experts.values()) - EXPERTS
    modules = [key for key in experts if key not in kept]
    count = getattr(text, "num_experts", None) or getattr(text, "num_local_experts", None)
    is_known = others == {"ep_dispatch_experts"} and all(plan.get(key) == "moe_tp_experts" for key in modules)
    return kept if is_known and isinstance(count, int) and count % size == 0 else {}
