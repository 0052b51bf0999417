"""What is sampled follows the exact distribution, and depends on seed and position alone."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from tandem.engine.model.batching import RequestRows, SamplingTable
from tandem.engine.model.sampling import sampler
from tandem.engine.model.sampling.sampler import Sampler, TokenDraw, hashed_indices, log_exponential, noise_keys
from tandem.engine.model.sampling.selection import reaching_count, reaching_weight
from tandem.wire.sampling import SamplingParams
from tests.engine.model.fake_device import CUDA, FakeDevice

VOCAB = 40
DRAWS = 2000
EOS = frozenset({2, 5})


class Bench:
    """A sampler for requests that consist only of their tokens so far."""

    def __init__(self, vocab: int = VOCAB, capacity: int = 8, max_tokens: int = 64) -> None:
        self.requests = RequestRows(capacity, max_tokens, 4, 1)
        self.table = SamplingTable(capacity)
        self.sampler = Sampler(vocab, EOS, torch.device("cpu"))

    def add(self, name: str, prompt: list[int], output: list[int], **params: Any) -> int:
        row = self.requests.add(name, prompt + output, len(prompt), [[]])
        self.table.set(row, SamplingParams(**params))
        return row

    def sample(self, logits: torch.Tensor, rows: list[int]) -> list[int]:
        index = np.array(rows)
        positions = self.requests.num_tokens[index].astype(np.int64)
        return self.sampler.sample(logits, index, positions, self.requests, self.table).tolist()

    def histogram(self, logits: torch.Tensor, prompt: list[int], output: list[int], **params: Any) -> torch.Tensor:
        """Relative frequency of each token over many seeds."""
        counts = torch.zeros(logits.shape[0])
        rows = [self.add(f"r{i}", prompt, output, **params) for i in range(len(self.table.seed))]
        batch = logits.expand(len(rows), -1)
        for start in range(0, DRAWS, len(rows)):
            for offset, row in enumerate(rows):
                self.table.seed[row] = start + offset
            for token in self.sample(batch, rows):
                counts[token] += 1
        return counts / counts.sum()


def bench(capacity: int = 250, vocab: int = VOCAB) -> Bench:
    return Bench(vocab, capacity)


def logits_of(seed: int, vocab: int = VOCAB) -> torch.Tensor:
    return torch.randn(vocab, generator=torch.Generator().manual_seed(seed)) * 2


def assert_follows(frequencies: torch.Tensor, expected: torch.Tensor) -> None:
    """Pearson's statistic, over cells with enough in them, is below what chance exceeds once in ten thousand."""
    assert frequencies[expected == 0].sum() == 0
    observed, wanted = frequencies * DRAWS, expected * DRAWS
    small = wanted < 5
    cells = [(observed[i], wanted[i]) for i in range(len(wanted)) if not small[i]]
    if wanted[small].sum() >= 5:
        cells.append((observed[small].sum(), wanted[small].sum()))
    statistic = float(sum((o - w) ** 2 / w for o, w in cells))
    freedom = len(cells) - 1
    # Wilson and Hilferty's normal approximation of the chi-squared quantile.
    limit = freedom * (1 - 2 / (9 * freedom) + 3.72 * math.sqrt(2 / (9 * freedom))) ** 3 if freedom else 1e-9
    assert statistic <= limit


def by_definition(
    logits: torch.Tensor, *, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0
) -> torch.Tensor:
    """The distribution: of the `top_k` most likely, the smallest set that reaches `top_p`, and of it what has `min_p` of the best."""
    kept = logits / temperature
    if top_k:
        kept = kept.masked_fill(kept < kept.topk(top_k).values[-1], float("-inf"))
    if top_p < 1:
        probabilities, order = kept.softmax(-1).sort(descending=True)
        size = int((probabilities.double().cumsum(0) - probabilities < top_p).sum())
        kept[order[size:]] = float("-inf")
    probabilities = kept.softmax(-1)
    return kept.masked_fill(probabilities < min_p * probabilities.max(), float("-inf")).softmax(-1)


