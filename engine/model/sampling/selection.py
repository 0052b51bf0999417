"""Selects a bound among a row's logits on a device whose results the host must not wait for: digit by digit, without sorting."""

from __future__ import annotations

import torch

# A logit has 33 bits in three digits. Weights are multiples of 1 / _ONE.
_DIGIT, _SHIFTS = 11, (22, 11, 0)
_ONE = float(1 << 40)
_AT_ONCE = 1 << 23  # logits in one slice: their digits and weights take 32 bytes each


def reaching_weight(scaled: torch.Tensor, weights: torch.Tensor, share: torch.Tensor) -> torch.Tensor:
    """The bounds by `_reaching`, with weights as integers: their sums are exact, in any order in which a device adds them."""
    return torch.cat(
        [
            _reaching(some, whole := (part * _ONE).long(), _part_of(whole, of_some))
            for some, part, of_some in zip(*(_slices(t, scaled) for t in (scaled, weights, share)), strict=True)
        ]
    )


def reaching_count(scaled: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """Each row's largest logit that so many logits are not smaller than."""
    parts = (_slices(tensor, scaled) for tensor in (scaled, counts))
    return torch.cat([_reaching(some, None, of_some) for some, of_some in zip(*parts, strict=True)])


def _slices(tensor: torch.Tensor, scaled: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return torch.split(tensor, max(1, _AT_ONCE // scaled.shape[1]))


def _part_of(weights: torch.Tensor, share: torch.Tensor) -> torch.Tensor:
    total = weights.sum(dim=1, keepdim=True)
    return (total.double() * share).ceil().long().clamp_(min=1).minimum(total)


def _reaching(scaled: torch.Tensor, weights: torch.Tensor | None, wanted: torch.Tensor) -> torch.Tensor:
    """Returns [N, 1]: the largest logit for which the logits that are not smaller have at least the weight `wanted` together. Without
    weights each logit weighs 1.

    It finds the logit's distance below its row's largest, counted in float32 numbers, digit by digit. So it sorts nothing, and the
    host never waits for the device.
    """
    bits = scaled.view(torch.int32)
    rank = bits.bitwise_xor((bits >> 31) & 0x7FFFFFFF).long()  # in the order of the numbers
    largest = rank.amax(dim=1, keepdim=True)
    below = largest - rank
    count = scaled.shape[0]
    found = torch.zeros(count, 1, dtype=torch.int64, device=scaled.device)
    # The weight of all logits that are larger than those with the digits found so far.
    before = torch.zeros_like(found)
    # Logits with other digits add nothing, each to the bin of its column: a device adds to one bin by one processor at a time.
    anywhere = torch.arange(scaled.shape[1], device=scaled.device) % (1 << _DIGIT)
    for shift in _SHIFTS:
        digit = (below >> shift) - (found << _DIGIT)
        inside = (digit >= 0) & (digit < 1 << _DIGIT)
        each = inside.long() if weights is None else weights.masked_fill(~inside, 0)
        sums = torch.zeros(count, 1 << _DIGIT, dtype=torch.int64, device=scaled.device)
        sums.scatter_add_(1, digit.where(inside, anywhere), each)
        earlier = sums.cumsum(dim=1).sub_(sums).add_(before)
        place = (earlier < wanted).sum(dim=1, keepdim=True).sub_(1).clamp_(min=0)
        before = earlier.gather(1, place)
        found = (found << _DIGIT) + place
    rank = (largest - found).int()
    return rank.bitwise_xor((rank >> 31) & 0x7FFFFFFF).view(torch.float32)
