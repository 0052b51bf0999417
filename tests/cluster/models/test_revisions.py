"""A name on the hub may stand for another commit tomorrow: the hub's own client asks a hub on this machine, over HTTP."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from tandem.base.errors import ConfigurationError
from tandem.cluster.cli import main
from tandem.cluster.config import TandemConfig
from tandem.cluster.models.catalogue import PACKAGED
from tandem.cluster.models.fetched import FetchedModel, fetched_models, remove
from tandem.cluster.models.resolved import draft_place, with_model
from tandem.cluster.models.store import (
    MARKER,
    Model,
    check_name,
    find_model,
    models_folder,
    name_to_serve,
    resolve_revision,
    split_revision,
)
from tandem.engine.config import SchedulingPolicy
from tests.small_server import Answer, SmallServer

FIRST, SECOND = "a" * 40, "b" * 40


class Hub:
    """Holds org/model at two commits. `main` is the branch, which its owner moves."""

    def __init__(self) -> None:
        self.main = FIRST
        self.files = {
            commit: {"config.json": b"{}", "model.safetensors": commit.encode(), "code.py": b"raise"}
            for commit in (FIRST, SECOND)
        }
        self.server = SmallServer(self.answer)

    def answer(self, path: str) -> Answer:
        words = path.partition("?")[0].strip("/").split("/")
        if words[:3] != ["api", "models", "org"] and words[:2] != ["org", "model"]:
            return 404, {"X-Error-Code": "RepoNotFound"}, b"{}"
        if words[0] != "api":
            commit, name = words[3], words[4]
            body = self.files[commit][name]
            etag = hashlib.sha256(body).hexdigest() if name == "model.safetensors" else hashlib.sha1(body).hexdigest()
            return 200, {"ETag": f'"{etag}"', "X-Repo-Commit": commit}, body
        commit = {"main": self.main, "v1": FIRST}.get((words + ["main"] * 6)[5], (words + [""] * 6)[5])
        if commit not in self.files:
            return 404, {"X-Error-Code": "RevisionNotFound"}, b"{}"
        told: object = {
            "_id": "1", "id": "org/model", "modelId": "org/model", "sha": commit,
            "siblings": [{"rfilename": name} for name in self.files[commit]],
        }  # fmt: skip
        if "tree" in words:
            told = [
                {"type": "file", "path": name, "size": len(content), "oid": hashlib.sha1(content).hexdigest()}
                for name, content in self.files[commit].items()
            ]
        return 200, {"Content-Type": "application/json"}, json.dumps(told).encode()


@pytest.fixture
def hub() -> Iterator[Hub]:
    hub = Hub()
    yield hub
    hub.server.close()


def python(hub: Hub, home: Path, program: str) -> str:
    """The hub's client reads its address when it is imported, so each machine is a process."""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=100,
        env={**os.environ, "HF_ENDPOINT": hub.server.url, "HF_HOME": str(home), "NO_PROXY": "127.0.0.1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


RESOLVE = "from tandem.cluster.models.store import resolve_revision as r\n"
FETCH = "from tandem.cluster.models.fetch import fetch_from_hub as f\n"


@pytest.mark.slow
def test_a_machine_that_starts_a_week_later_has_the_commit_of_the_first(hub: Hub, tmp_path: Path) -> None:
    """Slow: runs interpreters."""
    commit = python(hub, tmp_path / "controller", RESOLVE + "print(r('org/model'))")
    assert commit == FIRST
    hub.main = SECOND
    folders = [
        Path(python(hub, tmp_path / machine, FETCH + f"print(f('org/model@{commit}', lambda what, share: None))"))
        for machine in ("early", "late")
    ]
    assert [(folder / "model.safetensors").read_bytes() for folder in folders] == [FIRST.encode()] * 2
    assert not (folders[0] / "code.py").exists(), "nothing is fetched that could run"
    # The next deployment has what the name stands for by then; a tag goes on standing for what it did.
    program = RESOLVE + "print(r('org/model'), r('org/model', 'v1'), r('org/model', 'c' * 40))"
    assert python(hub, tmp_path / "next", program).split() == [SECOND, FIRST, "c" * 40]


@pytest.mark.slow
def test_what_the_hub_does_not_have_is_said_and_what_is_the_disks_fault_is_not_called_the_hubs(
    hub: Hub, tmp_path: Path
) -> None:
    """Slow: runs interpreters."""

    def errors(home: Path, *calls: str) -> list[str]:
        tries = "".join(
            f"try: {call}\nexcept Exception as error: print(type(error).__name__, error)\n" for call in calls
        )
        return python(hub, home, RESOLVE + FETCH + "quiet = lambda what, share: None\n" + tries).splitlines()

    no_revision, no_repository = errors(tmp_path, "r('org/model', 'v9')", "r('other/model')")
    assert no_revision.startswith("ConfigurationError model.revision 'v9' is not a branch, tag or commit of org/model")
    assert no_repository.startswith("Unavailable the Hugging Face hub does not have other/model")
    (tmp_path / "file").touch()
    disk, name = errors(tmp_path / "file", "f('org/model', quiet)", "f('a--b/c', quiet)")
    assert disk.startswith(f"Unavailable Not a directory ({tmp_path / 'file'}")
    assert name.startswith("Unavailable the Hugging Face hub has no model of such a name")


@pytest.mark.slow
@pytest.mark.parametrize("proxy", ["socks5://127.0.0.1:1", "127.0.0.1:1:1", "ftp://127.0.0.1:1"])
def test_a_proxy_that_cannot_be_used_is_a_sentence(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, proxy: str
) -> None:
    """Slow: runs interpreters."""
    monkeypatch.setenv("ALL_PROXY", proxy)
    monkeypatch.setenv("HTTP_PROXY", proxy)
    program = (
        FETCH
        + "try: f('org/model', lambda what, share: None)\nexcept Exception as error: print(type(error).__name__, error)"
    )
    said = python(hub, tmp_path, "import os; os.environ['NO_PROXY'] = ''\n" + program)
    assert said.startswith("Unavailable the Hugging Face hub does not answer: ")


@pytest.mark.slow
def test_without_the_hub_a_name_stands_for_what_was_fetched_last(hub: Hub, tmp_path: Path) -> None:
    """Slow: runs interpreters."""
    python(hub, tmp_path, FETCH + "f('org/model', lambda what, share: None)")
    hub.server.close()
    program = RESOLVE + "print(r('org/model'))\ntry: r('org/another')\nexcept Exception as error: print(error)"
    found, unknown = python(hub, tmp_path, program).splitlines()
    assert found == FIRST
    assert "Set one with model.revision, or name a folder" in unknown


def test_what_is_not_from_the_hub_has_no_commit(tmp_path: Path) -> None:
    (tmp_path / "config.json").touch()
    for name in ("smollm2", str(tmp_path), f"org/model@{FIRST}", "/not/on/this/machine", "./nor/here"):
        assert resolve_revision(name) == ""
    assert resolve_revision("org/model", FIRST) == FIRST, "a commit stands for itself"


def test_a_name_with_its_commit_is_a_name(tmp_path: Path) -> None:
    pinned = f"org/model@{FIRST}"
    check_name(pinned)
    assert find_model(pinned, tmp_path) is None
    assert name_to_serve(pinned) == "org/model"
    assert split_revision(pinned) == ("org/model", FIRST)
    config = with_model(TandemConfig(), Model(pinned, name_to_serve(pinned)))
    assert (config.router.tokenizer_path, config.router.model_name) == (pinned, "org/model")


@pytest.mark.parametrize(
    ("name", "revision", "message"),
    [
        ("smollm2", "main", "only a name on the Hugging Face hub"),
        ("org/model@v1", "main", "only a name on the Hugging Face hub"),
        ("org/model", "no spaces", "is not the name of a branch"),
        ("org/model", "-x --flag", "is not the name of a branch"),
    ],
)
def test_a_revision_that_cannot_be_meant_is_refused(name: str, revision: str, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        check_name(name, revision)


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
