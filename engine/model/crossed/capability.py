"""A model with an encoder and a decoder."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import msgspec
import torch

from tandem.base.errors import ConfigurationError
from tandem.engine.model.capabilities import Capability, ModelLoad
from tandem.engine.model.loaded import ForwardShape, LoadedModel
from tandem.engine.model.runner import EncoderRules, Forward, ModelInfo

if TYPE_CHECKING:
    from tandem.engine.model.attention.layers import CachePlan
    from tandem.engine.model.crossed.forward import CrossedModel
    from tandem.engine.model.parts import RunnerPart

# Each is compared with transformers' own answers by tests/engine/model/test_crossed.py.
TYPES = ("bart", "blenderbot", "blenderbot-small", "marian", "mbart", "mt5", "pegasus", "plbart", "t5", "umt5")


def capability(loading: ModelLoad) -> Capability | None:
    config = loading.config
    if not getattr(config, "is_encoder_decoder", False):
        return None
    if config.model_type not in TYPES:
        raise ConfigurationError(
            f"a model of type {config.model_type} cannot be served: of the models with an encoder and a decoder, Tandem knows "
            f"{', '.join(TYPES)}"
        )
    scheduler, model = loading.scheduler, loading.model
    refused = {
        "pools.<pool>.tensor_parallel, pipeline_parallel or context_parallel": loading.shard is not None,
        "scheduler.max_loras": bool(scheduler.max_loras),
        "model.hidden_states_folder": bool(model.hidden_states_folder),
        "model.draft": bool(model.draft and scheduler.num_speculative_tokens),
        "model.pooling": model.pooling not in ("auto", "none"),
        "cache.dtype": loading.cache.dtype != "auto",
    }
    for setting in (name for name, is_set in refused.items() if is_set):
        raise ConfigurationError(
            f"{loading.source.name} has an encoder, and is not served with {setting}: leave it out"
        )
    if loading.device.type != "cpu":
        raise ConfigurationError(
            f"{loading.source.name} has an encoder, whose memory on a device is not known beforehand, and is served on CPUs only: set "
            "model.device to cpu"
        )
    return EncoderDecoder(loading)


class EncoderDecoder(Capability):
    general = "it has an encoder"

    def __init__(self, loading: ModelLoad) -> None:
        self._loading = loading
        self._found: CrossedModel | None = None

    def load(self) -> LoadedModel:
        from transformers import AutoModelForSeq2SeqLM

        from tandem.engine.model.crossed.finding import find
        from tandem.engine.model.crossed.forward import CrossedForward
        from tandem.engine.model.general import load_model

        loading = self._loading
        model = load_model(
            loading.source,
            loading.config,
            loading.dtype,
            loading.device,
            loading.progress,
            loader=AutoModelForSeq2SeqLM,
        )
        loading.progress("checking the model's attention", 0.0)
        generation: Any = model.generation_config
        start = generation.decoder_start_token_id
        start = model.config.decoder_start_token_id if start is None else start
        if not isinstance(start, int):
            raise ConfigurationError(
                f"{loading.source.name} cannot be served: its configuration names no decoder_start_token_id"
            )
        forced = generation.forced_bos_token_id
        words = generation.bad_words_ids or ()
        found = self._found = find(
            model,
            opening=(start,) if forced is None else (start, int(forced)),
            never=tuple(word[0] for word in words if len(word) == 1),
        )

        def use_cache(kv_cache: torch.Tensor, plan: CachePlan, shape: ForwardShape) -> Forward:
            return CrossedForward(found, kv_cache, plan)

        head: Any = model.get_output_embeddings()
        return LoadedModel(found.layers, int(head.out_features), model.dtype, use_cache)

    def start(self, num_blocks: int, shape: ForwardShape) -> Sequence[RunnerPart]:
        from tandem.engine.model.crossed.encoding import EncodedPrompts

        return (EncodedPrompts(self._found),) if self._found is not None else ()

    def complete(self, info: ModelInfo) -> ModelInfo:
        if self._found is None:
            return info
        opening, most = self._found.opening, self._found.positions or info.max_model_len
        rules = EncoderRules(opening, longest_prompt=most, longest_answer=most - len(opening))
        return msgspec.structs.replace(info, encoder=rules)