@pytest.mark.parametrize(
    ("seed", "vocab", "asked"),
    [
        (0, VOCAB, {}),
        *((1, VOCAB, {"temperature": temperature}) for temperature in (0.5, 1.7)),
        # Also where the vocabulary is large enough that only candidates are looked at.
        *((2, vocab, {"top_k": 7}) for vocab in (VOCAB, 3000)),
        *((3, vocab, {"top_p": share}) for vocab, share in ((VOCAB, 0.7), (1200, 0.5), (1200, 0.97))),
        (4, VOCAB, {"min_p": 0.1}),
        (5, VOCAB, {"top_k": 6, "top_p": 0.8}),
    ],
    ids=str,
)
def test_tokens_follow_the_distribution_by_its_definition(seed: int, vocab: int, asked: dict[str, Any]) -> None:
    logits = logits_of(seed, vocab)
    assert_follows(bench(vocab=vocab).histogram(logits, [1], [], **asked), by_definition(logits, **asked))


def test_penalties_follow_their_definitions() -> None:
    logits = logits_of(6)
    prompt, output = [3, 4, 4], [6, 7, 7, 7]
    expected = logits.clone()
    for token in {3, 4, 6, 7}:
        expected[token] = expected[token] / 1.3 if expected[token] > 0 else expected[token] * 1.3
    expected[6] -= 0.4 + 0.7
    expected[7] -= 0.4 * 3 + 0.7
    frequencies = bench().histogram(
        logits, prompt, output, repetition_penalty=1.3, frequency_penalty=0.4, presence_penalty=0.7
    )
    assert_follows(frequencies, expected.softmax(-1))


def test_logit_bias_is_added() -> None:
    logits = logits_of(7)
    expected = logits.clone()
    expected[9] += 2.5
    expected[11] -= 100
    frequencies = bench().histogram(logits, [1], [], logit_bias={9: 2.5, 11: -100.0, VOCAB + 5: 100.0})
    assert frequencies[11] == 0
    assert_follows(frequencies, expected.softmax(-1))


def test_a_bias_of_the_whole_vocabulary_is_read_once() -> None:
    """All requests share the steps, and Python takes 7 ms to read one: a request with 128 choices held up each step by a second."""

    class Read(dict[int, float]):
        times = 0

        def __iter__(self) -> Iterator[int]:
            self.times += 1
            return super().__iter__()

        def __getitem__(self, token: int) -> float:
            self.times += 1
            return super().__getitem__(token)

    biases = Read(dict.fromkeys(range(VOCAB), 1.0))
    run = bench(1)
    row = run.add("r", [1], [4], temperature=0.0, logit_bias=biases)
    read = biases.times
    for _ in range(3):
        run.sample(logits_of(7)[None], [row])
    assert biases.times == read


def test_bad_words_are_not_completed_but_may_begin() -> None:
    one, several = bench(1), bench(1)
    logits = torch.zeros(VOCAB)
    logits[8], logits[9] = 10.0, 9.0
    free = one.add("free", [1], [4], temperature=0.0, bad_words=[[4, 5, 8], [9, 8]])
    assert one.sample(logits[None], [free]) == [8]
    caught = several.add("caught", [1], [4, 5], temperature=0.0, bad_words=[[4, 5, 8], [9]])
    logits[9] = 9.5
    assert several.sample(logits[None], [caught])[0] not in (8, 9)


@pytest.mark.parametrize(
    ("output", "ignore_eos", "allowed"),
    [([], False, False), ([4], False, False), ([4, 4], False, True), ([], True, True)],
)
def test_min_tokens_bans_the_tokens_that_would_end_it(output: list[int], ignore_eos: bool, allowed: bool) -> None:
    run = bench(1)
    logits = torch.zeros(VOCAB)
    logits[2] = 10.0
    row = run.add("r", [1], output, temperature=0.0, min_tokens=2, ignore_eos=ignore_eos, stop_token_ids=[9])
    assert (run.sample(logits[None], [row]) == [2]) is allowed
    logits[2], logits[9] = 0.0, 10.0
    assert (run.sample(logits[None], [row]) == [9]) is (len(output) == 2)


def test_greedy_is_the_first_of_the_largest() -> None:
    run = bench(2)
    rows = [run.add("a", [1], [], temperature=0.0), run.add("b", [1], [], temperature=0.9, top_k=1)]
    logits = torch.zeros(2, VOCAB, dtype=torch.bfloat16)
    logits[:, [30, 17]] = 3.0
    assert run.sample(logits, rows) == [17, 17]


