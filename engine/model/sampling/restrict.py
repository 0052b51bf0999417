"""min_p, top_k and top_p, each as a lower bound on a token's logit.

A bound keeps ties: tokens with equal logits are all in or all out. So which tokens may be sampled depends on
nothing but the row itself, whatever else is in the batch and whichever way the bound was found.
"""

from __future__ import annotations

import functools

import numpy as np
import numpy.typing as npt
import torch

from tandem.engine.model.staging import to_device

# So many of the most likely tokens are looked at first. Restrictions usually leave fewer.
_CANDIDATES = 128
# Where they leave more: bins of a logit's distance from the largest. Weights beyond the last are below e**-32.
_BINS, _BINS_PER_UNIT = 1024, 32
_TILE = 64
# On a device that is not to be asked: a logit's 33 bits are looked at in three digits. Weights are multiples of
# 1 / _ONE there.
_DIGIT, _SHIFTS = 11, (22, 11, 0)
_ONE = float(1 << 40)
_AT_ONCE = 1 << 23  # logits, whose digits and weights take 32 bytes each meanwhile
_NEVER = float("-inf")


class LogitRows:
    """Rows to draw from: logits over temperature, their width padded to a multiple of the tile with -inf.

    What is derived from them is computed when it is first needed.
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
        """The most likely tokens' logits, in descending order, and the tokens."""
        return most_likely(self.scaled, min(_CANDIDATES, self.scaled.shape[1]))

    def __getitem__(self, index: torch.Tensor) -> LogitRows:
        return LogitRows(self.scaled[index])


def most_likely(scaled: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    if scaled.shape[1] < 4 * count * _TILE:
        values, tokens = scaled.topk(count, dim=1)
        return values, tokens
    # They all lie in the tiles with the `count` largest maxima.
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
    """[N, 1], in this order: min_p, then top_k, then top_p of what is left. None: nothing is restricted."""
    device = rows.scaled.device
    limited_k, limited_p, limited_m = (top_k > 0) & (top_k < vocab), top_p < 1.0, min_p > 0
    if not (limited_k.any() or limited_p.any() or limited_m.any()):
        return None
    bound = torch.full_like(rows.largest, _NEVER)
    if limited_m.any():
        share = to_device(min_p, device)[:, None]
        bound = rows.largest + share.log()  # log(0) leaves a row unbounded
    if limited_k.any():
        off = to_device(~limited_k, device)[:, None]
        bound = torch.maximum(bound, _kth(rows, limited_k, top_k).masked_fill_(off, _NEVER))
    if limited_p.any():
        share = to_device(top_p[limited_p].astype(np.float64), device)[:, None]
        bounded = bool(limited_k.any() or limited_m.any())
        # What top_k leaves of these is among the candidates, but for tokens as likely as the last of them.
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
        parts = (_slices(t, rows.scaled) for t in (rows.scaled, wanted))
        return torch.cat([_selected(some, None, of_some) for some, of_some in zip(*parts, strict=True)])
    values = rows.candidates[0] if most <= _CANDIDATES else most_likely(rows.scaled, most)[0]
    return values.gather(1, wanted - 1)


def _reaching(
    rows: LogitRows, bound: torch.Tensor, bounded: bool, few: bool, share: torch.Tensor
) -> torch.Tensor:
    """The bound of the smallest set of most likely tokens whose weights reach the share of all that are in."""
    weights = rows.weights.masked_fill(rows.scaled < bound, 0) if bounded else rows.weights
    if rows.scaled.device.type != "cpu" and not few:
        # Asking a device whether the candidates would do is a wait.
        return _selected_by_weight(rows.scaled, weights, share)
    tiles = weights.view(weights.shape[0], -1, _TILE).sum(dim=2)
    wanted = tiles.sum(dim=1, dtype=torch.float64, keepdim=True) * share
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
    """The smallest of the values, in descending order, before which the weights have not reached what is wanted."""
    inside = before < wanted
    inside[:, 0] = True
    return values.masked_fill(~inside, float("inf")).amin(dim=1, keepdim=True)


def _bound_by_bins(rows: LogitRows, weights: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    """Sums weights by bin, finds the bin in which the sum reaches what is wanted, and sorts only that one."""
    place = ((rows.largest - rows.scaled) * _BINS_PER_UNIT).clamp_(max=_BINS - 1).long()
    sums = torch.zeros(len(wanted), _BINS, dtype=torch.float64, device=weights.device)
    sums.scatter_add_(1, place, weights.double())
    cumulative = sums.cumsum(dim=1)
    # Rounding must not push the end out of the last bin.
    last = (cumulative < wanted).sum(dim=1, keepdim=True).clamp_(max=_BINS - 1)
    already = (cumulative - sums).gather(1, last)
    member = place == last
    most = int(member.sum(dim=1).max())
    values, tokens = rows.scaled.masked_fill(~member, float("-inf")).topk(most, dim=1)
    each = weights.gather(1, tokens).double()
    return _bound_among(values, already + each.cumsum(dim=1) - each, wanted)


def _selected_by_weight(scaled: torch.Tensor, weights: torch.Tensor, share: torch.Tensor) -> torch.Tensor:
    """Integers: their sums are exact, in whatever order a device adds them up."""
    return torch.cat(
        [
            _selected(some, whole := (part * _ONE).long(), _part_of(whole, of_some))
            for some, part, of_some in zip(
                *(_slices(t, scaled) for t in (scaled, weights, share)), strict=True
            )
        ]
    )


def _slices(tensor: torch.Tensor, scaled: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return torch.split(tensor, max(1, _AT_ONCE // scaled.shape[1]))


def _part_of(weights: torch.Tensor, share: torch.Tensor) -> torch.Tensor:
    total = weights.sum(dim=1, keepdim=True)
    return (total.double() * share).ceil().long().clamp_(min=1).minimum(total)


def _selected(scaled: torch.Tensor, weights: torch.Tensor | None, wanted: torch.Tensor) -> torch.Tensor:
    """[N, 1]: the largest logit such that all that are as large or larger weigh what is wanted together; each weighs 1
    without weights.

    Digit by digit of where a logit stands below its row's largest, among all float32 numbers: nothing is sorted, and
    nothing is asked of the device.
    """
    bits = scaled.view(torch.int32)
    rank = bits.bitwise_xor((bits >> 31) & 0x7FFFFFFF).long()  # in the order of the numbers
    largest = rank.amax(dim=1, keepdim=True)
    below = largest - rank
    count = scaled.shape[0]
    found = torch.zeros(count, 1, dtype=torch.int64, device=scaled.device)
    before = torch.zeros_like(found)  # the weight of all that are larger than what was found so far
    for shift in _SHIFTS:
        digit = (below >> shift) - (found << _DIGIT)
        inside = (digit >= 0) & (digit < 1 << _DIGIT)
        each = inside.long() if weights is None else weights.masked_fill(~inside, 0)
        sums = torch.zeros(count, 1 << _DIGIT, dtype=torch.int64, device=scaled.device)
        sums.scatter_add_(1, digit.clamp_(0, (1 << _DIGIT) - 1), each)
        earlier = sums.cumsum(dim=1).sub_(sums).add_(before)
        place = (earlier < wanted).sum(dim=1, keepdim=True).sub_(1).clamp_(min=0)
        before = earlier.gather(1, place)
        found = (found << _DIGIT) + place
    rank = (largest - found).int()
    return rank.bitwise_xor((rank >> 31) & 0x7FFFFFFF).view(torch.float32)
