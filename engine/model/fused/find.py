"""Finds the modules of a model that can be fused into fewer operations, and replaces them.

Nothing needs to be known about an architecture. The model runs once over a few tokens, and each module's input and output are noted:

- linear layers with the same input tensor become one product;
- a module that agrees with down(activation(gate(x)) * up(x)) in float32 is a gated activation;
- a module that agrees with RMSNorm is one;
- if attention gets the same tensors that rotary embedding returned, rotary embedding can be applied there, together with the norms of
  queries and keys before it;
- a sum of a module's output and another tensor that a norm gets can be made in the norm.

Each piece must then give its module's output, or the module stays unchanged. In the end the whole model must give the same logits.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
import logging
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

import msgspec
import torch
from torch import nn
from transformers import PreTrainedModel

from tandem.engine.model.attention.interface import attention_options, attention_through
from tandem.engine.model.attention.kernel import attend
from tandem.engine.model.fused.rotary import RotaryWatch
from tandem.engine.model.fused.sums import SumWatch
from tandem.engine.model.kernel_linear import KernelLinear
from tandem.engine.model.pieces import (
    EXACT,
    ROUNDED,
    Activation,
    Matrix,
    Norm,
    NotOneMatrix,
    Piece,
    Pieces,
    activate,
    agrees,
    error_of,
    replace_forward,
    rms_norm,
    take_rotary,
    turned,
)

if TYPE_CHECKING:
    from tandem.engine.model.adapters import UpdatedLayers

log = logging.getLogger(__name__)

_TOKENS = 8
_LINEAR = (nn.Linear, KernelLinear)


class Fused(msgspec.Struct):
    """How many modules of each kind were fused."""

    gated: int = 0
    norms: int = 0
    merged: int = 0  # products of several linear layers
    rotary: int = 0
    sums: int = 0  # modules whose results norms add up
    left: int = 0  # weights in linear layers that were not fused

    def __str__(self) -> str:
        found = {
            "gated activations": self.gated,
            "norms": self.norms,
            "merged products": self.merged,
            "rotary embeddings": self.rotary,
            "sums": self.sums,
        }
        return ", ".join(f"{count} {what}" for what, count in found.items() if count) or "nothing"


def fuse(
    model: PreTrainedModel,
    pieces: Pieces,
    adapted: UpdatedLayers | None = None,
    agree: Callable[[bool], bool] | None = None,
) -> Fused | None:
    """Fuses the model in place. Pieces that add adapters' updates replace `adapted` layers, too; other pieces leave each of them to be
    called by itself. Returns None if the fused model computes something else: the caller must load the model again.

    `agree`: the model is one rank's part, whose layers have hooks that put the ranks' results together. All ranks must then fuse at the
    same time, and `agree` tells whether each has found what it should."""
    fused = Fused()
    left_to = adapted if pieces.adds_updates else None
    with torch.inference_mode():
        rotary = RotaryWatch(model)
        seen = _Seen(model)
        sums = SumWatch()
        with sums if pieces.norms_add else contextlib.nullcontext():
            expected = seen.run(rotary)
        consumed: set[nn.Module] = set()
        known: dict[type[nn.Module], int | None] = {}
        norms: dict[int, tuple[nn.Module, Norm]] = {}  # by the address of their result
        normed: list[torch.Tensor] = []
        in_parts = agree is not None
        for module, given in seen.modules():
            if isinstance(module, _LINEAR):
                continue
            keeps_layers = adapted is not None and left_to is None
            gated = None if keeps_layers else _gated_in(module, given, seen, known, left_to, in_parts)
            found = gated or _norm_in(module, given)
            piece = _made(found, pieces)
            if found is None or piece is None:
                continue
            if not agrees(piece(given.x), given.out if found.of_part is None else found.of_part()):
                continue
            replace_forward(module, piece if found.last is None else _joined(piece, found.last))
            consumed.update(found.uses)
            _give_up(found.uses, left_to)
            if found.norm is not None:
                norms[given.made_at] = module, found.norm
                normed.append(given.x)
            fused.gated += bool(found.uses)
            fused.norms += not found.uses
        _take_products(seen, pieces, consumed, fused, left_to, in_parts)
        fused.rotary = rotary.put_off(norms if pieces.turns_norms else {})
        fused.sums = sums.put_off(((module, given.made) for module, given in seen.modules()), normed)
        if pieces.copies:
            _release(model, consumed)
        fused.left = sum(
            int(module.in_features) * int(module.out_features)
            for module in model.modules()
            if isinstance(module, _LINEAR) and module not in consumed
        )
        found_logits = seen.logits()
    is_right = agrees(found_logits, expected, within=2.0)
    if not (is_right if agree is None else agree(is_right)):
        return None
    log.info("found in the model: %s", fused)
    return fused


class _Given:
    def __init__(self, x: torch.Tensor, out: torch.Tensor) -> None:
        self.x, self.out = x, out.clone()
        self.made = out  # kept alive, so that no other tensor gets its address

    @property
    def made_at(self) -> int:
        return self.made.untyped_storage().data_ptr()


class _Seen:
    """The modules that take one tensor and return one, with their inputs and outputs in one run."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model
        self._given: dict[nn.Module, _Given] = {}

    def modules(self) -> Iterator[tuple[nn.Module, _Given]]:
        return iter(self._given.items())

    def of(self, module: nn.Module) -> _Given | None:
        return self._given.get(module)

    def run(self, rotary: RotaryWatch) -> torch.Tensor:
        def note(module: nn.Module, args: Any, kwargs: Any, out: Any) -> None:
            one = len(args) == 1 and not kwargs and isinstance(args[0], torch.Tensor)
            if one and isinstance(out, torch.Tensor) and module not in self._given:
                self._given[module] = _Given(args[0], out)

        hooks = [
            module.register_forward_hook(note, with_kwargs=True)
            for module in self._model.modules()
            if next(module.parameters(), None) is not None
        ]
        try:
            return self.logits(rotary.check)
        finally:
            for hook in hooks:
                hook.remove()

    def logits(self, on_attention: Callable[..., None] = lambda *_: None) -> torch.Tensor:
        device = self._model.device
        vocab = self._model.config.get_text_config().vocab_size
        tokens = torch.arange(_TOKENS, device=device).mul_(7).add_(3).remainder_(vocab)[None]
        positions = torch.arange(_TOKENS, device=device)[None]

        def attention(
            module: nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, _mask: object, **kwargs: Any
        ) -> tuple[torch.Tensor, None]:
            on_attention(module, query, key)
            rotary = take_rotary(query, key)
            if rotary is not None:
                query = turned(query[0], rotary, rotary.query_norm)[None]
                key = turned(key[0], rotary, rotary.key_norm)[None]
            options = attention_options(module, query, kwargs)
            return attend(query, key, value, mask=None, causal=True, **options).transpose(1, 2), None

        with attention_through(attention):
            out = self._model(input_ids=tokens, position_ids=positions, use_cache=False)
        logits: torch.Tensor = out.logits
        return logits


