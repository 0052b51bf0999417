"""Every setting through the doors that its users take: each value that is allowed loads from a file, a variable and a flag, and the
schema takes it; each value that is not is refused in words."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import reduce
from pathlib import Path as FilePath
from typing import Any

import jsonschema
import msgspec
import pytest
import yaml

from tandem.base.settings import description_of
from tandem.cluster.cli import main
from tandem.cluster.config import DERIVED, OF_ALL_POOLS, TandemConfig
from tandem.cluster.describe import without_links
from tandem.cluster.settings import rules
from tandem.cluster.settings.combined import SettingsError, resolve
from tandem.cluster.settings.layers import read_assignments, read_environment, read_file
from tandem.cluster.settings.names import Path, dotted, known_settings, no_settings
from tandem.cluster.settings.rules import OF_WINGS
from tandem.cluster.settings.schema import FILE_NAME, json_schema
from tandem.engine.wings import other_engines
from tests.documents import ROOT, Block, blocks
from tests.doors import passes
from tests.wings import WINGS

SETTINGS = sorted(known_settings().keys() - DERIVED.keys())
VALIDATOR = jsonschema.Draft202012Validator(json_schema())

# Another engine than ours is a wing, and may be deleted.
ENGINE = next(iter(other_engines()), None)
ENGINE_PYTHON = {"model.engine_python": "/opt/engine/bin/python", "pools.aggregated.nodes": 1}
POOLS_WITH_ENGINES = ("prefill", "decode", "aggregated")
OF_OTHER_ENGINES: dict[str, dict[str, Any]] = {
    name: {"model.engine": ENGINE, **ENGINE_PYTHON}
    for name in (
        *("model.engine", "model.engine_args", "model.engine_python"),
        *(f"pools.{pool}.engine_args" for pool in POOLS_WITH_ENGINES),
    )
    if ENGINE is not None
}

# What a value needs beside it. A setting that is not here stands alone.
NEEDS: dict[str, dict[str, Any]] = {
    "rollout.surge": {"rollout.max_unavailable": 1},
    "rollout.max_unavailable": {"rollout.surge": 1},
    "model.draft": {"scheduler.num_speculative_tokens": 4},
    "model.adapters": {"scheduler.max_loras": 2},
    **OF_OTHER_ENGINES,
    "router.tls_certificate": {"router.tls_key": "k.pem"},
    "router.tls_key": {"router.tls_certificate": "c.pem"},
    "cache.remote": {"cache.tiers": [{"cpu": "1GiB"}]},
    "cache.mirror": {"cache.tiers": [{"cpu": "1GiB"}]},
    "cache.events.replay_endpoint": {"cache.events.endpoint": "tcp://127.0.0.1:5557"},
    "pools.prefill.nodes": {"pools.decode.nodes": 1},
    "pools.decode.nodes": {"pools.prefill.nodes": 1},
    "pools.aggregated.tensor_parallel": {"pools.aggregated.nodes": 1},
    "pools.aggregated.pipeline_parallel": {"pools.aggregated.nodes": 1},
    "pools.aggregated.context_parallel": {"pools.aggregated.nodes": 1},
    **{f"pools.{pool}.min": {f"pools.{pool}.nodes": 10_000} for pool in ("prefill", "decode")},
    "pools.aggregated.min": {"pools.aggregated.nodes": 10_000},
    **{f"pools.{pool}.machines": {f"pools.{pool}.nodes": 1, f"pools.{pool}.tensor_parallel": 16} for pool in ("prefill", "decode", "aggregated")},
}  # fmt: skip

# Values for what a type alone does not tell: texts with a form, lists and mappings.
VALUES: dict[str, list[Any]] = {
    "name": ["chat", "a", "a-1"],
    "model.path": ["smollm2", "owner/name", "owner/name@main", "./folder"],
    "model.adapters": [{}, {"sql": "./adapters/sql", "law": "owner/name"}],
    "model.revision": ["main"],
    "model.engine": ["tandem"] if ENGINE is None else [ENGINE],
    "model.engine_args": [{}] if ENGINE is None else [{}, {"enforce_eager": True, "kv_cache_dtype": "fp8"}],
    "model.engine_python": [""] if ENGINE is None else ["/opt/engine/bin/python"],
    "model.device": ["auto", "cpu", "cuda", "cuda:1"],
    "model.hidden_states_layers": [[0], [2, 15, -1]],
    "cache.block_size": [1, 16, 32, 1024],
    "cache.memory_bytes": [1 << 20, "4GiB", "500MB", None],
    "cache.tiers": [
        [],
        [{"cpu": "8GiB", "policy": "arc"}],
        [{"cpu": 1 << 20, "block_factor": 2, "store_threshold": 3}, {"disk": "/var/tandem", "size": "100GiB"}],
        [{"spec": "package.module:factory", "options": {"a": 1}}],
    ],
    "cache.events.endpoint": ["", "tcp://127.0.0.1:5557"],
    "cache.events.replay_endpoint": ["", "tcp://127.0.0.1:5558"],
    "scheduler.trace_folder": ["", "/var/tmp/tandem"],
    "router.model_aliases": [[], ["a", "b"]],
    "router.other_models": [{}, {"code": "http://10.0.0.7:8000"}],
    "router.api_keys": [[], [{"name": "a", "key": "k", "requests_per_minute": 6, "priority": -1, "operator": True}]],
    "router.cors_origins": [[], ["*"], ["https://example.com"]],
    "router.tracing.otlp_endpoint": ["", "http://localhost:4318"],
    "router.limits.body_bytes": [1, 1 << 28],
    "autoscaling.shrink_after_s": [1, 1e6],
    "timeouts.unresponsive_s": [2, 1e6],
    "router.tls_certificate": ["c.pem"],
    "router.tls_key": ["k.pem"],
    "transfer.options": [{}, {"backend": "UCX"}],
    "controller.admin_folders": [[], ["/models"]],
    "pools.aggregated.nodes": [0, 1, 3, 10_000, None],
    "pools.prefill.nodes": [1, 10_000, None],
    "pools.decode.nodes": [1, 10_000, None],
    **{f"pools.{pool}.max": [1, 10_000, None] for pool in ("prefill", "decode", "aggregated")},
    **{f"pools.{pool}.machines": [1, 2, 16] for pool in ("prefill", "decode", "aggregated")},
}  # fmt: skip
ENVIRONMENT = {"PYTHONPATH": "/shared/tandem"}
OF_EACH_POOL = {
    "env": [{}, ENVIRONMENT],
    "resources": [{}, {"GPU": 1}, {"GPU": 0.5}],
    "label_selector": [{}, {"zone": "a", "ray.io/accelerator-type": "in(H100, A100)"}],
    "transfer_options": [{}, {"backend": "UCX"}],
    "cache": [{}, {"block_size": 32, "memory_bytes": "2MiB"}],
    "scheduler": [{}, {"max_num_seqs": 64}],
    "engine_args": [{}] if ENGINE is None else [{}, {"enforce_eager": True}],
}


def allowed(path: Path) -> list[Any]:
    name = dotted(path)
    if name in VALUES:
        return VALUES[name]
    if path[0] == "pools" and path[-1] in OF_EACH_POOL:
        return OF_EACH_POOL[path[-1]]  # type: ignore[return-value]
    if path[-1] == "env":
        return [{}, ENVIRONMENT]
    return list(_of(msgspec.inspect.type_info(known_settings()[path])))


def _of(kind: msgspec.inspect.Type) -> Iterator[Any]:
    """The limits of a number, every choice, both of two."""
    match kind:
        case msgspec.inspect.Metadata():
            yield from _of(kind.type)
        case msgspec.inspect.UnionType():
            for member in kind.types:
                yield from _of(member)
        case msgspec.inspect.NoneType():
            yield None
        case msgspec.inspect.BoolType():
            yield from (True, False)
        case msgspec.inspect.EnumType():
            yield from (choice.value for choice in kind.cls)
        case msgspec.inspect.LiteralType():
            yield from kind.values
        case msgspec.inspect.StrType():
            yield "text"
        case msgspec.inspect.IntType():
            yield kind.ge if kind.ge is not None else 1
            yield kind.le if kind.le is not None else 1 << 40
        case msgspec.inspect.FloatType():
            yield kind.ge if kind.ge is not None else 1e-3
            yield kind.le if kind.le is not None else 1e6
        case _:
            raise AssertionError(f"VALUES needs examples for {kind}")


def as_typed(value: Any) -> str:
    """As one writes it after `--set NAME=`."""
    if isinstance(value, str):
        return value
    return yaml.safe_dump(value, default_flow_style=True, width=1000).removesuffix("\n...\n").strip()


def tree(values: dict[str, Any]) -> dict[str, Any]:
    made: dict[str, Any] = {}
    for name, value in values.items():
        *sections, last = name.split(".")
        section = made
        for each in sections:
            section = section.setdefault(each, {})
        section[last] = value
    return made


def refused(path: Path) -> Iterator[Any]:
    """What the type refuses. What a text must look like stands in tests/cluster/test_settings.py."""
    if path[0] == "pools" and path[-1] in OF_ALL_POOLS:
        yield from (7, {"no_such_setting": 1})
        return
    yield from _not_of(msgspec.inspect.type_info(known_settings()[path]))


def _not_of(kind: msgspec.inspect.Type) -> Iterator[Any]:
    match kind:
        case msgspec.inspect.Metadata():
            yield from _not_of(kind.type)
        case msgspec.inspect.UnionType():
            (member,) = (each for each in kind.types if not isinstance(each, msgspec.inspect.NoneType))
            yield from _not_of(member)
        case msgspec.inspect.IntType() | msgspec.inspect.FloatType():
            yield from ("a word", True, ["a"])
            if kind.ge is not None:
                yield kind.ge - 1
            if kind.gt is not None:
                yield kind.gt
            if kind.le is not None:
                yield kind.le * 2
        case msgspec.inspect.EnumType() | msgspec.inspect.LiteralType():
            yield from ("a word", 7)
        case msgspec.inspect.BoolType():
            yield from ("a word", 1)
        case msgspec.inspect.StrType():
            yield from (7, ["a"])
        case msgspec.inspect.DictType() | msgspec.inspect.ListType() | msgspec.inspect.VarTupleType():
            yield from (7, "a word")
        case _:
            raise AssertionError(f"examples are needed for {kind}")


@pytest.mark.parametrize("path", SETTINGS, ids=dotted)
def test_each_value_that_is_allowed_loads_by_every_door(tmp_path: FilePath, path: Path) -> None:
    name, file = dotted(path), tmp_path / "tandem.yaml"
    for value in allowed(path):
        values = {**NEEDS.get(name, {}), name: value}
        if name == "pools.aggregated.nodes" and value == 0:
            values |= {"pools.prefill.nodes": 1, "pools.decode.nodes": 1}
        file.write_text(yaml.safe_dump(tree(values)))
        VALIDATOR.validate(tree(values))
        texts = {each: as_typed(one) for each, one in values.items()}
        variables = {f"TANDEM_{each.replace('.', '__').upper()}": text for each, text in texts.items()}
        by_file, by_flag, by_variable = (
            resolve([layer])
            for layer in (
                read_file(file),
                read_assignments([(each, text, "--set") for each, text in texts.items()]),
                read_environment(variables),
            )
        )
        assert by_file.config == by_flag.config == by_variable.config, value
        assert path in by_file.origins
    for value in refused(path):
        written = tree({name: value})
        file.write_text(yaml.safe_dump(written))
        with pytest.raises(SettingsError) as raised:
            resolve([read_file(file)])
        (sentence,) = raised.value.mistakes
        assert sentence.startswith(f"{file}: {name} ")
        assert " must " in sentence or " is not right: " in sentence or " has " in sentence
        assert not VALIDATOR.is_valid(written), value


@pytest.mark.parametrize("path", no_settings(), ids=dotted)
def test_what_is_no_setting_says_what_holds_by_every_door(tmp_path: FilePath, path: Path) -> None:
    """As a file of an earlier version may have it."""
    name, file = dotted(path), tmp_path / "tandem.yaml"
    file.write_text(yaml.safe_dump(tree({name: 7})))
    variable = f"TANDEM_{name.replace('.', '__').upper()}"
    layers = {
        str(file): read_file(file),
        "--set": read_assignments([(name, "7", "--set")]),
        variable: read_environment({variable: "7"}),
    }
    for origin, layer in layers.items():
        with pytest.raises(SettingsError) as raised:
            resolve([layer])
        (sentence,) = raised.value.mistakes
        assert sentence == f"{origin}: {name} {no_settings()[path]}"
    assert not VALIDATOR.is_valid(tree({name: 7}))


@pytest.mark.parametrize("text", ["off", "'off'"])
def test_a_word_that_yaml_takes_for_a_truth_value_is_the_choice(tmp_path: FilePath, text: str) -> None:
    (tmp_path / "tandem.yaml").write_text(f"transfer: {{checksums: {text}}}")
    assert resolve([read_file(tmp_path / "tandem.yaml")]).config.transfer.checksums == "off"


@pytest.mark.parametrize("path", OF_WINGS, ids=dotted)
def test_a_setting_whose_wing_was_deleted_is_refused_by_name(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], path: Path
) -> None:
    folder = OF_WINGS[path].removeprefix("tandem.").replace(".", "/")
    assert any(f"{folder}/" in wing.product for wing in WINGS.values())
    monkeypatch.setattr(rules, "is_there", lambda wing: wing != OF_WINGS[path])
    name, default = dotted(path), reduce(getattr, path, TandemConfig())
    (value, *_) = (each for each in allowed(path) if each not in (default, 0))
    ways = {name: as_typed(value)}
    if path[0] == "scheduler":
        ways["pools.decode.scheduler"] = as_typed({path[-1]: value})
    for setting, text in ways.items():
        assert main(["config", "--set", f"{setting}={text}"]) == 1
        said = capsys.readouterr().err
        assert f"--set: {setting} " in said
        assert f"needs {folder}/, which this installation does not have" in said
    assert main(["config"]) == 0


def is_tandem_yaml(text: str) -> bool:
    return bool((yaml.safe_load(text) or {}).keys() & {name[0] for name in known_settings()})


@pytest.mark.parametrize(
    "block", [block for block in blocks("yaml") if block.kind != "yaml needs=kubernetes"], ids=lambda block: block.name
)
def test_every_block_of_settings_in_the_documents_loads_and_follows_the_schema(
    tmp_path: FilePath, block: Block
) -> None:
    assert is_tandem_yaml(block.text), "it is another file: say which in its first line, and test it"
    file = tmp_path / "tandem.yaml"
    file.write_text(block.text)
    resolve([read_file(file)])
    VALIDATOR.validate(yaml.safe_load(block.text))
    passes("block", block.name)


@pytest.mark.parametrize("file", sorted(ROOT.glob("manifests/**/tandem.yaml")), ids=str)
def test_every_file_of_settings_that_is_shipped_loads_and_follows_the_schema(file: FilePath) -> None:
    resolve([read_file(file)])
    VALIDATOR.validate(yaml.safe_load(file.read_text()))


def test_the_schema_says_what_the_page_of_settings_says() -> None:
    schema = json_schema()

    def at(path: Path) -> dict[str, Any]:
        found: dict[str, Any] = schema
        for name in path:
            sections = [found, *found.get("anyOf", [])]
            found = next(each for each in sections if "properties" in each)["properties"][name]
        return found

    for path in SETTINGS:
        assert at(path)["description"] == without_links(description_of(known_settings()[path])), path
    assert at(("pools", "prefill", "nodes"))["default"] == TandemConfig().pools.prefill.nodes
    assert at(("model", "path"))["default"] == TandemConfig().model.path


def test_an_editor_finds_the_schema_beside_the_file_of_init(
    tmp_path: FilePath, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["init"]) == 0
    first, *_ = (tmp_path / "tandem.yaml").read_text().splitlines()
    assert first == f"# yaml-language-server: $schema={FILE_NAME}"
    schema = json.loads((tmp_path / FILE_NAME).read_text())
    validator = jsonschema.Draft202012Validator(schema)
    validator.check_schema(schema)
    validator.validate(yaml.safe_load((tmp_path / "tandem.yaml").read_text()))
    capsys.readouterr()
    assert main(["config", "--schema"]) == 0
    assert json.loads(capsys.readouterr().out) == schema
    mistakes = validator.iter_errors({"router": {"port": "x"}, "modle": 1})
    assert sorted(error.json_path for error in mistakes) == ["$", "$.router"]
