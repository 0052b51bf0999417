"""Loads the general path's model with transformers, and replaces its attention by ours. Refuses a checkpoint that does not fill the
model exactly."""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.utils import logging as transformers_logging

from tandem.base.errors import ConfigurationError
from tandem.engine.model.attention.interface import PAGED
from tandem.engine.model.checkpoint import translated_errors
from tandem.engine.model.content import INDEX, WHOLE, weight_files
from tandem.engine.model.leftovers import refuse_leftovers
from tandem.engine.model.source import ModelSource, Progress
from tandem.engine.model.states import states_wing
from tandem.engine.model.tensor_files import open_tensors
from tandem.engine.model.weight_formats import weight_format

if TYPE_CHECKING:
    from tandem.engine.model.shard import ModelCut


def load_model(
    source: ModelSource,
    config: Any,
    dtype: torch.dtype,
    device: torch.device,
    progress: Progress,
    *,
    may_lack_head: bool = False,
    cut: ModelCut | None = None,
    loader: Any = None,
) -> PreTrainedModel:
    """Loads the model. Weights are mapped from their files and copied once, file by file, straight into place.

    With `may_lack_head` the checkpoint may lack the head's weights (`holds_head`). With a `cut` only that part is loaded.
    `loader` is transformers' class that loads it, if it is not the usual one. Raises a ConfigurationError for a checkpoint that does not fit."""
    options: dict[str, Any] = {"use_safetensors": True}
    if source.gguf_file is None:
        _refuse_two_models(source)
    found = weight_format(source, config)
    if found is not None and not found.reads(device, in_parts=cut is not None):
        found = None
    part: AbstractContextManager[dict[str, Any]] = nullcontext({})
    loader = loader or AutoModelForCausalLM
    if cut is not None:
        if (uncut := found.uncut if found is not None else _left_to_transformers(config)) != "":
            raise ConfigurationError(
                f"{source.name} cannot be served on several ranks: it {uncut}. Set pools.<pool>.tensor_parallel to 1"
            )
        part = cut.part(source, device)
        loader, more = cut.loader(source) or (loader, {})
        options |= more
    if found is not None:
        options |= found.loading_options(options.get("config", config), in_parts=cut is not None)
    load = functools.partial(
        loader.from_pretrained,
        source.folder,
        dtype=dtype,
        device_map={"": str(device)} if device.type != "cpu" and (cut is None or cut.device_map) else None,
        trust_remote_code=False,
        output_loading_info=True,
        ignore_mismatched_sizes=True,  # the report lists them, and they are refused below by name
        **options,
    )
    with translated_errors(source), _reported(progress), part as of_part:
        load = functools.partial(load, **of_part)
        try:
            model, report = load(attn_implementation=PAGED)
        except KeyError as error:
            if error.args != (PAGED,):
                raise
            # Older architectures look attention up in a table of their own, which lacks ours.
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
    unexpected = list(report["unexpected_keys"])
    if cut is not None:
        unexpected = [key for key in unexpected if not cut.is_elsewhere(key, model)]
    if found is not None:
        unexpected = found.unread(unexpected, model)
    refuse_leftovers(source.name, unexpected, model.config)
    if found is not None:
        part_of = functools.partial(cut.part_of, model) if cut is not None else None
        found.finish_loading(model, dtype, device, part_of)
    model.eval()
    model.requires_grad_(False)
    if cut is not None:
        cut.finish(source.name, model)
    keep_rotary_constant(model)
    if states := states_wing():
        states.take_states_out(model)
    return model


def _refuse_two_models(source: ModelSource) -> None:
    """Refuses what transformers would take one of, in silence."""
    open_tensors(source)
    whole = source.folder / WHOLE
    if whole.is_file() and whole not in weight_files(source):
        raise ConfigurationError(
            f"{source.name} cannot be served: its folder has {WHOLE}, and {INDEX} that names other files: which of them are the model "
            "is not known. Remove the others"
        )


def _left_to_transformers(config: Any) -> str:
    """Why several ranks cannot cut a checkpoint whose quantized matrices only transformers reads; "" if it has none."""
    is_quantized = (
        getattr(config, "quantization_config", None) or getattr(config.get_text_config(), "quantization_config", None)
    ) is not None
    return "has quantized matrices that only transformers reads" if is_quantized else ""


def _head_names(model: PreTrainedModel) -> set[str]:
    head: Any = model.get_output_embeddings()
    own = {id(parameter) for parameter in head.parameters()} if head is not None else set()
    return {name for name, found in model.named_parameters(remove_duplicate=False) if id(found) in own}


def holds_head(source: ModelSource, model: PreTrainedModel) -> bool:
    """Whether the checkpoint has the weights of the head, so that the model can generate."""
    found = weight_format(source, model.config)
    if found is not None and found.always_has_head:
        return True
    if getattr(model.config.get_text_config(), "tie_word_embeddings", False):
        return True
    names = _head_names(model)
    return not names.isdisjoint(open_tensors(source))


def keep_rotary_constant(model: PreTrainedModel) -> None:
    """Removes the choice of rotary frequencies by a step's longest request, which two types of rotary embedding make. It waits for
    the device in each pass and cannot be recorded. It is not needed: `context_length` admits no request so long that the
    frequencies would change."""
    for module in model.modules():
        kinds = getattr(module, "rope_type", None)
        names = set(kinds.values()) if isinstance(kinds, dict) else {kinds}
        if names & {"dynamic", "longrope"}:
            module.forward = types.MethodType(inspect.unwrap(type(module).forward), module)


@contextmanager
def _reported(progress: Progress) -> Iterator[None]:
    """Passes transformers' count of loaded weights on to `progress`, and keeps its progress bar off the terminal."""
    previous = transformers_logging.set_tqdm_hook(lambda _factory, args, kwargs: _Bar(progress, *args, **kwargs))
    try:
        yield
    finally:
        transformers_logging.set_tqdm_hook(previous)


class _Bar:
    """The part of a tqdm bar that transformers uses."""

    def __init__(
        self, progress: Progress, items: Any = None, *, desc: str = "loading", total: int | None = None, **_: Any
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
