"""Vectors equal what transformers' model without a head leaves, pooled as sentence-transformers does, however prompts are cut."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from transformers import AutoModel

from tandem.base.errors import ConfigurationError
from tandem.wire.pooling import Pooling, PoolingKind
from tests.engine.model import tiny
from tests.engine.model.driver import Driver, load
from tests.more import more

LENGTHS = (1, 5, 23, 37)
SIZE = 32
TOLERANCE = 1e-3
KINDS = tuple(PoolingKind)
# As the files beside a checkpoint name them.
MODES = {
    PoolingKind.CLS: "pooling_mode_cls_token",
    PoolingKind.MEAN: "pooling_mode_mean_tokens",
    PoolingKind.LAST: "pooling_mode_lasttoken",
}

OTHERS = [("llama", True), ("llama", False), ("gpt2", False)]

Vector = npt.NDArray[np.float64]


def write_pooling(
    folder: Path, kind: PoolingKind, *, normalize: bool = True, further: tuple[str, ...] = (), **config: Any
) -> None:
    """The files that sentence-transformers writes."""
    names = ["Transformer", "Pooling", *further, *(["Normalize"] if normalize else [])]
    modules = [
        {"idx": index, "name": str(index), "path": f"{index}_{name}" if index else "", "type": f"sentence_transformers.models.{name}"}
        for index, name in enumerate(names)
    ]  # fmt: skip
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling").mkdir(exist_ok=True)
    modes = dict.fromkeys(MODES.values(), False) | {"pooling_mode_max_tokens": False, MODES[kind]: True}
    content = {"word_embedding_dimension": SIZE, **modes, "include_prompt": True} | config
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(content))


def reference(path: Path, prompts: list[list[int]]) -> list[Vector]:
    """The last hidden states of each prompt, [tokens, size]."""
    model = AutoModel.from_pretrained(path, dtype=torch.float32, attn_implementation="eager").eval()
    with torch.inference_mode():
        return [model(input_ids=torch.tensor([prompt])).last_hidden_state[0].double().numpy() for prompt in prompts]


def pooled(hidden: Vector, kind: PoolingKind, *, normalize: bool = True, dimensions: int | None = None) -> Vector:
    """sentence-transformers' `Pooling`, its truncation, and `Normalize`."""
    match kind:
        case PoolingKind.MEAN:
            vector = hidden.mean(axis=0)
        case PoolingKind.LAST:
            vector = hidden[-1]
        case PoolingKind.CLS:
            vector = hidden[0]
    vector = vector[:dimensions]
    return vector / np.linalg.norm(vector) if normalize else vector


class Case:
    def __init__(self, architecture: str, native: bool, folder: Path) -> None:
        self.path = tiny.save(architecture, folder)
        write_pooling(self.path, PoolingKind.LAST)
        rng = random.Random(architecture)
        self.prompts = [[rng.randrange(3, tiny.VOCAB) for _ in range(length)] for length in LENGTHS]
        self.hidden = reference(self.path, self.prompts)
        self.runner = load(self.path, native=native)


@pytest.fixture(
    scope="module",
    params=[("qwen3", True), ("mistral-window", True), ("gemma3", False), *more((each,) for each in OTHERS)],
    ids=lambda v: v[0] if v[1] else f"{v[0]}-by-transformers",
)  # fmt: skip
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    return Case(*request.param, tmp_path_factory.mktemp("models"))  # type: ignore[call-arg]


def finish(driver: Driver, most: int = 1 << 30) -> None:
    """Every vector, in chunks of random size."""
    while unfinished := [r for r in driver.requests.values() if r.pooling and r.vector is None]:
        driver.step({r.req_id: driver.random.randint(1, min(most, r.pending)) for r in unfinished})


def check(driver: Driver, case: Case, name: str, prompt: int, asked: Pooling) -> None:
    expected = pooled(case.hidden[prompt], asked.kind, normalize=asked.normalize, dimensions=asked.dimensions)
    assert driver.requests[name].vector == pytest.approx(expected, abs=TOLERANCE)


@pytest.mark.parametrize("asked", [*map(Pooling, KINDS), Pooling(PoolingKind.MEAN, dimensions=7)], ids=str)
def test_each_kind_in_chunks_of_any_size(case: Case, asked: Pooling) -> None:
    """Fewer dimensions are cut before the length is made one. One that is preempted begins again."""
    driver = Driver(case.runner, seed=3)
    for index, prompt in enumerate(case.prompts):
        driver.add(f"r{index}", prompt, pooling=asked)
    driver.step({"r3": 20})
    driver.preempt("r3")
    driver.step({})
    finish(driver, most=9)
    for index in range(len(case.prompts)):
        check(driver, case, f"r{index}", index, asked)
    driver.finish_all()


