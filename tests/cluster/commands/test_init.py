"""`tandem init` writes a file that matches the given settings and that `tandem serve` accepts."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import yaml

from tandem.cluster.cli import main, make_parser
from tandem.cluster.commands.init import CLUSTERS
from tandem.cluster.commands.setting_options import read_settings
from tandem.cluster.config import DERIVED, TandemConfig
from tandem.cluster.settings.combined import resolve
from tandem.cluster.settings.layers import read_file
from tandem.cluster.settings.names import known_settings


@pytest.fixture(autouse=True)
def _empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_a_comment_says_where_to_read_on_and_the_command_what_comes_next(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["init"]) == 0
    assert capsys.readouterr().out.splitlines() == ["tandem.yaml", "tandem.schema.json", "next: tandem serve"]
    text = (tmp_path / "tandem.yaml").read_text()
    said = re.sub(r"\n *# ", " ", text)
    assert "such as `{sql: ./sql-lora}`: see docs/adapters.md" in said
    assert "`scheduler.num_speculative_tokens` tokens (see docs/scheduler.md); its memory" in said
    for page in re.findall(r"docs/[\w.-]+\.md", said):
        assert (Path(__file__).parents[3] / page).is_file()
    assert not re.findall(r"\]\(", said)
    assert main(["init", "there"]) == 0
    assert "next: tandem serve --config there/tandem.yaml" in capsys.readouterr().out


def test_the_file_with_every_comment_sign_taken_away_is_the_defaults(tmp_path: Path) -> None:
    main(["init"])
    file = tmp_path / "tandem.yaml"
    assert resolve([read_file(file)]).config == TandemConfig(), "the file as written changes nothing"
    names = {path[-1] for path in known_settings()}
    pattern = rf"^( *)# ((?:{'|'.join(sorted(names))}): .*)$"
    text, count = re.subn(pattern, r"\1\2", file.read_text(), flags=re.MULTILINE)
    assert count >= len(known_settings()) - len(DERIVED)
    file.write_text(text)
    assert resolve([read_file(file)]).config == TandemConfig()


def test_what_could_not_be_written_whole_is_not_in_the_way_of_the_next_try(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "tandem.schema.json").mkdir()
    assert main(["init"]) == 1
    assert "tandem.schema.json cannot be written" in capsys.readouterr().err
    (tmp_path / "tandem.schema.json").rmdir()
    assert main(["init"]) == 0


def test_flags_are_written_as_settings(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--model", "org/m", "--prefill", "2", "--max-model-len", "64", "--set", "router.policy=round_robin"]
    assert main(["init", "there", *flags, "-o", "json"]) == 0
    assert json.loads(capsys.readouterr().out) == ["there/tandem.yaml", "there/tandem.schema.json"]
    config = read_settings(make_parser().parse_args(["config", "--config", "there/tandem.yaml"])).config
    assert config == read_settings(make_parser().parse_args(["config", *flags])).config


def test_keys_are_written_and_what_hides_them_is_no_key(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    keys = ["--set", "router.api_keys=[{name: a, key: s3cret}]"]
    assert main(["init", *keys]) == 0
    (key,) = resolve([read_file(tmp_path / "tandem.yaml")]).config.router.api_keys
    assert key.key == "s3cret"
    capsys.readouterr()
    assert main(["config", *keys]) == 0
    shown = capsys.readouterr().out
    assert "s3cret" not in shown
    (tmp_path / "shown.yaml").write_text(shown)
    assert main(["config", "--config", "shown.yaml"]) == 1
    assert "router.api_keys: a: (hidden) stands where" in capsys.readouterr().err


def test_nothing_is_overwritten(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "tandem.yaml").write_text("model: mine")
    assert main(["init", "--cluster", "aws"]) == 1
    assert "tandem.yaml would be overwritten: name another folder" in capsys.readouterr().err
    assert [file.name for file in tmp_path.iterdir()] == ["tandem.yaml"]


@pytest.mark.parametrize("cluster", CLUSTERS)
def test_a_clusters_files_come_with_the_settings_that_it_needs(tmp_path: Path, cluster: str) -> None:
    assert main(["init", "c", "--cluster", cluster, "--model", "org/m"]) == 0
    settings = tmp_path / "c" / ("base/tandem.yaml" if cluster == "kuberay" else "tandem.yaml")
    config = resolve([read_file(settings)]).config
    assert config.model.path == "org/m"
    if cluster == "kuberay":
        assert config.pools.decode.max == 8
        assert (tmp_path / "c" / "overlays" / "gpu" / "kustomization.yaml").is_file()
    else:
        assert config.pools.decode.nodes is None
        mounts = yaml.safe_load((tmp_path / "c" / f"{cluster}.yaml").read_text())["file_mounts"]
        assert mounts["~/tandem.yaml"] == "tandem.yaml"