class _Found:
    def __init__(
        self,
        uses: tuple[nn.Module, ...],
        made_by: Callable[[Pieces], Piece],
        norm: Norm | None = None,
        last: nn.Module | None = None,
        of_part: Callable[[], torch.Tensor] | None = None,
    ) -> None:
        """`last`: the layer whose hooks join the ranks' results. `of_part`: what the piece must find before they do."""
        self.uses, self.made_by, self.norm = uses, made_by, norm
        self.last, self.of_part = last, of_part


def _made(found: _Found | None, pieces: Pieces) -> Piece | None:
    try:
        return found.made_by(pieces) if found is not None else None
    except NotOneMatrix:
        return None


def _gated_in(
    module: nn.Module,
    given: _Given,
    seen: _Seen,
    known: dict[type[nn.Module], int | None],
    adapted: UpdatedLayers | None,
    in_parts: bool,
) -> _Found | None:
    linears = [child for child in module.children() if isinstance(child, _LINEAR)]
    if len(linears) not in (2, 3) or any(seen.of(linear) is None for linear in linears):
        return None
    if sum(1 for _ in module.parameters()) != sum(1 for child in linears for _ in child.parameters()):
        return None  # it has weights besides the linear layers'
    joining = [linear for linear in linears if in_parts and linear._forward_hooks]
    if len(joining) > 1:
        return None
    last = joining[0] if joining else None
    ways = [
        (gate, up, down, activation)
        for gate, up, down in _as_gated(linears, given.x.shape[-1], adapted)
        if last is None or last in (down.kernel, _owner(down, linears))
        for activation in Activation
    ]
    if type(module) not in known:
        # The formula is found once for each class, because a float32 copy takes time and memory.
        x = given.x.float().reshape(-1, given.x.shape[-1])
        # A kernel has no wider dtype.
        rounds = any(isinstance(linear, KernelLinear) for linear in linears)
        out = given.out.reshape(-1, given.out.shape[-1])
        found = [_by_formula(x, *way) for way in ways]
        if last is not None:
            # All ranks would have to run a copy together, so what the module itself found must do.
            rounds = rounds or out.dtype is not torch.float32
            found = [_after(last, x, each) for each in found]
        elif not rounds:
            try:
                out = copy.deepcopy(module).float()(x[None])[0]
            except (RuntimeError, TypeError, ValueError):
                return None
        errors = [error_of(each, out) for each in found]
        known[type(module)] = _best_of(errors, ROUNDED[torch.bfloat16] if rounds else EXACT)
    which = known[type(module)]
    if which is None or which >= len(ways):
        return None
    way = ways[which]
    of_part = None
    if last is not None:

        def of_part() -> torch.Tensor:
            return _by_formula(given.x.float(), *way).to(given.out.dtype)

    return _Found(tuple(linears), lambda pieces: pieces.gated(*way), last=last, of_part=of_part)


