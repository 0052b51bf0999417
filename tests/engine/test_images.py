"""Prompts with images: the answers of transformers' `generate`, however the prompt is cut, whatever shares the step or the cache, after
preemptions, and on the other side of a handover."""

from __future__ import annotations

import dataclasses
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForImageTextToText

from tandem.base.errors import InvalidRequest
from tandem.engine.config import AsyncScheduling, SchedulerConfig
from tandem.engine.model.vision import tower
from tandem.kvtransfer.config import TierConfig, TransferConfig
from tandem.wire.embeds import PLACEHOLDER, PromptEmbeds
from tandem.wire.images import MediaFeature
from tandem.wire.requests import KVTransferParams, TransferRole
from tests.engine.model.tiny_vision import (
    IDEFICS3,
    QWEN2_5_VL,
    QWEN2_VL,
    QWEN3_VL,
    QWEN3_VL_MOE,
    SMOLVLM,
    VisionFamily,
    prompt_of,
    reference,
)
from tests.integration.one_engine import OneEngine, hand_over
from tests.more import more
from tests.pictures import picture
from tests.waiting import until

NEW_TOKENS = 6
ONE, OTHER, WIDE = picture(1), picture(2), picture(3, 70, 20, "JPEG")
PROMPTS: dict[str, list[str | bytes]] = {
    "one": ["User:", ONE, "What is this?"],
    "other": ["User:", OTHER, "What is this?"],  # the same tokens
    "two": ["Compare ", WIDE, " with ", ONE, "."],
    "image last": ["See", ONE],
    "again": [ONE, OTHER, ONE],
    "text": ["Hello, what do you see?"],
}


@dataclasses.dataclass
class ImageLab:
    family: VisionFamily
    path: Path
    answers: dict[str, list[int]]

    def prompt(self, name: str) -> tuple[list[int], list[MediaFeature], list[bytes]]:
        return prompt_of(PROMPTS[name], self.family)

    def start(
        self,
        transfer: TransferConfig | None = None,
        name: str = "n",
        *,
        batched: int = 64,
        encoded: int = 16,
        kept: int = 64,
        caching: bool = False,
        **scheduling: Any,
    ) -> OneEngine:
        scheduler = SchedulerConfig(
            max_num_seqs=8, max_num_batched_tokens=batched, max_encoder_tokens=encoded, **scheduling
        )
        cache: dict[str, Any] = {"memory_bytes": 4 << 20, "prefix_caching": caching, "encoder_tokens": kept}
        return OneEngine.start(self.path, name, 4, transfer, scheduler=scheduler, **cache)


