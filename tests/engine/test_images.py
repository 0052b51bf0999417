"""Prompts with images: the answers of transformers' `generate`, however the prompt is cut, whatever shares the step or the cache, after
preemptions, and on the other side of a handover."""

from __future__ import annotations

import dataclasses
import time
from pathlib import Path

import pytest

from tandem.engine.config import Reserve, SchedulerConfig
from tandem.engine.request import RequestStatus
from tandem.kvtransfer.base import TransferConfig
from tandem.wire.errors import InvalidRequest
from tandem.wire.requests import KVTransferParams, TransferRole
from tests.engine.model import tiny_vision
from tests.engine.model.tiny_vision import prompt_of
from tests.integration.one_engine import OneEngine, hand_over
from tests.pictures import picture

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
    path: Path
    answers: dict[str, list[int]]

    def start(
        self,
        transfer: TransferConfig | None = None,
        name: str = "n",
        *,
        batched: int = 64,
        encoded: int = 16,
        kept: int = 64,
        seqs: int = 8,
        caching: bool = False,
        num_blocks: int | None = None,
        reserve: Reserve = Reserve.PROMPT,
        chunked: bool = True,
    ) -> OneEngine:
        scheduler = SchedulerConfig(
            max_num_seqs=seqs,
            max_num_batched_tokens=batched,
            max_encoder_tokens=encoded,
            reserve=reserve,
            chunked_prefill=chunked,
        )
        return OneEngine.start(
            self.path,
            name,
            4,
            transfer,
            scheduler=scheduler,
            memory_bytes=4 << 20,
            prefix_caching=caching,
            encoder_tokens=kept,
            num_blocks=num_blocks,
        )


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> ImageLab:
    return lab_of("SmolVLM", tmp_path_factory.mktemp("images"))


def lab_of(kind: str, folder: Path) -> ImageLab:
    path = tiny_vision.smolvlm(folder, kind)
    found = tiny_vision.reference(path, list(PROMPTS.values()), NEW_TOKENS)
    answers = dict(zip(PROMPTS, found, strict=True))
    assert answers["one"] != answers["other"]
    return ImageLab(path, answers)


def add(engine: OneEngine, name: str, request_id: str | None = None) -> None:
    tokens, media, images = prompt_of(PROMPTS[name])
    engine.add(request_id or name, tokens, NEW_TOKENS, None, media=media, images=images)


def run_all(engine: OneEngine, count: int) -> dict[str, list[int]]:
    """Until so many requests have ended. Whatever must hold between two steps is looked at after each."""
    answers: dict[str, list[int]] = {}
    until, ended = time.monotonic() + 60, 0
    while ended < count:
        for update in engine.engine.step().updates:
            assert update.error is None, update.error
            answers.setdefault(update.request_id, []).extend(update.token_ids)
            ended += update.finish is not None
        engine.engine.scheduler.check_integrity()
        assert time.monotonic() < until
    return answers


def encoded_tokens(engine: OneEngine) -> int:
    return engine.engine.scheduler.stats().encoder_tokens


def test_idefics3s_class(tmp_path: Path) -> None:
    idefics3 = lab_of("Idefics3", tmp_path)
    engine = idefics3.start(batched=11)
    try:
        for name in PROMPTS:
            add(engine, name)
        assert run_all(engine, len(PROMPTS)) == idefics3.answers
    finally:
        engine.engine.shutdown()


@pytest.mark.parametrize("batched", [1, 7, 64, 512])
def test_any_chunks_beside_any_others(lab: ImageLab, batched: int) -> None:
    engine = lab.start(batched=batched)
    try:
        for name in PROMPTS:
            add(engine, name)
        assert run_all(engine, len(PROMPTS)) == lab.answers
    finally:
        engine.engine.shutdown()


@pytest.mark.parametrize("kept", [4, 20])
def test_an_encoder_cache_that_holds_little_delays_and_changes_nothing(lab: ImageLab, kept: int) -> None:
    engine = lab.start(encoded=4, kept=kept)
    try:
        for name in PROMPTS:
            add(engine, name)
        assert run_all(engine, len(PROMPTS)) == lab.answers
    finally:
        engine.engine.shutdown()


def test_an_image_that_is_there_is_not_encoded_again(lab: ImageLab) -> None:
    engine = lab.start(kept=1024)
    try:
        add(engine, "one")
        run_all(engine, 1)
        first = encoded_tokens(engine)
        add(engine, "one", "again")
        add(engine, "image last")
        answers = run_all(engine, 2)
        assert answers == {"again": lab.answers["one"], "image last": lab.answers["image last"]}
        assert encoded_tokens(engine) == first > 0
        assert engine.engine.scheduler.stats().encoder_tokens_reused == 2 * first
    finally:
        engine.engine.shutdown()


def test_a_prefix_is_found_by_prompts_with_the_same_image_alone(lab: ImageLab) -> None:
    engine = lab.start(caching=True)
    try:
        add(engine, "one")
        run_all(engine, 1)
        before = encoded_tokens(engine)
        add(engine, "one", "again")
        assert run_all(engine, 1) == {"again": lab.answers["one"]}
        length = len(prompt_of(PROMPTS["one"])[0])
        assert engine.engine.scheduler.stats().prompt_tokens_cached == (length - 1) // 4 * 4
        assert encoded_tokens(engine) == before  # what is cached needs no image
        add(engine, "other")
        assert run_all(engine, 1) == {"other": lab.answers["other"]}
        common = prompt_of(PROMPTS["other"])[1][0].offset // 4 * 4
        assert engine.engine.scheduler.stats().prompt_tokens_cached == (length - 1) // 4 * 4 + common
    finally:
        engine.engine.shutdown()