def _owner(matrix: Matrix, linears: Iterable[nn.Linear | KernelLinear]) -> nn.Module | None:
    return next((each for each in linears if getattr(each, "weight", None) is matrix.weight), None)


def _after(last: nn.Module, x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """What the layer's hooks make of its result."""
    for hook in last._forward_hooks.values():
        out = hook(last, (x,), out)
    return out


def _joined(piece: Piece, last: nn.Module) -> Piece:
    return lambda x: _after(last, x, piece(x))


def _best_of(errors: list[float], tolerance: float) -> int | None:
    """The formula whose error is within the tolerance and far below the others', so that rounding cannot confuse two; otherwise None."""
    order = sorted(range(len(errors)), key=errors.__getitem__)
    if not order or errors[order[0]] > tolerance:
        return None
    return order[0] if len(order) == 1 or errors[order[1]] > 2 * errors[order[0]] else None


def _by_formula(x: torch.Tensor, gate: Matrix, up: Matrix, down: Matrix, activation: Activation) -> torch.Tensor:
    return _apply(down, activate(_apply(gate, x), activation) * _apply(up, x))


def _as_gated(
    linears: list[nn.Linear | KernelLinear], width: int, adapted: UpdatedLayers | None
) -> Iterator[tuple[Matrix, Matrix, Matrix]]:
    if len(linears) == 3:
        for gate, up, down in itertools.permutations(linears):
            if (gate.in_features, up.in_features) == (width, width) and (
                gate.out_features == up.out_features == down.in_features
            ):
                yield _matrix(gate, adapted), _matrix(up, adapted), _matrix(down, adapted)
        return
    for both, down in itertools.permutations(linears):
        if not isinstance(both, nn.Linear):
            continue
        if both.in_features == width and both.out_features == 2 * down.in_features:
            halves = _halves(both, adapted)
            yield halves[0], halves[1], _matrix(down, adapted)
            yield halves[1], halves[0], _matrix(down, adapted)


def _norm_in(module: nn.Module, given: _Given) -> _Found | None:
    weights = list(module.parameters())
    if next(module.children(), None) is not None or len(weights) != 1 or weights[0].dim() != 1:
        return None
    weight, width = weights[0], given.x.shape[-1]
    eps = next((getattr(module, name) for name in ("variance_epsilon", "eps", "epsilon") if hasattr(module, name)), 0.0)
    if weight.shape[0] != width or not isinstance(eps, float) or given.x.shape != given.out.shape:
        return None
    wide = copy.deepcopy(module).float()
    for offset in (0.0, 1.0):
        # Small inputs show the value of epsilon.
        if all(
            agrees(rms_norm(x, weight, offset, eps), wide(x), EXACT) for x in (given.x.float(), given.x.float() * 1e-3)
        ):
            return _as_norm(Norm(weight.data, offset, eps))
    return None


def _as_norm(norm: Norm) -> _Found:
    return _Found((), lambda pieces: pieces.norm(norm.weight, norm.offset, norm.eps), norm)


def _take_products(
    seen: _Seen, pieces: Pieces, consumed: set[nn.Module], fused: Fused, adapted: UpdatedLayers | None, in_parts: bool
) -> None:
    parents: dict[nn.Module, nn.Module] = {}
    for parent in seen._model.modules():
        parents.update(dict.fromkeys(parent.children(), parent))
    together: dict[tuple[int, int, type], list[nn.Linear | KernelLinear]] = {}
    for module, given in seen.modules():
        is_linear = isinstance(module, KernelLinear) or type(module) is nn.Linear
        if is_linear and module not in consumed:
            place = id(given.x), id(parents.get(module)), type(module)
            together.setdefault(place, []).append(module)  # type: ignore[arg-type]
    for linears in together.values():
        if len(linears) == 1 and not pieces.copies:
            continue
        try:
            piece = pieces.product([_matrix(linear, adapted) for linear in linears])
        except NotOneMatrix:
            continue
        known = [one for linear in linears if (one := seen.of(linear)) is not None]
        # A rank's own results, before the layers' hooks join them with the other ranks'.
        results = [linear.forward(one.x) if in_parts else one.out for linear, one in zip(linears, known, strict=True)]
        shared = SharedProduct(piece, [out.shape[-1] for out in results])
        parts = [shared.part(index) for index in range(len(linears))] if len(linears) > 1 else [piece]
        if not all(agrees(part(one.x), out) for part, one, out in zip(parts, known, results, strict=True)):
            continue
        for linear, part in zip(linears, parts, strict=True):
            replace_forward(linear, part)
        consumed.update(linears)
        _give_up(linears, adapted)
        fused.merged += len(linears) > 1


class SharedProduct:
    """Several products of one tensor, which are all computed when the first one is called."""

    def __init__(self, piece: Piece, sizes: list[int]) -> None:
        self._piece = piece
        self._sizes = sizes
        self._given: torch.Tensor | None = None
        self._results: list[torch.Tensor | None] = []

    def part(self, index: int) -> Piece:
        def run(x: torch.Tensor) -> torch.Tensor:
            result = self._results[index] if self._given is x else None
            if result is None:
                self._results = list(torch.split(self._piece(x), self._sizes, dim=-1))
                self._given = x
                result = self._results[index]
                assert result is not None
            self._results[index] = None
            if not any(left is not None for left in self._results):
                self._given = None
            return result

        return run


def _release(model: nn.Module, consumed: Iterable[nn.Module]) -> None:
    """Frees the weights of modules that were packed, unless another module that stays has the same weights."""
    consumed = set(consumed)
    kept = {
        id(parameter)
        for module in model.modules()
        if module not in consumed
        for parameter in module.parameters(recurse=False)
    }
    for module in consumed:
        for parameter in module.parameters(recurse=False):
            if id(parameter) not in kept:
                parameter.data = torch.empty(0, dtype=parameter.dtype, device=parameter.device)


def _give_up(modules: Iterable[nn.Module], adapted: UpdatedLayers | None) -> None:
    """These modules have been replaced by a piece: the piece adds the adapters' updates from now on, and the tensors of quantized kernels
    are freed, because the joined kernel has copies."""
    for module in modules:
        if adapted is not None:
            adapted.leave(module)
        if isinstance(module, KernelLinear):
            for parameter in module.parameters():
                parameter.data = torch.empty(0, dtype=parameter.dtype, device=parameter.device)


def _matrix(linear: nn.Linear | KernelLinear, adapted: UpdatedLayers | None) -> Matrix:
    layer = adapted.of(linear) if adapted is not None else None
    if isinstance(linear, KernelLinear):
        return Matrix(torch.empty(0), None, linear, layer)
    return Matrix(linear.weight, linear.bias, adapted=layer)


def _halves(linear: nn.Linear, adapted: UpdatedLayers | None) -> list[Matrix]:
    layer = adapted.of(linear) if adapted is not None else None
    weights = linear.weight.chunk(2)
    biases = (None, None) if linear.bias is None else linear.bias.chunk(2)
    starts = 0, weights[0].shape[0]
    return [
        Matrix(weight, bias, adapted=layer, first=start)
        for weight, bias, start in zip(weights, biases, starts, strict=True)
    ]


def _apply(matrix: Matrix, x: torch.Tensor) -> torch.Tensor:
    if matrix.kernel is not None:
        return matrix.kernel.forward(x.to(torch.bfloat16)).float()
    bias = None if matrix.bias is None else matrix.bias.float()
    return nn.functional.linear(x, matrix.weight.float(), bias)
