"""Routers count an image's placeholders by its size; what nodes make of the file has as many."""

from __future__ import annotations

import io
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image
from transformers import AutoModelForImageTextToText, PreTrainedTokenizerFast
from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil
from transformers.models.idefics3.processing_idefics3 import Idefics3Processor

from tandem.base.errors import ConfigurationError
from tandem.engine.model.vision.rows import rope_positions
from tandem.wire.images import GriddedImages, ImagePlaces, TiledImages, image_rules, media_features, processor_settings
from tests.engine.model.tiny_vision import QWEN2_5_VL, Qwen2VLImageProcessorPil, SmolVLMImageProcessorPil, prompt_of
from tests.pictures import PATCH, PROCESSOR, QWEN_PROCESSOR, QWEN_RULES, RULES, SCALE, TOKENS, picture, tokenizer

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


@settings(max_examples=60, deadline=None)
@given(width=SIDES, height=SIDES, fewest=st.sampled_from([64, 256, 2000]), most=st.sampled_from([2048, 9000]))
def test_as_many_rows_and_columns_as_qwens_processor_makes(width: int, height: int, fewest: int, most: int) -> None:
    options = {**QWEN_PROCESSOR, "min_pixels": fewest, "max_pixels": most}
    made = Qwen2VLImageProcessorPil(**options)(
        images=[Image.new("RGB", (width, height), (9, 80, 200))], return_tensors="np"
    )
    rules = image_rules({"model_type": "qwen2_5_vl", "image_token_id": QWEN_RULES.token_id}, options)
    assert isinstance(rules, GriddedImages)
    _, rows, columns = made["image_grid_thw"][0].tolist()
    assert rules.grid(width, height) == (rows // 2, columns // 2)
    assert rules.parts(width, height) == [ImagePlaces(rows * columns // 4, columns // 2)]


@pytest.fixture(scope="module")
def qwen_model(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return AutoModelForImageTextToText.from_pretrained(QWEN2_5_VL.save(tmp_path_factory.mktemp("qwen")))


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    grids=st.lists(st.tuples(st.integers(1, 4), st.integers(1, 5)), min_size=1, max_size=3),
    gaps=st.lists(st.integers(1, 4), min_size=4, max_size=4),
    begin=st.integers(0, 40),
    count=st.integers(1, 40),
)
def test_positions_are_transformers(
    qwen_model: Any, grids: list[tuple[int, int]], gaps: list[int], begin: int, count: int
) -> None:
    tokens, places = [5] * gaps[0], []
    for (rows, columns), gap in zip(grids, gaps[1:], strict=False):
        places.append([ImagePlaces(rows * columns, columns)])
        tokens += [QWEN_RULES.token_id] * rows * columns + [5] * gap
    tokens += [5] * 100  # so far that the last of those asked for is among them
    media = media_features(tokens, QWEN_RULES.token_id, places, ["d"] * len(places))
    assert media is not None
    ids = torch.tensor([tokens])
    grid = torch.tensor([(1, 2 * rows, 2 * columns) for rows, columns in grids])
    kinds = (ids == QWEN_RULES.token_id).int()
    theirs, _ = qwen_model.model.get_rope_index(ids, mm_token_type_ids=kinds, image_grid_thw=grid)
    ours = rope_positions(media, begin, begin + count)
    assert ours.tolist() == theirs[:, 0, begin : begin + count].tolist()


@pytest.mark.parametrize("size", [(40, 30), (30, 40), (48, 16), (9, 90)])
def test_a_prompt_is_what_transformers_processor_writes(size: tuple[int, int]) -> None:
    words = PreTrainedTokenizerFast(tokenizer_object=tokenizer(), pad_token="<pad>")
    images = Idefics3ImageProcessorPil(**PROCESSOR, return_row_col_info=True)
    processor = Idefics3Processor(image_processor=images, tokenizer=words, image_seq_len=TOKENS)
    file = picture(1, *size)
    opened = [Image.open(io.BytesIO(file)) for _ in range(2)]
    (theirs,) = processor(text=["A<image>B<image>C"], images=[opened], add_special_tokens=False)["input_ids"]
    assert prompt_of(["A", file, "B", file, "C"])[0] == list(theirs)


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
    config = {"model_type": "smolvlm", "vision_config": {"patch_size": 16}, "scale_factor": 4, "image_token_id": 49190}
    settings_ = {"max_image_size": {"longest_edge": 512}, "size": {"longest_edge": 2048}, "do_image_splitting": True}
    assert image_rules(config, settings_) == TiledImages(512, 2048, True, 64, 49190)


def test_qwen3_vls_published_files_say_how_large_a_token_is() -> None:
    settings_ = {
        "size": {"longest_edge": 16777216, "shortest_edge": 65536},
        "patch_size": 16,
        "temporal_patch_size": 2,
        "merge_size": 2,
    }
    config = {"model_type": "qwen3_vl", "image_token_id": 151655}
    rules = image_rules(config, settings_)
    assert rules == GriddedImages(32, 65536, 16777216, 151655)
    assert rules.parts(640, 480) == [ImagePlaces(300, 20)]


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
def test_runs_are_found_where_they_are_and_nowhere_else(lengths: list[list[int]], gaps: list[int], extra: int) -> None:
    tokens, places = [7] * gaps[0], []
    shapes = [[ImagePlaces(length) for length in of] for of in lengths]
    for place, length in enumerate(length for of in lengths for length in of):
        places.append((len(tokens), length))
        tokens += [1] * length + [7] * gaps[place + 1]
    found = media_features(tokens + [1] * extra, 1, shapes, ["d"] * len(lengths))
    if extra:
        assert found is None
    else:
        assert found is not None
        assert [(each.offset, each.length) for each in found] == places
