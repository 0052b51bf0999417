"""`tandem models list` and `rm`, over folders as a fetch leaves them."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest

from tandem.base.errors import ConfigurationError
from tandem.cluster.cli import main
from tandem.cluster.models.catalogue import PACKAGED
from tandem.cluster.models.fetched import FetchedModel, fetched_models, remove
from tandem.cluster.models.store import MARKER, models_folder


@pytest.fixture
def packaged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TANDEM_CACHE", str(tmp_path))
    monkeypatch.setattr("cluster.models.fetched._from_hub", lambda: iter(()))
    folder = models_folder() / PACKAGED["smollm2"].name
    folder.mkdir(parents=True)
    (folder / MARKER).write_bytes(msgspec.json.encode(PACKAGED["smollm2"]))
    (folder / "model.safetensors").write_bytes(b"0" * 1000)
    return folder


def test_what_was_fetched_is_listed_with_its_room(packaged: Path) -> None:
    (model,) = fetched_models()
    assert (model.name, model.path) == ("smollm2", str(packaged))
    assert model.num_bytes > 1000
    (packaged / MARKER).unlink()
    assert fetched_models() == [], "its fetch was cut off"


def test_a_model_is_deleted_by_its_name(packaged: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["models", "rm", "smollm2", "smollm2", "-o", "json"]) == 0
    (said,) = msgspec.json.decode(capsys.readouterr().out, type=list[FetchedModel])
    assert said.name == "smollm2"
    assert not packaged.exists()
    assert main(["models", "list", "-o", "json"]) == 0
    assert json.loads(capsys.readouterr().out) == []


def test_a_model_that_is_here_is_fetched_at_once(packaged: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["models", "fetch", "smollm2", "-o", "json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"name": "smollm2", "path": str(packaged)}


def test_nothing_is_deleted_where_one_name_is_unknown(packaged: Path) -> None:
    with pytest.raises(ConfigurationError, match="org/none was not fetched to this machine; there is: smollm2"):
        remove(["smollm2", "org/none"])
    assert packaged.exists()


def test_the_hubs_cache_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub.constants

    repo = tmp_path / "hub" / "models--org--name"
    commit = repo / "snapshots" / ("0" * 40)
    commit.mkdir(parents=True)
    (repo / "blobs").mkdir()
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text("0" * 40)
    (repo / "blobs" / "b").write_bytes(b"0" * 500)
    (commit / "model.safetensors").symlink_to("../../blobs/b")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setenv("TANDEM_CACHE", str(tmp_path / "ours"))
    assert [(model.name, model.num_bytes) for model in fetched_models()] == [("org/name", 500)]
    remove(["org/name"])
    assert not repo.exists()
