"""Samples one token per row, for all rows at once: from the row's softmax, or from what min_p, top_k and top_p leave of it.

Each of these restrictions is a lower bound on a token's logit. A bound keeps ties: tokens with equal logits are all in or all out. So
which tokens may be sampled depends only on the row itself, not on the batch, nor on how the bound was found.

A token is drawn with the Gumbel-max trick on two levels. The index with the largest `logit - log E`, with independent exponential
variates E, is distributed as the softmax. It is first taken over blocks of the vocabulary, whose logit is the logarithm of their
tokens' summed weights, and then over the tokens of the winning block. This is exactly the softmax again, and needs a few hundred
variates instead of one per token.

The noise has no state: a variate is a function of (seed, position, index) in integer arithmetic, so it is the same on every node
and device and in every batch. Logarithms are computed in float64 and then rounded: libraries differ in the last bit of a logarithm,
which rounding to float32 almost always hides.
"""

from __future__ import annotations

import functools

import numpy as np
import numpy.typing as npt
import torch

from tandem.base.errors import TandemError
from tandem.engine.model.batching import RequestRows, SamplingTable
from tandem.engine.model.parts import TokenMasks
from tandem.engine.model.sampling.adjust import edit_logits, penalize
from tandem.engine.model.sampling.row_sums import row_sums
from tandem.engine.model.sampling.selection import reaching_count, reaching_weight
from tandem.engine.model.staging import to_device

# How many of the most likely tokens are looked at first. Restrictions usually leave fewer.
_CANDIDATES = 128
# If they leave more: bins of a logit's distance from the largest. Weights beyond the last bin are below e**-32.
_BINS, _BINS_PER_UNIT = 1024, 32
_TILE = 64


