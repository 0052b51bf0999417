"""Paged attention for multi-head latent attention (MLA), which compresses a token's keys and values into one latent for all heads.

The cache keeps each token's latent and the rotary part of its key, side by side, once. A prompt's chunk is attended as the model does:
each head's keys and values are made from the latents. A few rows are attended in the absorbed form: with key = latent @ up and
score = query · key, query @ up is scored with the latents themselves, as one head of keys that all queries share. In the same way
values are made from the attended sum of latents instead of from each token.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import msgspec
import torch

from tandem.base.errors import InternalError
from tandem.engine.model.attention.gathered import GatheredAttention, GatheredCache, GroupReads, PagedStep
from tandem.engine.model.attention.interface import AttentionCall, AttentionStep
from tandem.engine.model.attention.kernel import attend
from tandem.engine.model.attention.layers import AttentionLayer, CachePlan
from tandem.engine.model.compressed import EXPANDS, Decodes, ProbedCall


class Expansion(msgspec.Struct, frozen=True):
    """How one layer makes keys and values from latents."""

    module: Any  # an attention module of transformers that has an `expand_kv`
    expand_kv: Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
    latent_dim: int
    rotary_dim: int
    # [heads, dim, latent], if the matrix is in memory as it was made. None: the absorbed form is not used.
    to_keys: torch.Tensor | None = None
    to_values: torch.Tensor | None = None

    @classmethod
    def of(
        cls, module: Any, latent: torch.Tensor, rotary: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> Expansion:
        """Makes the expansion of a layer from one run: `latent` and `rotary` were passed to its cache, `key` and `value` to attention."""
        dims = latent.shape[-1], rotary.shape[-1]
        up: Any = getattr(module, EXPANDS, None)
        heads, key_dim, value_dim = key.shape[1], key.shape[3] - dims[1], value.shape[3]
        plain = (
            isinstance(up, torch.nn.Linear) and getattr(up, "bias", None) is None and up.weight.dtype == latent.dtype
        )
        if not plain or tuple(up.weight.shape) != (heads * (key_dim + value_dim), dims[0]):
            return cls(module, module.expand_kv, *dims)
        each = up.weight.detach().view(heads, key_dim + value_dim, dims[0])
        return cls(module, module.expand_kv, *dims, each[:, :key_dim], each[:, key_dim:])

    def expand(self, latents: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Expands [requests, tokens, latent and rotary] to keys [requests, heads, tokens, key] and values."""
        requests, tokens, _ = latents.shape
        flat = latents.reshape(1, 1, requests * tokens, -1)
        made = self.expand_kv(flat[..., : self.latent_dim], flat[..., self.latent_dim :])
        keys, values = (part[0].reshape(part.shape[1], requests, tokens, -1).transpose(0, 1) for part in made)
        return keys, values

    def absorbs(self, rows: int) -> bool:
        """Whether `rows` rows of a request are cheaper in the absorbed form than with expanded keys and values, for any number of tokens."""
        if self.to_keys is None or self.to_values is None:
            return False
        made = self.to_keys.shape[1] + self.to_values.shape[1]
        return rows * (2 * self.latent_dim - made) <= self.latent_dim * made

    def absorbed(self, query: torch.Tensor) -> torch.Tensor:
        """Turns queries [heads, rows, key and rotary] into absorbed ones, [heads, rows, latent and rotary]."""
        assert self.to_keys is not None
        dim = self.to_keys.shape[1]
        return torch.cat([torch.bmm(query[..., :dim], self.to_keys), query[..., dim:]], dim=-1)

    def values_of(self, seen: torch.Tensor) -> torch.Tensor:
        """Turns attended latents [heads, rows, latent] into values [heads, rows, value]."""
        assert self.to_values is not None
        return torch.bmm(seen, self.to_values.transpose(1, 2))

    def kept_as(self, layer: AttentionLayer) -> AttentionLayer:
        """The same layer as the cache keeps it: one head of keys, a part of which is the values."""
        return msgspec.structs.replace(
            layer,
            num_kv_heads=1,
            key_dim=self.latent_dim + self.rotary_dim,
            value_dim=self.latent_dim,
            latent=(self.latent_dim, self.rotary_dim),
            expanded=(layer.key_dim, layer.value_dim),
        )


