"""Delays rotary embedding, and the norms of queries and keys, until attention, which applies both together with the write to the cache."""

from __future__ import annotations

import contextlib
import types
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from tandem.engine.model.pieces import Norm, Rotary, agrees, put_off_rotary, replace_forward, rotated

_ROTARY = "apply_rotary_pos_emb"


def _putting_off(query_norm: Norm | None, key_norm: Norm | None) -> Callable[..., Any]:
    def put_off(
        query: torch.Tensor, key: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        put_off_rotary(query, key, Rotary(cosines[0], sines[0], query_norm, key_norm))
        return query, key

    return put_off


class RotaryWatch:
    """Replaces transformers' rotary embedding in the modules that call it: at first by a wrapper that watches the real function, to find
    the modules that pass its results to attention unchanged; `put_off` then delays it in these."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._turned: tuple[torch.Tensor, torch.Tensor] | None = None
        self._right = False
        self._given_at: tuple[int, int] = (0, 0)
        self._modules: dict[nn.Module, bool] = {}
        # The addresses of each module's queries and keys before rotation.
        self._sources: dict[nn.Module, tuple[int, int]] = {}
        for module in model.modules():
            code = _unwrapped(type(module).forward)
            if code and hasattr(module, "layer_idx") and _ROTARY in code[-1].__code__.co_names:
                self._modules[module] = False
                real = code[-1].__globals__.get(_ROTARY)
                if callable(real):
                    _give(module, self._watched(real))

    def _watched(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def turn(*args: Any, **kwargs: Any) -> Any:
            turned = real(*args, **kwargs)
            self._turned = turned
            self._right = len(args) >= 4 and all(isinstance(a, torch.Tensor) for a in args[:4])
            if self._right:
                query, key, cosines, sines = args[:4]
                self._given_at = query.untyped_storage().data_ptr(), key.untyped_storage().data_ptr()
                self._right = (
                    cosines.dim() == 3
                    and cosines.shape == sines.shape
                    and cosines.shape[0] == 1
                    and cosines.shape[-1] == query.shape[-1] == key.shape[-1]
                    and query.shape[2] == cosines.shape[1]
                    and all(torch.equal(*angles.chunk(2, dim=-1)) for angles in (cosines, sines))
                    and all(
                        agrees(rotated(given[0], cosines[0], sines[0]), made[0])
                        for given, made in zip((query, key), turned, strict=True)
                    )
                )
            return turned

        return turn

    def check(self, module: nn.Module, query: torch.Tensor, key: torch.Tensor) -> None:
        turned, self._turned = self._turned, None
        if module in self._modules and turned is not None:
            self._modules[module] = self._right and turned[0] is query and turned[1] is key
            self._sources[module] = self._given_at

    def put_off(self, norms: dict[int, tuple[nn.Module, Norm]]) -> int:
        """Delays the rotary embedding of these modules, with the norms whose results are their queries and keys. Returns how many modules
        it changed."""
        for module, can_wait in self._modules.items():
            if can_wait:
                found = [norms.get(place) for place in self._sources[module]]
                query_norm, key_norm = (None if one is None else one[1] for one in found)
                if query_norm is None or key_norm is None or not _are_alike(query_norm, key_norm):
                    query_norm = key_norm = None
                else:
                    for norm, _ in filter(None, found):
                        replace_forward(norm, lambda x: x)
                _give(module, _putting_off(query_norm, key_norm))
            else:
                module.__dict__.pop("forward", None)
        return sum(self._modules.values())


def _are_alike(one: Norm, other: Norm) -> bool:
    return one.weight.shape == other.weight.shape and (one.offset, one.eps) == (other.offset, other.eps)


def _give(module: nn.Module, rotary: Callable[..., Any]) -> None:
    """Gives this module's code another function for rotary embedding. Other modules of its class keep theirs."""
    *decorators, own = _unwrapped(type(module).forward)
    changed = _copied(own, {**own.__globals__, _ROTARY: rotary}, own.__closure__)
    inner = own
    for decorator in reversed(decorators):
        cells = (
            types.CellType(changed) if cell is _cell_of(decorator, inner) else cell
            for cell in decorator.__closure__ or ()
        )
        changed, inner = _copied(decorator, decorator.__globals__, tuple(cells)), decorator
    module.forward = types.MethodType(changed, module)


def _unwrapped(forward: Any) -> list[types.FunctionType]:
    """A method's decorators, the outermost first, and then the method itself. Empty if one of them is not a function that calls the next,
    because a function inside it cannot be replaced then."""
    nested: list[types.FunctionType] = []
    while isinstance(forward, types.FunctionType):
        nested.append(forward)
        inner = getattr(forward, "__wrapped__", None)
        if inner is None:
            return nested
        if _cell_of(forward, inner) is None:
            break
        forward = inner
    return []


def _cell_of(decorator: types.FunctionType, inner: object) -> types.CellType | None:
    """The closure cell in which a decorator keeps the function that it calls; None without one."""
    for cell in decorator.__closure__ or ():
        with contextlib.suppress(ValueError):  # the cell is empty
            if cell.cell_contents is inner:
                return cell
    return None


def _copied(
    function: types.FunctionType, names: dict[str, Any], closure: tuple[types.CellType, ...] | None
) -> types.FunctionType:
    copied = types.FunctionType(function.__code__, names, function.__name__, function.__defaults__, closure)
    copied.__kwdefaults__ = function.__kwdefaults__
    return copied