class LogitRows:
    """Rows to draw from: logits divided by temperature, padded with -inf to a multiple of the tile. Derived tensors are computed when
    they are first needed.
    """

    def __init__(self, scaled: torch.Tensor) -> None:
        self.scaled = scaled  # [N, W] float32

    @functools.cached_property
    def largest(self) -> torch.Tensor:
        """[N, 1]"""
        return self.scaled.amax(dim=1, keepdim=True)

    @functools.cached_property
    def weights(self) -> torch.Tensor:
        """[N, W]: exp(scaled - largest)"""
        return (self.scaled - self.largest).exp_()

    @functools.cached_property
    def candidates(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The logits of the most likely tokens in descending order, and the tokens."""
        return most_likely(self.scaled, min(_CANDIDATES, self.scaled.shape[1]))

    def __getitem__(self, index: torch.Tensor) -> LogitRows:
        return LogitRows(self.scaled[index])


def most_likely(scaled: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    if scaled.shape[1] < 4 * count * _TILE:
        values, tokens = scaled.topk(count, dim=1)
        return values, tokens
    # The `count` most likely tokens all lie in the tiles with the `count` largest maxima.
    tiles = scaled.view(scaled.shape[0], -1, _TILE)
    best = tiles.amax(dim=2).topk(count, dim=1, sorted=False).indices
    chosen = tiles.gather(1, best[:, :, None].expand(-1, -1, _TILE))
    values, places = chosen.view(scaled.shape[0], -1).topk(count, dim=1)
    return values, best.gather(1, places // _TILE) * _TILE + places % _TILE


def lower_bounds(
    rows: LogitRows,
    vocab: int,
    top_k: npt.NDArray[np.int64],  # 0 is off
    top_p: npt.NDArray[np.float32],
    min_p: npt.NDArray[np.float32],
) -> torch.Tensor | None:
    """Each row's bound [N, 1]: min_p and top_k, then top_p of what they leave. None if no row is restricted."""
    device = rows.scaled.device
    limited_k, limited_p, limited_m = (top_k > 0) & (top_k < vocab), top_p < 1.0, min_p > 0
    if not (limited_k.any() or limited_p.any() or limited_m.any()):
        return None
    bound = torch.full_like(rows.largest, float("-inf"))
    if limited_m.any():
        share = to_device(min_p, device)[:, None]
        bound = rows.largest + share.log()  # log(0) leaves a row unbounded
    if limited_k.any():
        off = to_device(~limited_k, device)[:, None]
        bound = torch.maximum(bound, _kth(rows, limited_k, top_k).masked_fill_(off, float("-inf")))
    if limited_p.any():
        share = to_device(top_p[limited_p].astype(np.float64), device)[:, None]
        bounded = bool(limited_k.any() or limited_m.any())
        # top_k leaves only candidates of these rows, except for ties with the last one.
        few = bool((limited_k & (top_k <= _CANDIDATES))[limited_p].all())
        if limited_p.all():
            return _reaching(rows, bound, bounded, few, share)
        index = to_device(np.flatnonzero(limited_p), device)
        bound[index] = _reaching(rows[index], bound[index], bounded, few, share)
    return bound


def _kth(rows: LogitRows, limited: npt.NDArray[np.bool_], top_k: npt.NDArray[np.int64]) -> torch.Tensor:
    """The k-th largest logit of each limited row."""
    device, most = rows.scaled.device, int(top_k[limited].max())
    wanted = to_device(np.where(limited, top_k, 1), device)[:, None]
    if most > _CANDIDATES and device.type != "cpu":
        return reaching_count(rows.scaled, wanted)
    values = rows.candidates[0] if most <= _CANDIDATES else most_likely(rows.scaled, most)[0]
    return values.gather(1, wanted - 1)


def _reaching(rows: LogitRows, bound: torch.Tensor, bounded: bool, few: bool, share: torch.Tensor) -> torch.Tensor:
    """The bound of the smallest set of most likely tokens whose weights reach `share` of the weights above `bound`."""
    weights = rows.weights.masked_fill(rows.scaled < bound, 0) if bounded else rows.weights
    if rows.scaled.device.type != "cpu" and not few:
        # Asking whether the candidates suffice would make the host wait for the device.
        return reaching_weight(rows.scaled, weights, share)
    tiles = row_sums(weights.view(weights.shape[0], -1, _TILE))
    wanted = row_sums(tiles.double())[:, None] * share
    values = rows.candidates[0]
    each = (values - rows.largest).exp_().masked_fill_(values < bound, 0).double()
    cumulative = each.cumsum(dim=1)
    result = _bound_among(values, cumulative - each, wanted)
    if not few and values.shape[1] < rows.scaled.shape[1]:
        rest = torch.nonzero(cumulative[:, -1] < wanted[:, 0])[:, 0]
        if len(rest):
            result[rest] = _bound_by_bins(rows[rest], weights[rest], wanted[rest])
    return result


def _bound_among(values: torch.Tensor, before: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    """The smallest of the values, which are in descending order, before which the weights have not reached `wanted`."""
    inside = before < wanted
    inside[:, 0] = True
    return values.masked_fill(~inside, float("inf")).amin(dim=1, keepdim=True)


def _bound_by_bins(rows: LogitRows, weights: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    """Sums weights by bin, finds the bin in which the sum reaches `wanted`, and sorts only that bin."""
    place = ((rows.largest - rows.scaled) * _BINS_PER_UNIT).clamp_(max=_BINS - 1).long()
    sums = torch.zeros(len(wanted), _BINS, dtype=torch.float64, device=weights.device)
    sums.scatter_add_(1, place, weights.double())
    cumulative = sums.cumsum(dim=1)
    # Rounding must not push the place beyond the last bin.
    last = (cumulative < wanted).sum(dim=1, keepdim=True).clamp_(max=_BINS - 1)
    already = (cumulative - sums).gather(1, last)
    member = place == last
    most = int(member.sum(dim=1).max())
    values, tokens = rows.scaled.masked_fill(~member, float("-inf")).topk(most, dim=1)
    each = weights.gather(1, tokens).double()
    return _bound_among(values, already + each.cumsum(dim=1) - each, wanted)


_BLOCK = 256
_NEVER = float("-inf")


class TokenDraw:
    """Draws tokens from one model's vocabulary, on one device."""

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self._vocab = vocab_size
        self._num_blocks = -(-vocab_size // _BLOCK)
        self._blocks = hashed_indices(self._num_blocks, device)[None]
        self._tokens = hashed_indices(self._num_blocks * _BLOCK, device).view(-1, _BLOCK)

    def draw(
        self,
        scores: torch.Tensor,  # [N, V] float32; -inf is never drawn
        requests: npt.NDArray[np.int64],  # their rows in the table
        positions: npt.NDArray[np.int64],
        table: SamplingTable,
    ) -> torch.Tensor:
        """Returns int64 [N], with -1 for a row that has NaN or infinity, or only -inf."""
        device, count = scores.device, len(requests)
        temperature = to_device(table.temperature[requests], device)[:, None]
        scaled = scores / temperature
        if padding := self._num_blocks * _BLOCK - self._vocab:
            scaled = torch.nn.functional.pad(scaled, (0, padding), value=_NEVER)
        rows = LogitRows(scaled)
        bound = lower_bounds(rows, self._vocab, table.top_k[requests], table.top_p[requests], table.min_p[requests])
        seeds = table.seed[requests]
        first, second = (to_device(noise_keys(seeds, positions, stream), device) for stream in (0, 1))
        sums = self._block_sums(rows, bound)
        # NaN wins, so that the caller notices it.
        won, block = sums.log_().sub_(log_exponential(first, self._blocks)).max(dim=1)
        inside = scaled.view(count, self._num_blocks, _BLOCK)[torch.arange(count, device=device), block]
        if bound is not None:
            inside.masked_fill_(inside < bound, _NEVER)
        best, token = inside.sub_(log_exponential(second, self._tokens[block])).max(dim=1)
        return (block * _BLOCK + token).where(won.isfinite() & best.isfinite(), -1)

    def _block_sums(self, rows: LogitRows, bound: torch.Tensor | None) -> torch.Tensor:
        """[N, blocks]: the summed weights of the tokens above the bound, by block."""
        if bound is None:
            return self._summed(rows.weights)
        if bound.device.type != "cpu":
            return self._summed(rows.weights.masked_fill(rows.scaled < bound, 0))
        # Usually all tokens above the bound are among the candidates. The path is chosen for each row by itself, so that its result
        # does not depend on other rows.
        values, tokens = rows.candidates
        few = values[:, -1] < bound[:, 0]
        each = (values - rows.largest).exp_().masked_fill_(values < bound, 0)
        sums = torch.zeros(len(bound), self._num_blocks)
        sums.scatter_add_(1, tokens // _BLOCK, each)
        if not bool(few.all()):
            many = torch.nonzero(~few)[:, 0]
            sums[many] = self._summed(rows.weights[many].masked_fill_(rows.scaled[many] < bound[many], 0))
        return sums

    def _summed(self, weights: torch.Tensor) -> torch.Tensor:
        return row_sums(weights.view(weights.shape[0], self._num_blocks, _BLOCK))


_M1, _M2 = 0x7FEB352D, 0x846CA68B - (1 << 32)  # "lowbias32": a well-mixing bijection of 32 bits
_U64 = np.uint64


def _mix64(x: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """SplitMix64's finalizer."""
    x = (x ^ (x >> _U64(30))) * _U64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> _U64(27))) * _U64(0x94D049BB133111EB)
    return x ^ (x >> _U64(31))


def noise_keys(seeds: npt.NDArray[np.uint64], positions: npt.NDArray[np.int64], stream: int) -> npt.NDArray[np.int32]:
    """[N, 2]: 64 bits for each (seed, position). Different streams are independent."""
    place = positions.astype(np.uint64) * _U64(0xD1342543DE82EF95) + _U64(stream)
    return _mix64(_mix64(seeds + _U64(0x9E3779B97F4A7C15)) + place).view(np.int32).reshape(-1, 2)


def _fold(x: torch.Tensor, bits: int) -> torch.Tensor:
    """x ^= x >> bits, shifting zeros in. In place."""
    return x.bitwise_xor_((x >> bits).bitwise_and_((1 << (32 - bits)) - 1))


def hashed_indices(count: int, device: torch.device) -> torch.Tensor:
    """Hashes of the indices 0 .. count - 1 for `log_exponential`, which may be computed once."""
    x = torch.arange(count, dtype=torch.int32, device=device)
    # int32 products wrap around, which is wanted.
    return _fold(_fold(_fold(x, 16).mul_(_M1), 15).mul_(_M2), 16)


def log_exponential(keys: torch.Tensor, hashed: torch.Tensor) -> torch.Tensor:
    """The logarithm of an exponential variate, float32 [N, C]: for keys [N, 2] and hashed indices [N or 1, C]."""
    x = hashed ^ keys[:, :1]
    x = _fold(_fold(x, 16).mul_(_M1).add_(keys[:, 1:]), 15).mul_(_M2)
    bits = _fold(x, 16)
    # In (0, 1) without its ends: 2**-33 plus a multiple of 2**-32.
    uniform = bits.double().mul_(2.0**-32).add_(0.5 + 2.0**-33)
    return uniform.log_().neg_().log_().float()


class Sampler:
    """Chooses one token per row. A row is a request and a position, the index of the token to choose."""

    def __init__(
        self, vocab_size: int, eos_token_ids: frozenset[int], device: torch.device, masks: TokenMasks | None = None
    ) -> None:
        self._eos = eos_token_ids
        self._drawing = TokenDraw(vocab_size, device)
        self._masks = masks
        self.failed: dict[int, TandemError] = {}  # by row, why the last call could choose no token

    def sample(
        self,
        logits: torch.Tensor,  # [S, V]
        rows: npt.NDArray[np.int64],
        positions: npt.NDArray[np.int64],
        requests: RequestRows,
        table: SamplingTable,
    ) -> torch.Tensor:
        """Returns int64 [S] on the logits' device. A row gets -1 if no token can be chosen, because a logit is NaN or only -inf is
        left. Does not change `logits`."""
        edited, penalized = table.edited[rows].any(), table.penalized[rows].any()
        self.failed = {}
        constrained = self._masks is not None and table.constrained[rows].any()
        scores = logits.float()
        if (edited or penalized or constrained) and scores is logits:
            scores = logits.clone()
        if edited:
            edit_logits(scores, rows, positions, requests, table, self._eos)
        if penalized:
            penalize(scores, rows, positions, requests, table)
        if self._masks is not None and constrained:
            self._masks.apply(scores, logits, rows, positions, requests, table)
            self.failed = self._masks.failed
        random = np.flatnonzero(table.temperature[rows] > 0)
        if random.size == len(rows):
            return self._drawing.draw(scores, rows, positions, table)
        # torch.max finds the first of equals, like argmax, and is faster on a CPU. NaN is larger than anything to it.
        best = scores.max(dim=1)
        chosen = best.indices.where(best.values.isfinite(), -1)
        if random.size:
            index = to_device(random, logits.device)
            chosen[index] = self._drawing.draw(scores[index], rows[random], positions[random], table)
        return chosen