class LatentLayers(dict[int, Expansion]):
    """See engine.model.compressed.Latents."""

    def attention(self, tensor: torch.Tensor, plan: CachePlan) -> LatentAttention:
        return LatentAttention(tensor, plan, self)

    def step(self, kept: GatheredCache, groups: list[GroupReads], decodes: Decodes) -> LatentStep:
        return LatentStep(kept, groups, self, decodes)

    def wrap(self, layers: Iterable[AttentionLayer]) -> None:
        for layer in layers:
            if layer.index in self:
                how = self[layer.index]
                how.module.expand_kv = _wrapped(how, layer)

    @contextmanager
    def without_expanding(self, step: AttentionStep) -> Iterator[None]:
        _current.unused = isinstance(step, LatentStep)
        try:
            yield
        finally:
            _current.unused = False


class LatentAttention(GatheredAttention):
    """See engine.model.attention.interface.PagedAttention."""

    def __init__(self, tensor: torch.Tensor, plan: CachePlan, expansions: Mapping[int, Expansion]) -> None:
        super().__init__(tensor, plan)
        self._expansions = expansions

    def step_of(self, groups: list[GroupReads]) -> LatentStep:
        return LatentStep(self.kept, groups, self._expansions)


class LatentStep(PagedStep):
    def __init__(
        self,
        kept: GatheredCache,
        groups: list[GroupReads],
        expansions: Mapping[int, Expansion],
        decodes: Decodes | None = None,
    ) -> None:
        """A kernel may attend the rows of decodes by itself; `groups` then have only the other rows."""
        super().__init__(kept, groups)
        self._expansions, self._decodes = expansions, decodes

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, how: AttentionCall
    ) -> torch.Tensor:
        """See AttentionStep.attend. It ignores `key` and `value`."""
        latent = how.latent
        if how.rotary is not None or latent is None:
            raise InternalError(f"layer {layer} keeps latents, and has not given any")
        expansion, group = self._expansions[layer], self._groups[self._kept.plan.group_of_layer[layer]]
        if group.padding is not None:
            latent = latent.masked_fill(group.padding[:, None], 0)
        self._kept.write(layer, group.block, group.offset, latent[None])
        heads, tokens, _ = query.shape
        out = query.new_empty(tokens, heads, value.shape[-1])
        if self._decodes is not None:
            self._decodes(layer, query, out)
        for reads in group.reads:
            asked = query[:, reads.start : reads.end]
            if reads.blocks is None:
                latents = latent[reads.end - reads.num_keys : reads.end][None]
            else:
                latents = self._kept.read(layer, 0, reads, latent[None])[:, 0]
            absorbs = expansion.absorbs(reads.rows_each)
            if absorbs:
                asked = expansion.absorbed(asked)
                keys, values = latents[:, None], latents[:, None, :, : expansion.latent_dim]
            else:
                keys, values = expansion.expand(latents)
            seen = attend(
                asked.reshape(heads, reads.num_requests, reads.rows_each, -1).transpose(0, 1),
                keys,
                values,
                mask=reads.mask,
                causal=reads.causal,
                scale=how.scale,
                softcap=how.softcap,
                sinks=how.sinks,
            )
            seen = seen.transpose(0, 1).flatten(1, 2)  # [heads, rows, ...]
            out[reads.start : reads.end] = (expansion.values_of(seen) if absorbs else seen).transpose(0, 1)
        return out


class _Current(threading.local):
    unused: bool = False


_current = _Current()


def _wrapped(how: Expansion, layer: AttentionLayer) -> Callable[..., Any]:
    def expand(latent: torch.Tensor, rotary: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if not _current.unused:
            return how.expand_kv(latent, rotary)
        rows = latent.shape[2]
        nothing = latent.new_zeros(1)
        return (
            nothing.expand(1, layer.num_query_heads, rows, layer.expanded[0]),
            nothing.expand(1, layer.num_query_heads, rows, layer.expanded[1]),
        )

    return expand


def expansion_of(module: Any, kept: tuple[torch.Tensor, torch.Tensor], call: ProbedCall) -> Expansion | None:
    """See engine.model.compressed.LatentsWing. Tries the absorbed form, too."""
    latent, rotary = kept
    query, key, value = call.query, call.key, call.value
    if not hasattr(module, "expand_kv") or latent is key or latent.shape[1] != 1 or rotary.shape[1] != 1:
        return None
    how = Expansion.of(module, latent, rotary, key, value)
    both = torch.cat([latent, rotary], dim=-1)
    if not all(torch.allclose(*pair) for pair in zip(how.expand(both[0]), (key, value), strict=True)):
        return None
    if how.absorbs(1):
        asked = how.absorbed(query[0])[None]
        among = attend(asked, both, both[..., : how.latent_dim], mask=call.seen, causal=False, **call.options)
        error = (how.values_of(among[0]) - call.out[0]).float().abs().max().item()
        if not error <= call.tolerance * call.out.float().abs().max().item():
            how = msgspec.structs.replace(how, to_keys=None, to_values=None)
    return how


latents = LatentLayers
