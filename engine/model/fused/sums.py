"""Finds the sums of a module's output and another tensor that a norm gets, and puts them off until the norm."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from tandem.engine.model.sums import ADDITIONS, Summand, drops_nothing


class SumWatch(TorchFunctionMode):
    """Notes each sum of two tensors while the model runs."""

    def __init__(self) -> None:
        super().__init__()
        self._sums: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if drops_nothing(func, args, kwargs or {}):
            return args[0]  # the very tensor, by which it is known
        made = func(*args, **(kwargs or {}))
        if func in ADDITIONS and not kwargs and all(isinstance(each, torch.Tensor) for each in args):
            self._sums.append((*args, made))
        return made

    def put_off(self, made_by: Iterable[tuple[nn.Module, torch.Tensor]], normed: Iterable[torch.Tensor]) -> int:
        """`made_by` are the modules that ran and what they gave, in the order in which they ended; `normed` is what norms got that can add
        up. Returns how many modules' results wait."""
        order = {id(result): (number, module) for number, (module, result) in enumerate(made_by)}
        wanted = {id(x) for x in normed}
        found = set()
        for one, other, total in self._sums:
            makers = [order[id(part)] for part in (one, other) if id(part) in order]
            if id(total) in wanted and makers:
                # The other part is the residual, which was there before.
                found.add(max(makers, key=lambda maker: maker[0])[1])
        for module in found:
            module.register_forward_hook(_mark)
        return len(found)


def _mark(_module: nn.Module, _given: Any, result: Any) -> Any:
    return Summand.of(result) if type(result) is torch.Tensor else result