def test_vectors_and_answers_share_steps(case: Case) -> None:
    """Neither changes the other's: the same tokens, and the same vectors, as alone."""
    alone = Driver(case.runner)
    alone.add("text", case.prompts[2])
    tokens = alone.generate(6)["text"]
    alone.finish_all()
    driver = Driver(case.runner, seed=5)
    driver.add("text", case.prompts[2])
    for index, kind in enumerate(KINDS):
        driver.add(f"v{index}", case.prompts[3], pooling=Pooling(kind, normalize=False))
    while (text := driver.requests["text"]) and len(text.output) < 6:
        live = [r for r in driver.requests.values() if r.vector is None]
        driver.step({r.req_id: driver.random.randint(1, min(11, r.pending)) for r in live})
    finish(driver)
    assert driver.requests["text"].output == tokens
    for index, kind in enumerate(KINDS):
        check(driver, case, f"v{index}", 3, Pooling(kind, normalize=False))
    driver.finish_all()


def test_the_last_tokens_vector_may_begin_with_a_cached_prefix(case: Case) -> None:
    driver = Driver(case.runner)
    driver.add("first", case.prompts[3])
    driver.step({"first": 33})  # a window forgets no more than the second needs
    driver.add("second", case.prompts[3], pooling=Pooling(PoolingKind.LAST), prefix_of="first", shared_tokens=32)
    finish(driver)
    check(driver, case, "second", 3, Pooling(PoolingKind.LAST))
    driver.finish_all()


def test_what_is_no_number_is_an_error(case: Case) -> None:
    driver = Driver(case.runner)
    driver.add("r", case.prompts[2], pooling=Pooling(PoolingKind.LAST))
    driver.step({"r": 8})
    driver.runner.kv_cache[driver.requests["r"].blocks[-1][-1]] = float("nan")
    driver.failing.add("r")
    driver.step({"r": driver.requests["r"].pending})
    assert driver.last.errors["r"].code == "invalid_logits"
    driver.finish_all()


@pytest.mark.parametrize("native", [True, False])
@pytest.mark.parametrize("architecture", ["qwen3", "llama"])
def test_a_checkpoint_without_a_head(tmp_path: Path, architecture: str, native: bool) -> None:
    """As embedding models are saved: names without what stands for the body, and, where it is not tied, no head."""
    path = tmp_path / "bare"
    tiny.build(architecture).base_model.save_pretrained(path)
    write_pooling(path, PoolingKind.LAST)
    runner = load(path, native=native)
    assert runner.info.vectors is not None
    assert runner.info.vectors.generates == (architecture == "llama")  # which is tied
    prompt = list(range(3, 30))
    driver = Driver(runner)
    driver.add("r", prompt, pooling=Pooling(PoolingKind.LAST))
    finish(driver)
    (hidden,) = reference(path, [prompt])
    assert driver.requests["r"].vector == pytest.approx(pooled(hidden, PoolingKind.LAST), abs=TOLERANCE)
    # For text it lacks something, where it does.
    if architecture == "qwen3":
        with pytest.raises(ConfigurationError, match=r"lacks lm_head\.weight"):
            load(path, native=native, pooling="none")


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.save("qwen3", tmp_path_factory.mktemp("plain"))


def told(path: Path, pooling: str = "auto") -> Pooling | None:
    vectors = load(path, pooling=pooling).info.vectors
    return vectors.pooling if vectors is not None else None


def test_the_files_say_it_and_the_setting_overrides_them(plain: Path) -> None:
    assert told(plain) is None
    assert told(plain, "mean") == Pooling(PoolingKind.MEAN)
    for kind in KINDS:
        write_pooling(plain, kind, normalize=False)
        assert told(plain) == Pooling(kind, normalize=False)
    assert told(plain, "none") is None
    assert told(plain, "last") == Pooling(PoolingKind.LAST)


@pytest.mark.parametrize(
    ("change", "modules", "why"),
    [
        ({"further": ("Dense",)}, "", "a Dense, which is not computed here.*model.pooling"),
        ({"pooling_mode_max_tokens": True}, "", "its pooling is.*model.pooling"),
        ({"pooling_mode_lasttoken": False}, "", "its pooling is not given.*model.pooling"),
        ({}, "{}", "no list of modules"),
    ],
)
def test_what_is_not_computed_is_refused(plain: Path, change: dict[str, Any], modules: str, why: str) -> None:
    write_pooling(plain, PoolingKind.LAST, **change)
    if modules:
        (plain / "modules.json").write_text(modules)
    with pytest.raises(ConfigurationError, match=why):
        load(plain)


@pytest.mark.parametrize(
    ("written", "why"),
    [
        ({"is_causal": False}, "attend to those after them"),
        ({"use_bidirectional_attention": True}, "attend to those after them"),
        ({"architectures": ["Qwen3ForSequenceClassification"]}, "scores pairs of texts with a head of its own"),
    ],
)
def test_other_attention_and_other_heads_are_refused(tmp_path: Path, written: dict[str, Any], why: str) -> None:
    path = tiny.save("qwen3", tmp_path)
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | written))
    with pytest.raises(ConfigurationError, match=why):
        load(path, pooling="mean")
