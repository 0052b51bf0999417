"""The general path's model: loaded by transformers, its attention replaced by ours, and probed."""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.utils import logging as transformers_logging

from tandem.engine.model.attention.interface import PAGED
from tandem.engine.model.checkpoint import translated_errors
from tandem.engine.model.content import weight_files
from tandem.engine.model.leftovers import refuse_leftovers
from tandem.engine.model.quantized.formats import read_checkpoint
from tandem.engine.model.recurrent.own_states import take_states_out
from tandem.engine.model.source import ModelSource, Progress
from tandem.engine.model.vision.tower import loader_of
from tandem.wire.errors import ConfigurationError

if TYPE_CHECKING:
    from tandem.engine.model.wide.shard import Shard


def load_model(
    source: ModelSource,
    config: Any,
    dtype: torch.dtype,
    device: torch.device,
    progress: Progress,
    *,
    may_lack_head: bool = False,
    shard: Shard | None = None,
    tower_class: type[PreTrainedModel] | None = None,
) -> PreTrainedModel:
    """Weights are mapped from their files and copied once, file by file, straight into place. With `may_lack_head` the weights by
    which a model chooses tokens may be missing: `holds_head`. With a `shard` only its part is loaded. With a `tower_class`
    it is that class's: the vision tower alone."""
    options: dict[str, Any] = {"use_safetensors": True}
    if source.gguf_file is not None:
        # Imported here because most models need nothing of it.
        from tandem.engine.model.gguf import finish_loading, loading_options

        options = loading_options(source, config)
    quantized = read_checkpoint(source.name, source.folder, config) if source.gguf_file is None else None
    if quantized is not None:
        from tandem.engine.model.quantized import loading

        options |= loading.loading_options(config, quantized)
    part: AbstractContextManager[dict[str, Any]] = nullcontext({})
    if shard is not None:
        from tandem.engine.model.wide import cut, stages

        _refuse_to_cut(source, config, quantized is not None)
        whole_layers = shard.width == 1
        part = cut.loading_stage() if whole_layers else cut.loading_part(source, shard.of_stage(), device)
    loader: Any = tower_class or loader_of(config) or AutoModelForCausalLM
    if shard is not None and shard.stages > 1:
        loader, options["config"] = stages.class_of_stage(source, shard)
    load = functools.partial(
        loader.from_pretrained,
        source.folder,
        dtype=dtype,
        # Where a layer is cut, transformers places its parts by itself.
        device_map={"": str(device)}
        if device.type != "cpu" and (shard is None or shard.width == 1)
        else None,
        trust_remote_code=False,
        output_loading_info=True,
        ignore_mismatched_sizes=True,  # they are in the report, and refused below by their names
        **options,
    )
    with translated_errors(source), _reported(progress), part as of_part:
        load = functools.partial(load, **of_part)
        try:
            model, report = load(attn_implementation=PAGED)
        except KeyError as error:
            if error.args != (PAGED,):
                raise
            # Older architectures look attention up in a table of their own.
            model, report = load(attn_implementation="eager")
    for key, held, wanted in sorted(report["mismatched_keys"]):
        raise ConfigurationError(
            f"{source.name} cannot be served: {key} is {tuple(held)} in its checkpoint, and {tuple(wanted)} by its "
            "configuration"
        )
    absent = sorted(set(report["missing_keys"]) - (_head_names(model) if may_lack_head else set()))
    if absent:
        some = ", ".join(absent[:4]) + (f" and {len(absent) - 4} more" if len(absent) > 4 else "")
        raise ConfigurationError(f"{source.name} cannot be served: its checkpoint lacks {some}")
    unexpected = report["unexpected_keys"]
    if shard is not None and shard.stages > 1:
        unexpected = [key for key in unexpected if not stages.is_elsewhere(key, model, shard)]
    refuse_leftovers(source.name, unexpected, model.config)
    if source.gguf_file is not None:
        finish_loading(source, model)
    if quantized is not None:
        loading.finish_loading(source, model, dtype, device)
    model.eval()
    model.requires_grad_(False)
    if shard is not None and shard.width > 1:
        cut.join_parts(source.name, model, shard.of_stage())
    if shard is not None and shard.stages > 1:
        stages.finish_stage(model, shard)
    keep_rotary_constant(model)
    take_states_out(model)
    return model


def _refuse_to_cut(source: ModelSource, config: Any, quantized: bool) -> None:
    if source.gguf_file is not None:
        why = "is a GGUF file, whose matrices are not cut"
    elif quantized:
        why = "is a quantized checkpoint, whose matrices are not cut"
    elif loader_of(config) is not None:
        why = "reads images, which one rank alone would see"
    else:
        return
    raise ConfigurationError(
        f"{source.name} cannot be served on several ranks: it {why}. Set pools.<pool>.tensor_parallel to 1"
    )


def _head_names(model: PreTrainedModel) -> set[str]:
    head: Any = model.get_output_embeddings()
    own = {id(parameter) for parameter in head.parameters()} if head is not None else set()
    return {name for name, found in model.named_parameters(remove_duplicate=False) if id(found) in own}


def holds_head(source: ModelSource, model: PreTrainedModel) -> bool:
    """Whether the checkpoint has what the model chooses tokens by."""
    if source.gguf_file is not None or getattr(model.config.get_text_config(), "tie_word_embeddings", False):
        return True
    names = _head_names(model)
    for file in weight_files(source):
        with safe_open(file, framework="pt") as tensors:
            if not names.isdisjoint(tensors.keys()):
                return True
    return False


def keep_rotary_constant(model: PreTrainedModel) -> None:
    """Two types of rotary embedding look at a step's longest request and choose their frequencies by it: a wait for
    the device in each pass, and nothing that could be recorded. `context_length` admits no request beyond the length up
    to which they are the frequencies that the model starts with, so the choice is left out."""
    for module in model.modules():
        kinds = getattr(module, "rope_type", None)
        names = set(kinds.values()) if isinstance(kinds, dict) else {kinds}
        if names & {"dynamic", "longrope"}:
            module.forward = types.MethodType(inspect.unwrap(type(module).forward), module)


@contextmanager
def _reported(progress: Progress) -> Iterator[None]:
    """Transformers counts weights as it loads them: pass that on, and keep its bar off the terminal."""
    previous = transformers_logging.set_tqdm_hook(
        lambda _factory, args, kwargs: _Bar(progress, *args, **kwargs)
    )
    try:
        yield
    finally:
        transformers_logging.set_tqdm_hook(previous)


class _Bar:
    """As much of a tqdm bar as transformers uses."""

    def __init__(
        self,
        progress: Progress,
        items: Any = None,
        *,
        desc: str = "loading",
        total: int | None = None,
        **_: Any,
    ) -> None:
        self._progress = progress
        self._what = desc.lower().rstrip(". ")
        self._items = items
        self._total = total or (len(items) if hasattr(items, "__len__") else 0)
        self._done = 0

    def __iter__(self) -> Iterator[Any]:
        for item in self._items:
            yield item
            self.update()

    def update(self, count: int = 1) -> None:
        self._done += count
        if self._total:
            self._progress(self._what, min(1.0, self._done / self._total))
