"""A mixture with shared experts sums over ranks twice: what the routed experts gave, and what the shared ones gave. Where its code does no more
than add the two, one sum over ranks of the whole is enough."""

from __future__ import annotations

import torch
from torch import nn
from transformers import PreTrainedModel

from tandem.engine.model.pieces import agrees
from tandem.engine.model.shard import Shard
from tandem.engine.model.wide.cut import AddingUp

_ROWS = 4


def join_sums(model: PreTrainedModel, shard: Shard) -> int:
    """A collective. Returns how many mixtures have one sum now. One of each class is tried, on all ranks at once."""
    joined: dict[type[nn.Module], bool] = {}
    count = 0
    for module in list(model.modules()):
        summing = _summing_in(module)
        if len(summing) < 2 or not joined.get(type(module), True):
            continue
        if type(module) not in joined:
            joined[type(module)] = shard.all_agree(_is_the_same(model, module, summing, shard))
            if not joined[type(module)]:
                continue
        _sum_once(module, summing, shard)
        count += 1
    return count


def _summing_in(module: nn.Module) -> list[nn.Module]:
    """The modules whose results are summed over ranks, in one that has routed experts; none in any other."""
    if not any(_hook_of(child) is not None and not hasattr(child, "in_features") for child in module.children()):
        return []
    return [each for each in module.modules() if _hook_of(each) is not None]


def _hook_of(module: nn.Module) -> int | None:
    return next((key for key, hook in module._forward_hooks.items() if isinstance(hook, AddingUp)), None)


def _is_the_same(model: PreTrainedModel, module: nn.Module, summing: list[nn.Module], shard: Shard) -> bool:
    """Whether the module finds the same with one sum. All ranks make the same sums, whatever they find."""
    width = int(model.config.get_text_config().hidden_size)
    x = (torch.arange(_ROWS * width, device=model.device) * 1.3).sin().view(1, _ROWS, width).to(model.dtype)
    kept = [(each, each._forward_hooks.copy()) for each in summing]
    with torch.inference_mode():
        try:
            apart = module(x.clone())
        except TypeError:  # it takes more than hidden states
            return False
        if not isinstance(apart, torch.Tensor):
            return False
        _sum_once(module, summing, shard)
        together = module(x.clone())
    for each, hooks in kept:
        each._forward_hooks = hooks
    last = _hook_of(module)
    if last is not None:
        del module._forward_hooks[last]
    return agrees(together, apart)


def _sum_once(module: nn.Module, summing: list[nn.Module], shard: Shard) -> None:
    for each in summing:
        key = _hook_of(each)
        if key is not None:
            del each._forward_hooks[key]
    module.register_forward_hook(AddingUp(shard))