def test_sampling_leaves_the_logits_as_they_were() -> None:
    """They are read again for log-probabilities, which are the model's own."""
    run = bench(2)
    rows = [
        run.add("a", [1], [3], temperature=0.0, logit_bias={3: 5.0}),
        run.add("b", [1], [3], top_p=0.5, presence_penalty=1.0),
    ]
    logits = torch.stack([logits_of(8), logits_of(9)])
    before = logits.clone()
    run.sample(logits, rows)
    assert torch.equal(logits, before)


_PARAMS = st.fixed_dictionaries({
    "temperature": st.sampled_from([0.0, 0.3, 1.0, 2.0]), "top_k": st.sampled_from([0, 1, 5, 2000]),
    "top_p": st.sampled_from([1.0, 0.9, 0.3]), "min_p": st.sampled_from([0.0, 0.05]),
    "presence_penalty": st.sampled_from([0.0, 0.8]), "repetition_penalty": st.sampled_from([1.0, 1.2]),
    "seed": st.integers(-(2**63), 2**64 - 1)
})  # fmt: skip


@settings(max_examples=60, deadline=None)
@given(st.lists(_PARAMS, min_size=2, max_size=6), st.integers(0, 1000))
def test_a_row_is_sampled_the_same_alone_and_in_any_batch(requests: list[dict[str, Any]], seed: int) -> None:
    vocab = 3000
    run = bench(8, vocab)
    # Half-precision logits, where equal values are common.
    logits = torch.stack([logits_of(seed + i, vocab) for i in range(len(requests))]).bfloat16()
    rows = [run.add(f"r{i}", [1, i], [i + 3], **params) for i, params in enumerate(requests)]
    together = run.sample(logits, rows)
    alone = [run.sample(logits[i : i + 1], [row])[0] for i, row in enumerate(rows)]
    reversed_ = run.sample(logits.flip(0), rows[::-1])[::-1]
    assert together == alone == reversed_


def variates(seeds: list[int], positions: list[int], count: int, stream: int = 0) -> torch.Tensor:
    keys = noise_keys(np.array(seeds, np.uint64), np.array(positions), stream)
    return log_exponential(torch.from_numpy(keys), hashed_indices(count, torch.device("cpu"))[None])


def test_noise_differs_between_positions_seeds_and_streams() -> None:
    drawn = torch.cat([variates([1, 1, 2, 2**64 - 1], [5, 6, 5, 5], 1000), variates([1], [5], 1000, stream=1)])
    assert (torch.corrcoef(drawn) - torch.eye(5)).abs().max() < 0.15
    assert drawn.isfinite().all()
    # The mean and the deviation of an exponential variate's logarithm.
    assert drawn.mean() == pytest.approx(-0.5772, abs=0.06)
    assert drawn.std() == pytest.approx(math.pi / math.sqrt(6), abs=0.06)


@pytest.mark.parametrize("vocab", [4, 600])
def test_neighbouring_positions_are_independent(vocab: int) -> None:
    """Over many positions of one seed each of four tokens is as likely as any other, after any other; also when
    they lie in different blocks of the vocabulary."""
    scores = torch.full((8000, vocab), float("-inf"))
    likely = [0, 1, 2, 3] if vocab == 4 else [0, 1, 300, 599]
    scores[:, likely] = 1.0
    table = SamplingTable(1)
    table.set(0, SamplingParams(seed=7))
    one_request = np.zeros(8000, np.int64)
    chosen = TokenDraw(vocab, torch.device("cpu")).draw(scores, one_request, np.arange(8000), table)
    pairs = torch.zeros(4, 4)
    for before, after in zip(chosen[:-1].tolist(), chosen[1:].tolist(), strict=True):
        pairs[likely.index(before), likely.index(after)] += 1
    expected = 7999 / 16
    # 15 degrees of freedom; chance exceeds 44 once in ten thousand.
    assert float(((pairs - expected) ** 2 / expected).sum()) < 44


def test_top_p_is_the_same_set_however_it_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """By sorting all, by a few candidates, or by bins."""
    scaled = torch.stack([logits_of(seed, 2048) * scale for seed in range(8) for scale in (0.1, 1.0, 4.0)])
    top_p = np.tile(np.array([0.1, 0.6, 0.99], np.float32), 8)
    top_k = np.repeat(np.array([0, 1500], np.int64), 12)
    found = []
    for candidates in (2048, 128, 2):
        monkeypatch.setattr(sampler, "_CANDIDATES", candidates)
        bounds = sampler.lower_bounds(sampler.LogitRows(scaled), 2048, top_k, top_p, np.zeros(24, np.float32))
        assert bounds is not None
        found.append(bounds)
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


