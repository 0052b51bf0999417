"""Loads `model.draft`: a draft model or an EAGLE head. Raises a ConfigurationError that says why it cannot make drafts for the model."""

from __future__ import annotations

import dataclasses
import json
from typing import TYPE_CHECKING, Any

import torch

from tandem.base.errors import ConfigurationError
from tandem.engine.cache.group_manager import KVCacheGroup
from tandem.engine.config import ModelConfig, SchedulerConfig
from tandem.engine.model.attention.layers import CachePlan, plan_cache
from tandem.engine.model.capabilities import ModelLoad
from tandem.engine.model.checkpoint import choose_dtype, read_config
from tandem.engine.model.context import context_length
from tandem.engine.model.loaded import ForwardShape, LoadedModel
from tandem.engine.model.memory import allocate_cache
from tandem.engine.model.paths import load_general, load_native
from tandem.engine.model.source import ModelSource, find_source, tokenizer_json
from tandem.engine.model.speculation.draft_model import DraftModel
from tandem.engine.model.wings import capabilities_for

if TYPE_CHECKING:
    from tandem.engine.model.observed import ObservedLayers
    from tandem.engine.model.speculation.eagle_loading import LoadedHead

# Heads of these types read the model's own hidden states, and are no models by themselves.
_HEADS = ("eagle", "medusa", "mtp", "mlpspeculator", "nextn")


@dataclasses.dataclass(frozen=True)
class LoadedDraftModel:
    """A draft model whose weights are loaded and which has no KV cache yet."""

    source: ModelSource
    loaded: LoadedModel
    plan: CachePlan
    max_model_len: int

    @property
    def bytes_per_block(self) -> int:
        return self.plan.elements_per_block * self.loaded.dtype.itemsize

    def beside_cache(self, shape: ForwardShape, tokens: int) -> int:
        return self.loaded.beside_cache(shape, tokens) if self.loaded.beside_cache is not None else 0

    def with_cache(
        self,
        num_blocks: int,
        groups: tuple[KVCacheGroup, ...],
        vocab_size: int,
        device: torch.device,
        shape: ForwardShape,
    ) -> DraftModel:
        kv_cache = allocate_cache(self.plan, num_blocks, self.loaded.dtype, device)
        shape = ForwardShape(shape.max_requests, min(shape.max_model_len, self.max_model_len))
        return DraftModel(
            self.loaded.use_cache(kv_cache, self.plan, shape),
            num_blocks,
            device,
            table=next(index for index, group in enumerate(groups) if group.keeps_every_token),
            block_size=self.plan.block_size,
            max_model_len=shape.max_model_len,
            draft_vocab=self.loaded.vocab_size,
            vocab_size=vocab_size,
        )


def check_plan(target: ModelSource, plan: CachePlan) -> None:
    """Raises a ConfigurationError if the KV of a draft model or head has no blocks to lie beside."""
    if not any(group.keeps_every_token for group in plan.groups):
        raise ConfigurationError(
            f"model.draft cannot guess for {target.name}: none of its layers keeps every token, and the draft model's keys and "
            "values lie where such a layer's do. Leave model.draft empty"
        )


def load_draft_model(
    loading: ModelLoad, plan: CachePlan, guessed: LoadedModel, observed: ObservedLayers | None
) -> LoadedDraftModel | LoadedHead:
    """All arguments belong to the model that drafts are made for. Raises a ConfigurationError."""
    target, source = loading.source, find_source(loading.model.draft)
    from tandem.engine.model.speculation.eagle_loading import is_head, load_head  # they need transformers

    if is_head(source):
        return load_head(
            source, target, plan, guessed.vocab_size, guessed.vector_size, guessed.dtype, loading.device, observed
        )
    config = read_config(source)
    for name in source.read_json("config.json").get("architectures") or ():
        if any(part in name.lower() for part in _HEADS):
            raise ConfigurationError(
                f"model.draft names {source.name}, whose class is {name}: of heads that read another model's hidden states "
                "EAGLE's are served, whose files have fc.weight. Name one, or a small model with the same tokenizer"
            )
    check_vocabularies(target, source)
    # Loaded with what its own files need, and nothing of what is asked of the other model.
    own = dataclasses.replace(
        loading,
        model=ModelConfig(pooling="none"),
        scheduler=SchedulerConfig(),
        source=source,
        config=config,
        dtype=choose_dtype(loading.model.dtype, source, config),
        progress=lambda what, share: loading.progress(f"draft model: {what}", share),
        shard=None,
    )
    # Loading a model sets the number of torch's threads for it. The two models together need the larger number.
    threads_before = torch.get_num_threads()
    torch.set_num_threads(loading.threads)
    found = load_native(own) if loading.native else ""
    loaded = load_general(own, capabilities_for(own)) if isinstance(found, str) else found
    torch.set_num_threads(max(threads_before, torch.get_num_threads()))
    if loaded.states is not None or any(layer.window is not None for layer in loaded.layers):
        raise ConfigurationError(
            f"model.draft names {source.name}, not all of whose layers attend to every token: name another model"
        )
    if not (source.folder / "tokenizer.json").is_file() and loaded.vocab_size != guessed.vocab_size:
        raise ConfigurationError(
            f"model.draft names {source.name}, which has {loaded.vocab_size} tokens, and {target.name} has {guessed.vocab_size}: a draft "
            "model needs the same tokenizer"
        )
    own_plan = plan_cache(loaded.layers, plan.block_size)
    return LoadedDraftModel(source, loaded, own_plan, context_length(config, None))


def check_vocabularies(target: ModelSource, draft: ModelSource) -> None:
    """Raises a ConfigurationError if a token id means different tokens in the two models. One may have more special tokens than the
    other."""
    files = [source.folder / "tokenizer.json" for source in (target, draft)]
    found = [file.is_file() or source.gguf_file for file, source in zip(files, (target, draft), strict=True)]
    if not any(found):
        return  # nothing to compare; a different number of tokens is refused elsewhere
    if all(file.is_file() for file in files) and files[0].read_bytes() == files[1].read_bytes():
        return
    (ours, our_words), (theirs, their_words) = _tokens_of(target), _tokens_of(draft)
    for number in sorted(ours.keys() & theirs.keys()):
        if ours[number] != theirs[number]:
            raise ConfigurationError(
                f"model.draft names {draft.name}, whose token {number} is {theirs[number]!r}, and {target.name} has {ours[number]!r} "
                "there: a draft model needs the same tokenizer"
            )
    if our_words != their_words:
        raise ConfigurationError(
            f"model.draft names {draft.name}, which has {their_words} tokens, and {target.name} has {our_words}: a draft model needs "
            "the same tokenizer"
        )


def _tokens_of(source: ModelSource) -> tuple[dict[int, str], int]:
    """The tokens by id, and how many of them are not special."""
    document: dict[str, Any] = json.loads(tokenizer_json(source))
    vocab = document.get("model", {}).get("vocab", {})
    if isinstance(vocab, dict):
        tokens = {int(number): str(token) for token, number in vocab.items()}
    else:  # pieces with their scores, in order
        tokens = {number: str(piece[0]) for number, piece in enumerate(vocab)}
    num_words = len(tokens)
    tokens |= {int(each["id"]): str(each["content"]) for each in document.get("added_tokens", ())}
    return tokens, num_words
