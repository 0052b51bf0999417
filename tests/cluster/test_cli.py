"""The command itself: instant help, instant mistakes, nothing heavy before it is needed."""

from __future__ import annotations

import argparse
import json
import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tandem.cluster import wings
from tandem.cluster.cli import main, make_parser
from tandem.cluster.commands.parser import described, flags_of, subcommands
from tandem.cluster.commands.ready_lines import curl_line, own_command
from tandem.cluster.commands.setting_options import read_settings
from tandem.cluster.saving import results_folder

HEAVY = ["ray", "torch", "transformers", "httpx", "rich", "yaml", "msgspec"]


@pytest.fixture(autouse=True)
def _nothing_from_outside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in list(os.environ):
        if name.startswith("TANDEM_") and name != "TANDEM_CACHE":
            monkeypatch.delenv(name)


def fail(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(arguments) == 1
    return capsys.readouterr().err


@pytest.mark.slow
def test_help_imports_nothing_that_takes_time() -> None:
    """Slow: runs an interpreter. What is imported is checked, not seconds: those depend on the machine's other work."""
    script = (
        "import sys\nfrom tandem.cluster.cli import make_parser\nmake_parser().format_help()\n"
        f"print([name for name in {HEAVY!r} if name in sys.modules])"
    )
    child = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    assert child.stdout.strip() == "[]"


@pytest.mark.parametrize("words", [["completion", "bash"], ["config", "-o", "json"], ["--version"]])
def test_a_full_disk_is_said_in_a_line(
    words: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with open("/dev/full", "w") as full:
        monkeypatch.setattr(sys, "stdout", full)
        assert main(words) == 1
    assert capsys.readouterr().err == "tandem: No space left on device\n"


def test_every_command_that_prints_can_print_json() -> None:
    """A chat is a conversation, a completion is a shell's source, and a picker serves."""
    without = []
    parsers: list[tuple[str, argparse.ArgumentParser]] = [("", make_parser())]
    for name, parser in parsers:
        inner = subcommands(described(parser))
        parsers += [(f"{name} {word}".strip(), one) for word, one in inner.items()]
        if not inner and "-o" not in flags_of(parser):
            without.append(name)
    assert {*without} <= {"chat", "completion", "picker"}


@pytest.mark.slow
def test_a_taken_port_is_said_before_anything_is_loaded() -> None:
    """Slow: runs an interpreter. Neither Ray nor torch may have been imported when it fails."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]
        script = (
            "import sys\nfrom tandem.cluster.cli import main\n"
            f"status = main(['serve', '--port', '{port}'])\n"
            "print(status, [name for name in ('ray', 'torch', 'transformers') if name in sys.modules])"
        )
        child = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    assert child.stdout.strip() == "1 []"
    assert f"port {port} on 127.0.0.1 is taken" in child.stderr


def test_every_flag_reaches_its_setting() -> None:
    flags = "--model org/m --prefill 2 --decode 3 --host 0.0.0.0 --port 9 --dtype float32 --max-model-len 64"
    arguments = ["serve", *flags.split(), "--kv-memory", "1GiB", "--set", "router.policy=round_robin", "debug=true"]
    config = read_settings(make_parser().parse_args(arguments)).config
    assert (config.model.path, config.model.dtype) == ("org/m", "float32")
    assert (config.pools.prefill.nodes, config.pools.decode.nodes) == (2, 3)
    assert (config.router.host, config.router.port, config.router.policy) == ("0.0.0.0", 9, "round_robin")
    assert (config.scheduler.max_model_len, config.cache.memory_bytes) == (64, 1 << 30)
    assert config.debug


def test_the_file_in_the_current_folder_is_read_unless_another_is_named(tmp_path: Path) -> None:
    Path("tandem.yaml").write_text("router: {port: 1}")
    (tmp_path / "other.yaml").write_text("router: {port: 2}")
    parse = make_parser().parse_args
    assert read_settings(parse(["config"])).config.router.port == 1
    assert read_settings(parse(["config", "--config", "other.yaml"])).config.router.port == 2
    assert read_settings(parse(["config", "--port", "3"])).config.router.port == 3


def test_mistakes_are_printed_and_fail(capsys: pytest.CaptureFixture[str]) -> None:
    said = fail(capsys, "config", "--prefill", "two", "--set", "router.prot=1", "novalue", "debug")
    assert "4 mistakes" in said
    assert "--set: debug has no value: write debug=VALUE" in said
    assert "--prefill: pools.prefill.nodes must be a whole number or null, not 'two'" in said
    assert "did you mean router.port?" in said


def test_without_a_command_all_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    said = capsys.readouterr().err
    assert "serve a model, on this machine or on a Ray cluster" in said


def test_help_has_every_command_once_among_its_kind(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--help"])
    said = capsys.readouterr().out
    listed = re.findall(r"^    ([a-z-]+)  +\S", said, re.MULTILINE)
    assert sorted(listed) == sorted(subcommands(make_parser()))
    assert said.index("\nserve:") < said.index("\nuse and look:") < said.index("\nchange a running cluster:")


def test_the_commands_of_a_wing_that_was_taken_away_are_gone_and_the_others_stay(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    there = set(subcommands(make_parser()))
    of_wings = {command.name for command in wings.commands_of_wings()}
    monkeypatch.setattr(wings, "ROWS", ("tandem.room_taken_away.commands",))
    assert set(subcommands(make_parser())) == there - of_wings
    assert not {"serve", "status", "scale", "down"} & of_wings
    with pytest.raises(SystemExit):
        main(["--help"])
    said = capsys.readouterr().out
    assert not any(f"    {name} " in said for name in of_wings)


def test_an_unknown_command_is_answered_with_the_one_that_was_meant(capsys: pytest.CaptureFixture[str]) -> None:
    for words, meant in (
        (["serv"], "there is no command 'serv'; did you mean serve?"),
        (["models", "lst"], "there is no command 'lst'; did you mean list?"),
        (["xyzzy"], "there is no command 'xyzzy'; `tandem --help` lists them"),
    ):
        with pytest.raises(SystemExit):
            main(words)
        assert meant in capsys.readouterr().err


@pytest.mark.parametrize("command", ["serve", "config"])
def test_help_names_the_flags_of_settings_in_order(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main([command, "--help"])
    said = capsys.readouterr().out
    assert "--host" in said
    assert "--port" in said
    assert said.index("--model") < said.index("--kv-memory") < said.index("--set KEY=VALUE [KEY=VALUE ...]\n")


def test_the_address_of_a_models_page_is_its_name() -> None:
    for address, name in (
        ("https://huggingface.co/Qwen/Qwen3-0.6B", "Qwen/Qwen3-0.6B"),
        ("https://huggingface.co/Qwen/Qwen3-0.6B/tree/v1.0/", "Qwen/Qwen3-0.6B@v1.0"),
        ("https://hf.co/Qwen/Qwen3-0.6B/", "Qwen/Qwen3-0.6B"),
    ):
        assert read_settings(make_parser().parse_args(["serve", address])).config.model.path == name


@pytest.mark.parametrize("address", ["s3://bucket/model", "gs://b/m", "https://example.com/model"])
def test_an_address_that_is_not_read_says_so(address: str, capsys: pytest.CaptureFixture[str]) -> None:
    said = fail(capsys, "serve", address, "--port", "0")
    assert f"is an address, and models are not read over {address.partition(':')[0]}: download it" in said
    assert "is an address" in fail(capsys, "models", "fetch", address)


def test_a_server_that_is_not_there_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    assert "does not answer" in fail(capsys, "status", "--url", "http://127.0.0.1:1")
    assert "does not answer" in fail(capsys, "top", "--url", "http://127.0.0.1:1")


def test_the_command_is_named_as_this_shell_finds_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = tmp_path / ".venv" / "bin" / "tandem"
    script.parent.mkdir(parents=True)
    script.touch(mode=0o755)
    monkeypatch.setattr(sys, "prefix", str(tmp_path / ".venv"))
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    assert own_command({"PATH": str(script.parent)}) == "tandem"
    assert own_command({"PATH": "/nowhere"}) == str(script)
    monkeypatch.chdir(tmp_path)
    assert own_command({"PATH": "/nowhere"}) == ".venv/bin/tandem"


def test_the_curl_line_is_one_that_a_shell_understands() -> None:
    line = curl_line("http://127.0.0.1:8000", "it's a model", with_key=True)
    command = ["bash", "-c", f"curl() {{ printf '%s\\n' \"$@\"; }}; {line}"]
    environment = {**os.environ, "TANDEM_API_KEY": "k"}
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    words = done.stdout.splitlines()
    assert words[1] == "http://127.0.0.1:8000/v1/chat/completions"
    assert "Authorization: Bearer k" in words
    assert '"model": "it\'s a model"' in words[-1]


@pytest.mark.parametrize("command", ["top", "status"])
def test_what_is_no_url_of_a_server_is_a_sentence(capsys: pytest.CaptureFixture[str], command: str) -> None:
    for url in ("nonsense", "127.0.0.1:8000", "localhost:8000", "http://[::1", "ftp://host", "http://host:x"):
        said = fail(capsys, command, "--url", url)
        assert f"{url!r} is no URL" in said
        assert "such as http://127.0.0.1:8000" in said


def test_the_configuration_is_printed_as_json_with_the_origin_of_each_value(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "--port", "9", "-o", "json"]) == 0
    values = json.loads(capsys.readouterr().out)
    assert values["router.port"] == {"value": 9, "origin": "--port"}
    assert values["router.host"]["origin"] == "default"


def test_a_folder_for_results_need_not_be_there(tmp_path: Path) -> None:
    folder = results_folder(tmp_path / "results" / "today")
    assert folder.is_dir()
    assert results_folder(folder) == folder


def test_a_failure_with_json_is_a_document_too(capsys: pytest.CaptureFixture[str]) -> None:
    """A script that reads standard output alone would take nothing for an answer."""
    for words in (["scale", "--url", "http://127.0.0.1:9", "decode=x"], ["verify", "--url", "http://127.0.0.1:9"]):
        assert main([*words, "-o", "json"]) in (1, 2)
        said = capsys.readouterr()
        error = json.loads(said.out)["error"]
        assert error["code"] == "configuration_error"
        assert said.err == f"tandem: {error['message']}\n"
    assert main(["scale", "--url", "http://127.0.0.1:9", "decode=x"]) == 1
    assert capsys.readouterr().out == ""


def test_a_word_too_many_is_answered_with_the_commands_own_usage(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["adapters", "list"])
    assert "usage: tandem adapters" in (said := capsys.readouterr().err)
    assert said.endswith("tandem adapters: error: one word too many: 'list'\n")
