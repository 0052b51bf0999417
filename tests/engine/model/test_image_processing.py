"""Routers count an image's placeholders by its size; what nodes make of the file has as many."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from tandem.wire.errors import ConfigurationError
from tandem.wire.images import TiledImages, image_rules, media_features, processor_settings
from tests.engine.model.tiny_vision import SmolVLMImageProcessorPil
from tests.pictures import PATCH, PROCESSOR, RULES, SCALE

# Longer than 200 times as high is no image to a router.
SIDES = st.integers(4, 300)


@settings(max_examples=60, deadline=None)
@given(width=SIDES, height=SIDES, longest=st.sampled_from([16, 17, 31, 48, 64, 90]), cut=st.booleans())
def test_as_many_tiles_as_the_processor_makes(width: int, height: int, longest: int, cut: bool) -> None:
    options = {**PROCESSOR, "size": {"longest_edge": longest}, "do_image_splitting": cut}
    processor: Any = SmolVLMImageProcessorPil(**options, return_row_col_info=True)
    made = processor(images=[Image.new("RGB", (width, height), (9, 80, 200))], return_tensors="np")
    rules = image_rules(CONFIG, options)
    assert rules is not None
    assert rules.grid(width, height) == (made["rows"][0][0], made["cols"][0][0])
    assert len(rules.parts(width, height)) == made["pixel_values"].shape[1]
    assert made["pixel_attention_mask"].all()
    assert made["pixel_values"].shape[-2:] == (16, 16)


CONFIG: dict[str, Any] = {
    "model_type": "smolvlm",
    "vision_config": {"patch_size": PATCH},
    "scale_factor": SCALE,
    "image_token_id": RULES.token_id,
}


def test_the_rules_are_read_from_either_file_of_a_folder() -> None:
    for files in (
        {"preprocessor_config.json": PROCESSOR},
        {"processor_config.json": {"image_processor": PROCESSOR, "image_seq_len": 4}},
    ):
        found = processor_settings(lambda name, files=files: files.get(name, {}))
        assert image_rules(CONFIG, found) == RULES
    assert image_rules({"model_type": "llama"}, PROCESSOR) is None


def test_published_checkpoints_have_the_tokens_that_they_say() -> None:
    """SmolVLM2-256M's and 500M's files: 64 tokens for each tile of 512 pixels."""
    config = {
        "model_type": "smolvlm",
        "vision_config": {"patch_size": 16},
        "scale_factor": 4,
        "image_token_id": 49190,
    }
    settings_ = {
        "max_image_size": {"longest_edge": 512},
        "size": {"longest_edge": 2048},
        "do_image_splitting": True,
    }
    assert image_rules(config, settings_) == TiledImages(512, 2048, True, 64, 49190)


@pytest.mark.parametrize(
    "wrong", [{"do_resize": False}, {"max_image_size": {"longest_edge": 18}}], ids=["unscaled", "odd tiles"]
)
def test_what_has_no_whole_tiles_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError, match="cannot be served"):
        image_rules(CONFIG, {**PROCESSOR, **wrong})


@given(
    lengths=st.lists(st.lists(st.integers(1, 4), min_size=1, max_size=3), max_size=3),
    gaps=st.lists(st.integers(1, 3), min_size=10, max_size=10),
    extra=st.integers(0, 2),
)
def test_runs_are_found_where_they_are_and_nowhere_else(
    lengths: list[list[int]], gaps: list[int], extra: int
) -> None:
    tokens, places = [7] * gaps[0], []
    for place, length in enumerate(length for of in lengths for length in of):
        places.append((len(tokens), length))
        tokens += [1] * length + [7] * gaps[place + 1]
    found = media_features(tokens + [1] * extra, 1, lengths, ["d"] * len(lengths))
    if extra:
        assert found is None
    else:
        assert found is not None
        assert [(each.offset, each.length) for each in found] == places
