"""The shell completions, and that bash accepts the script."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tandem.cluster.cli import main, make_parser
from tandem.cluster.commands.completion import SCRIPTS, complete


def offered(line: str) -> list[str]:
    return complete(make_parser(), line.split(" "))


@pytest.mark.parametrize(
    ("line", "answers"),
    [
        ("serv", ["serve"]),
        ("serve --pre", ["--prefill"]),
        ("models ", ["fetch", "list", "rm"]),
        ("models fetch --fo", ["--format"]),
        ("status -o ", ["json", "text"]),
        ("config --set router.po", ["router.policy=", "router.port="]),
        ("config --set debug=true router.por", ["router.port="]),
        ("serve --port 9 --deta", ["--detach"]),
        ("serve --port=9 --deta", ["--detach"]),
        ("completion ", ["bash", "fish", "zsh"]),
        ("init --cluster ku", ["kuberay"]),
        ("serve --config ", []),
        ("nonsense --x", []),
    ],
)
def test_the_word_under_the_cursor_is_completed(line: str, answers: list[str]) -> None:
    assert offered(line) == answers


@pytest.mark.parametrize(
    ("words", "offered"),
    [
        (["serve", "--"], "--prefill"),
        (["config", "--set", "--"], "--config"),
        (["--"], "--version"),
        (["status", "-"], "--watch"),
    ],
)
def test_a_lone_beginning_of_a_flag_is_completed(
    words: list[str], offered: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["completion", "bash", "--words", *words]) == 0
    assert offered in capsys.readouterr().out.split()


def test_every_command_is_offered_and_flags_of_other_servers_are_not() -> None:
    assert "--tensor-parallel-size" not in offered("serve --")
    assert {"serve", "top", "status", "models", "init", "completion"} <= {*offered("")}


def tandem(folder: Path) -> dict[str, str]:
    """An environment in which `tandem` answers with the words that it was given."""
    command = folder / "tandem"
    command.write_text('#!/bin/sh\nshift 3\nprintf "%s\\n" "given-$#" "router.port="\n')
    command.chmod(0o755)
    return {**os.environ, "PATH": f"{folder}:{os.environ['PATH']}"}


def in_bash(environment: dict[str, str], words: str, number: int) -> list[str]:
    asked = f'COMP_WORDS=({words}); COMP_CWORD={number}; _tandem 2>/dev/null; printf "%s\\n" "${{COMPREPLY[@]}}"'
    command = ["bash", "-c", SCRIPTS["bash"] + asked]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout.split()


def test_bash_hands_over_the_words_and_takes_the_answers(tmp_path: Path) -> None:
    assert in_bash(tandem(tmp_path), 'tandem config --set ""', 3) == ["given-3", "router.port="]


def test_bash_offers_what_follows_a_lone_dash_dash(tmp_path: Path) -> None:
    environment = tandem(tmp_path)
    (tmp_path / "tandem").write_text(f'#!/bin/sh\nexec {sys.executable} -m tandem.cluster.cli "$@"\n')
    assert {"--prefill", "--config", "--detach"} <= {*in_bash(environment, "tandem serve --", 2)}


def test_zsh_hands_over_the_words_and_takes_the_answers(tmp_path: Path) -> None:
    if shutil.which("zsh") is None:
        pytest.skip("zsh is not here")
    script = (
        f"compdef() {{ : }}\n{SCRIPTS['zsh']}\n"
        "compadd() { shift; print -r -l -- ${(P)1} }\n"
        'words=(tandem config --set ""); CURRENT=4; _tandem'
    )
    done = subprocess.run(["zsh", "-fc", script], env=tandem(tmp_path), capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["given-3", "router.port="]


def test_fish_hands_over_the_words_and_takes_the_answers(tmp_path: Path) -> None:
    if shutil.which("fish") is None:
        pytest.skip("fish is not here")
    script = f'{SCRIPTS["fish"]}\ncomplete -C "tandem config --set rout"'
    environment = {**tandem(tmp_path), "HOME": str(tmp_path)}
    done = subprocess.run(
        ["fish", "--no-config", "-c", script], cwd=tmp_path, env=environment, capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["router.port="]  # fish leaves out what does not begin with the word