@st.composite
def _logits(draw: st.DrawFn) -> torch.Tensor:
    """Rows as models make them, and as they do not: spread or alike, with ties and with tokens that are banned."""
    rows, width = draw(st.integers(1, 3)), draw(st.sampled_from([2, 64, 300]))
    torch.manual_seed(draw(st.integers(0, 10_000)))
    scaled = torch.randn(rows, width) * draw(st.sampled_from([0.0, 1e-6, 0.3, 4.0, 60.0]))
    if draw(st.booleans()):
        scaled = scaled.bfloat16().float()  # many are equal
    if draw(st.booleans()):
        scaled = scaled.masked_fill(torch.rand(rows, width) < 0.4, float("-inf"))
        scaled[:, 0] = draw(st.sampled_from([0.0, -3.5, 1e-30]))
    return scaled


@given(_logits(), st.floats(1e-6, 1 - 1e-6))
def test_what_a_device_selects_for_top_p_is_what_sorting_finds(scaled: torch.Tensor, share: float) -> None:
    rows = sampler.LogitRows(scaled)
    shares = torch.full((len(scaled), 1), share, dtype=torch.float64)
    selected = reaching_weight(scaled, rows.weights, shares)
    values = scaled.sort(dim=1, descending=True).values
    weights = (values - rows.largest).exp().double()
    before = weights.cumsum(dim=1) - weights
    wanted = weights.sum(dim=1, keepdim=True) * shares
    # Where the sums are within rounding of what is wanted, either answer is right.
    for slack in (0.0, -1e-9, 1e-9):
        inside = before < wanted * (1 + slack)
        inside[:, 0] = True
        if torch.equal(selected, values.masked_fill(~inside, float("inf")).amin(dim=1, keepdim=True)):
            return
    raise AssertionError((scaled, share, selected))


@given(_logits(), st.data())
def test_what_a_device_selects_for_top_k_is_the_kth(scaled: torch.Tensor, data: st.DataObject) -> None:
    count = data.draw(st.integers(1, scaled.shape[1]))
    selected = reaching_count(scaled, torch.full((len(scaled), 1), count))
    assert torch.equal(selected, scaled.sort(dim=1, descending=True).values[:, count - 1 : count])


class Additions(TorchDispatchMode):
    """Counts, for each time that values are added to bins, the zeros that go to the fullest bin."""

    def __init__(self) -> None:
        super().__init__()
        self.zeros: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.scatter_add_.default:
            _, _, index, values = args
            self.zeros.append(int(index[values == 0].bincount(minlength=1).max()))
        return func(*args, **(kwargs or {}))


def test_a_device_adds_logits_that_count_no_more_to_many_bins() -> None:
    """It adds to one bin after the other, and nearly all of a vocabulary would meet in the first or the last one."""
    torch.manual_seed(0)
    scaled = torch.randn(2, 128_256) * 2
    with Additions() as additions:
        reaching_weight(scaled, sampler.LogitRows(scaled).weights, torch.full((2, 1), 0.9, dtype=torch.float64))
    _, *later = additions.zeros
    assert max(later) <= 2 * -(-128_256 // 2048)


@pytest.mark.parametrize("top_k", [0, 40, 1000])
def test_a_device_draws_the_tokens_that_a_cpu_draws(top_k: int) -> None:
    """And sorts nothing on the way: bounds are selected, or found among the candidates."""
    vocab, count = 40_000, 6
    torch.manual_seed(0)
    logits = torch.randn(count, vocab) * torch.tensor([0.2, 1.0, 3.0] * 2)[:, None]
    table = SamplingTable(count)
    for row in range(count):
        table.set(row, SamplingParams(seed=row, top_p=(0.3, 0.95)[row % 2], top_k=top_k))
    rows = np.arange(count)
    expected = TokenDraw(vocab, torch.device("cpu")).draw(logits, rows, rows, table).tolist()
    device = FakeDevice()
    with device.present(), torch.inference_mode():
        drawing, scores = TokenDraw(vocab, CUDA), logits.to(CUDA)
        waits = device.num_waits
        chosen = drawing.draw(scores, rows, rows, table)
        assert device.num_waits == waits
        assert chosen.tolist() == expected
    assert "sort" not in device.operations