@pytest.fixture(scope="module", params=["Qwen3-VL", *more(["SmolVLM", "Qwen2.5-VL"])])
def lab(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> ImageLab:
    family = {"SmolVLM": SMOLVLM, "Qwen2.5-VL": QWEN2_5_VL, "Qwen3-VL": QWEN3_VL}[request.param]
    return lab_of(family, tmp_path_factory.mktemp("images"))


def lab_of(family: VisionFamily, folder: Path) -> ImageLab:
    path = family.save(folder)
    found = reference(path, list(PROMPTS.values()), NEW_TOKENS, family)
    answers = dict(zip(PROMPTS, found, strict=True))
    assert answers["one"] != answers["other"]
    return ImageLab(family, path, answers)


def add(engine: OneEngine, lab: ImageLab, name: str, request_id: str | None = None) -> None:
    tokens, media, images = lab.prompt(name)
    engine.add(request_id or name, tokens, NEW_TOKENS, None, media=media, images=images)


def expect_all(engine: OneEngine, lab: ImageLab) -> None:
    for name in PROMPTS:
        add(engine, lab, name)
    assert engine.run_all() == lab.answers


def test_a_prompt_of_rows_beside_images(lab: ImageLab) -> None:
    """Rows that a request brings are narrower than those of a tower that has more to say to the first layers."""
    words, _, _ = prompt_of(["Here is a text."], lab.family)
    (said,) = reference(lab.path, [["Here is a text."]], NEW_TOKENS, lab.family)
    embedding = AutoModelForImageTextToText.from_pretrained(lab.path, dtype=torch.float32).get_input_embeddings()
    with torch.inference_mode():
        rows = embedding(torch.tensor(words)).contiguous()
    embeds = PromptEmbeds("float32", rows.shape[1], rows.numpy().tobytes())
    with lab.start(batched=48, encoded=64, kept=256) as engine:
        assert engine.engine.runner.info.embed_size == rows.shape[1]
        add(engine, lab, "one")
        engine.add("rows", [PLACEHOLDER] * len(words), NEW_TOKENS, None, embeds=embeds)
        add(engine, lab, "two")
        assert engine.run_all() == {"rows": said, "one": lab.answers["one"], "two": lab.answers["two"]}


def encoded_tokens(engine: OneEngine) -> int:
    return engine.engine.scheduler.stats().encoder_tokens


@pytest.mark.parametrize("family", [QWEN2_5_VL, QWEN3_VL_MOE, *more([IDEFICS3, QWEN2_VL])])
def test_their_sisters(family: VisionFamily, tmp_path: Path) -> None:
    lab = lab_of(family, tmp_path)
    with lab.start(batched=11) as engine:
        expect_all(engine, lab)


@pytest.mark.parametrize(
    "options",
    [
        {"batched": 7},
        *more({"batched": size} for size in (1, 64, 512)),
        pytest.param({"batched": 19, "kept": 40, "async_scheduling": AsyncScheduling.ALWAYS}, id="planned ahead"),
        pytest.param({"batched": 19, "kept": 40, "num_speculative_tokens": 3}, id="with drafts"),
        pytest.param({"batched": 19, "kept": 40, "max_loras": 1}, id="where adapters are served"),
        pytest.param({"encoded": 4, "kept": 0}, id="in an encoder cache for one image"),
        pytest.param({"encoded": 4, "kept": 16}, id="and for a bit more"),
        pytest.param({"batched": 512, "encoded": 256, "kept": 256, "chunked_prefill": False}, id="in one piece"),
    ],
    ids=str,
)
def test_any_chunks_beside_any_others(lab: ImageLab, options: dict[str, Any]) -> None:
    largest = max(part.length for name in PROMPTS for part in lab.prompt(name)[1])
    kept = options.get("kept", 64)
    with lab.start(**options | {"kept": kept if kept > 16 else largest + kept}) as engine:
        expect_all(engine, lab)


def test_an_image_that_is_there_is_not_encoded_again(lab: ImageLab) -> None:
    with lab.start(kept=1024) as engine:
        add(engine, lab, "one")
        engine.run_all()
        first = encoded_tokens(engine)
        add(engine, lab, "one", "again")
        add(engine, lab, "image last")
        answers = engine.run_all()
        assert answers == {"again": lab.answers["one"], "image last": lab.answers["image last"]}
        assert encoded_tokens(engine) == first > 0
        assert engine.engine.scheduler.stats().encoder_tokens_reused == 2 * first


def test_a_prefix_is_found_by_prompts_with_the_same_image_alone(lab: ImageLab) -> None:
    with lab.start(caching=True) as engine:
        add(engine, lab, "one")
        engine.run_all()
        before = encoded_tokens(engine)
        add(engine, lab, "one", "again")
        assert engine.run_all() == {"again": lab.answers["one"]}
        length = len(lab.prompt("one")[0])
        assert engine.engine.scheduler.stats().prompt_tokens_cached == (length - 1) // 4 * 4
        assert encoded_tokens(engine) == before  # what is cached needs no image
        add(engine, lab, "other")
        assert engine.run_all() == {"other": lab.answers["other"]}
        common = lab.prompt("other")[1][0].offset // 4 * 4
        assert engine.engine.scheduler.stats().prompt_tokens_cached == (length - 1) // 4 * 4 + common


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"batched": 512, "encoded": 16, "chunked_prefill": False}, r"scheduler\.chunked_prefill"),
        ({"kept": 3}, r"cache\.encoder_tokens"),
    ],
)
def test_an_image_that_there_is_no_room_for_is_refused(lab: ImageLab, options: dict[str, Any], said: str) -> None:
    with lab.start(**options) as engine:
        with pytest.raises(InvalidRequest, match=said):
            add(engine, lab, "one")
        add(engine, lab, "text")
        assert engine.run_all() == {"text": lab.answers["text"]}


def run_all(engine: OneEngine) -> tuple[dict[str, list[int]], dict[str, str]]:
    """The answers, and the codes of the errors."""
    answers: dict[str, list[int]] = {}
    errors: dict[str, str] = {}
    while engine.engine.scheduler.has_unfinished_requests():
        for update in engine.engine.step().updates:
            if update.error is not None:
                errors[update.request_id] = update.error.code
            answers.setdefault(update.request_id, []).extend(update.token_ids)
        engine.engine.scheduler.check_integrity()
    return answers, errors


