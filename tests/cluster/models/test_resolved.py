"""Settings that follow from the model or from other sections are filled in where the configuration is read."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from tandem.base.errors import ConfigurationError
from tandem.cluster.config import TandemConfig
from tandem.cluster.models.resolved import draft_place, with_model
from tandem.cluster.models.store import Model
from tandem.engine.config import SchedulingPolicy


def test_the_routers_line_goes_by_priority_where_nodes_do() -> None:
    model = Model("here", "name")
    config = TandemConfig()
    assert not with_model(config, model).router.by_priority
    policy = msgspec.structs.replace(config.scheduler, policy=SchedulingPolicy.PRIORITY)
    assert with_model(msgspec.structs.replace(config, scheduler=policy), model).router.by_priority


def test_a_draft_model_is_found_as_a_model_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "small").mkdir()
    (tmp_path / "small" / "config.json").write_text("{}")
    monkeypatch.chdir(tmp_path)
    assert draft_place("./small") == str(tmp_path / "small"), "nodes run in other folders"
    assert [draft_place(name) for name in ("", "me/small@v1", "smollm2")] == ["", "me/small@v1", "smollm2"]
    with pytest.raises(ConfigurationError, match=r"model\.draft '\./gone' is not there"):
        draft_place("./gone")
