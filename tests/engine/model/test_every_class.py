"""docs/models.md says of every causal model class of the pinned transformers what becomes of it, and it is so.

A share of the classes here; `make test-models` runs them all, as .ci/run does.
"""

from __future__ import annotations

import pytest
import transformers

from tests.engine.model import every_class
from tests.more import more

# One of each kind of answer, and of each way to compute.
TYPES = ("llama", "gpt2", "qwen3_next", "bloom", "moshi", "falcon", *more(["deepseek_v3", "deepseek_v32", "mamba2"]))


def test_the_page_lists_every_class_there_is() -> None:
    assert sorted(every_class.written_rows()) == list(every_class.TYPES)
    page = every_class.PAGE.read_text(encoding="utf-8")
    assert f"of transformers {transformers.__version__}," in page, "`make models-page` writes it for another version"


def test_the_table_by_family_says_what_the_rows_by_type_say() -> None:
    page = every_class.PAGE.read_text(encoding="utf-8")
    assert every_class.families(page, every_class.written_rows()) == page


@pytest.mark.parametrize("model_type", TYPES)
def test_what_becomes_of_a_class_is_what_the_page_says(model_type: str) -> None:
    outcome = every_class.run(model_type)
    assert outcome.verdict in ("served", "refused"), outcome.why
    assert every_class.row(outcome) == every_class.written_rows()[model_type]