def add_broken(engine: OneEngine, lab: ImageLab, request_id: str) -> int:
    """Returns where its image begins."""
    tokens, media, _ = lab.prompt("one")
    engine.add(request_id, tokens, NEW_TOKENS, None, media=media, images=[b"no image"])
    return media[0].offset


def test_a_file_that_is_no_image_ends_its_request_and_no_other(lab: ImageLab) -> None:
    with lab.start(caching=True) as engine:
        begin = add_broken(engine, lab, "broken")
        add(engine, lab, "text")
        assert run_all(engine) == ({"text": lab.answers["text"], "broken": []}, {"broken": "invalid_image"})
        # A prompt that names the same image finds what was computed before it, and nothing of what was computed without it.
        cached = engine.engine.scheduler.stats().prompt_tokens_cached
        add_broken(engine, lab, "same")
        run_all(engine)
        assert engine.engine.scheduler.stats().prompt_tokens_cached - cached == begin // 4 * 4


def test_an_image_that_cannot_be_encoded_just_now_fails_one_request_and_is_tried_again(
    lab: ImageLab, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three equal prompts come in one step, so the last two begin from blocks of the first one, which fails."""
    opened = tower.open_image  # type: ignore[attr-defined]
    failures = [MemoryError("none left"), OSError(24, "too many open files")]

    def open_image(file: bytes) -> Any:
        if failures:
            raise failures.pop(0)
        return opened(file)

    monkeypatch.setattr(tower, "open_image", open_image)
    with lab.start(caching=True) as engine:
        for request_id in ("a", "b", "c"):
            add(engine, lab, "one", request_id)
        answers, errors = run_all(engine)
        assert not failures
        assert sorted(errors.values()) == ["unavailable"] * 2
        (survivor,) = {"a", "b", "c"} - errors.keys()
        assert answers[survivor] == lab.answers["one"]
        add(engine, lab, "one", "later")
        assert engine.run_all() == {"later": lab.answers["one"]}


def test_a_failing_image_costs_no_other_request_its_tier(lab: ImageLab) -> None:
    with OneEngine.start(
        lab.path,
        "n",
        4,
        TransferConfig(connector="nixl"),
        scheduler=SchedulerConfig(max_num_batched_tokens=64, max_encoder_tokens=16),
        memory_bytes=4 << 20,
        prefix_caching=True,
        encoder_tokens=64,
        tiers=[TierConfig(cpu=1 << 20)],
    ) as engine:
        add(engine, lab, "text")
        engine.run_all()
        until(lambda: engine.engine.step() is not None and engine.stats().tiers[0].used_bytes > 0)
        before = engine.stats().tiers[0].used_bytes
        add_broken(engine, lab, "broken")
        run_all(engine)
        assert engine.stats().tiers[0].used_bytes >= before


@pytest.mark.parametrize("direction", ["push", *more(["pull"])])
def test_the_other_node_needs_no_image_for_what_is_handed_over(lab: ImageLab, direction: str) -> None:
    config = TransferConfig(connector="nixl", direction=direction)
    with lab.start(config, "p", batched=12) as producer, lab.start(config, "c", batched=12) as consumer:
        for name, parts in PROMPTS.items():
            tokens, media, images = prompt_of(parts, lab.family)
            found = hand_over(producer, consumer, name, tokens, NEW_TOKENS, media=media, images=images)
            assert found == lab.answers[name], name
        assert consumer.engine.scheduler.stats().prompt_tokens_computed == 0
        assert encoded_tokens(consumer) == 0 < encoded_tokens(producer)


def test_a_decode_node_whose_kv_does_not_come_has_the_image(lab: ImageLab) -> None:
    config = TransferConfig(connector="nixl")
    tokens, media, images = lab.prompt("two")
    with lab.start(config, "p", batched=12) as producer, lab.start(config, "c") as consumer:
        assert producer.address
        assert consumer.address
        for engine, role, peer in (
            (consumer, TransferRole.CONSUME, producer.address),
            (producer, TransferRole.PRODUCE, consumer.address),
        ):
            transfer = KVTransferParams("t", role, peer)
            engine.add("two", tokens, NEW_TOKENS, transfer, media=media, images=images)
            engine.engine.step()
        producer.engine.abort_requests(["two"])
        answer: list[int] = []
        until = time.monotonic() + 60
        while not consumer.run("two", answer, until):
            consumer.engine.scheduler.check_integrity()
            producer.engine.step()
        assert answer == lab.answers["two"]
        assert encoded_tokens(consumer) > 0