def test_preempted_prompts_are_computed_again_with_their_images(lab: ImageLab) -> None:
    longest = max(len(prompt_of(parts)[0]) for parts in PROMPTS.values()) + NEW_TOKENS
    engine = lab.start(num_blocks=longest // 4 + 6, reserve=Reserve.NONE, kept=24, batched=24)
    try:
        for name in PROMPTS:
            add(engine, name)
        assert run_all(engine, len(PROMPTS)) == lab.answers
        assert engine.engine.scheduler.stats().preemptions > 0
    finally:
        engine.engine.shutdown()


def test_prompts_in_one_piece(lab: ImageLab) -> None:
    engine = lab.start(batched=512, encoded=256, kept=256, chunked=False)
    try:
        for name in PROMPTS:
            add(engine, name)
        assert run_all(engine, len(PROMPTS)) == lab.answers
    finally:
        engine.engine.shutdown()
    engine = lab.start(batched=512, encoded=16, chunked=False)
    try:
        with pytest.raises(InvalidRequest, match=r"scheduler\.max_encoder_tokens"):
            add(engine, "one")
    finally:
        engine.engine.shutdown()


def test_a_request_that_ends_in_its_prompt_holds_nothing(lab: ImageLab) -> None:
    engine = lab.start(batched=9)
    try:
        add(engine, "two")
        for _ in range(3):
            engine.engine.step()
        engine.engine.scheduler.finish_requests(["two"], RequestStatus.FINISHED_ABORTED)
        engine.engine.scheduler.check_integrity()
        add(engine, "one")
        assert run_all(engine, 1) == {"one": lab.answers["one"]}
    finally:
        engine.engine.shutdown()


def test_a_file_that_is_no_image_ends_its_request_and_no_other(lab: ImageLab) -> None:
    engine = lab.start(caching=True)
    try:
        tokens, media, _ = prompt_of(PROMPTS["one"])
        engine.add("broken", tokens, NEW_TOKENS, None, media=media, images=[b"no image"])
        add(engine, "text")
        answers: dict[str, list[int]] = {}
        errors = {}
        while "text" not in answers or len(answers["text"]) < NEW_TOKENS:
            for update in engine.engine.step().updates:
                if update.error is not None:
                    errors[update.request_id] = update.error.code
                answers.setdefault(update.request_id, []).extend(update.token_ids)
        assert errors == {"broken": "invalid_image"}
        assert answers["text"] == lab.answers["text"]
        engine.engine.scheduler.check_integrity()
        # Nothing of what was computed without the image is found by a prompt that names the same one.
        cached = engine.engine.scheduler.stats().prompt_tokens_cached
        engine.add("same", tokens, NEW_TOKENS, None, media=media, images=[b"no image"])
        while engine.engine.scheduler.has_unfinished_requests():
            engine.engine.step()
        assert engine.engine.scheduler.stats().prompt_tokens_cached == cached
    finally:
        engine.engine.shutdown()


@pytest.mark.parametrize("direction", ["push", "pull"])
def test_the_other_node_needs_no_image_for_what_is_handed_over(lab: ImageLab, direction: str) -> None:
    config = TransferConfig(connector="nixl", direction=direction)
    producer, consumer = lab.start(config, "p", batched=12), lab.start(config, "c", batched=12)
    try:
        for name, parts in PROMPTS.items():
            tokens, media, images = prompt_of(parts)
            found = hand_over(producer, consumer, name, tokens, NEW_TOKENS, media=media, images=images)
            assert found == lab.answers[name], name
        assert consumer.engine.scheduler.stats().prompt_tokens_computed == 0
        assert encoded_tokens(consumer) == 0 < encoded_tokens(producer)
    finally:
        producer.engine.shutdown()
        consumer.engine.shutdown()


def test_a_decode_node_that_loses_its_kv_has_the_image(lab: ImageLab) -> None:
    config = TransferConfig(connector="nixl")
    producer = lab.start(config, "p")
    assert producer.address
    # Room for both prompts, and not for both answers.
    blocks = 2 + sum(-(-len(prompt_of(PROMPTS[name])[0]) // 4) for name in ("one", "other"))
    consumer = lab.start(config, "c", num_blocks=blocks, reserve=Reserve.NONE)
    assert consumer.address
    try:
        for name in ("one", "other"):
            tokens, media, images = prompt_of(PROMPTS[name])
            for engine, role, peer, count in (
                (consumer, TransferRole.CONSUME, producer.address, NEW_TOKENS),
                (producer, TransferRole.PRODUCE, consumer.address, 1),
            ):
                transfer = KVTransferParams(f"t-{name}", role, peer)
                engine.add(name, tokens, count, transfer, media=media, images=images)
        answers: dict[str, list[int]] = {"one": [], "other": []}
        until = time.monotonic() + 60
        while any(len(tokens) < NEW_TOKENS for tokens in answers.values()):
            for update in consumer.engine.step().updates:
                answers[update.request_id] += update.token_ids
            consumer.engine.scheduler.check_integrity()
            producer.engine.step()
            assert time.monotonic() < until
        assert answers == {name: lab.answers[name] for name in answers}
        stats = consumer.engine.scheduler.stats()
        assert stats.preemptions > 0
        assert stats.encoder_tokens > 0
    finally:
        producer.engine.shutdown()
        consumer.engine.shutdown()
