"""Shell completion. Each shell's script calls `tandem completion SHELL --words ...`, so a script never goes out of date."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from tandem.cluster.commands.parser import SHELL, Command, described, flags_of, subcommands

# The shell passes the words after `tandem` up to the one under the cursor, and filters the answers. Without an answer it completes
# file names.
SCRIPTS = {
    "bash": """\
# tandem: put into ~/.bashrc   eval "$(tandem completion bash)"
_tandem() {
  local IFS=$'\\n'
  COMPREPLY=($(compgen -W "$(tandem completion bash --words "${COMP_WORDS[@]:1:COMP_CWORD}" 2>/dev/null)" -- "${COMP_WORDS[COMP_CWORD]}"))
  [[ "${COMPREPLY[0]}" == *= ]] && compopt -o nospace
  return 0
}
complete -o default -F _tandem tandem
""",
    "zsh": """\
# tandem: put into ~/.zshrc, after compinit   eval "$(tandem completion zsh)"
_tandem() {
  local -a answers
  answers=("${(@f)$(tandem completion zsh --words "${(@)words[2,CURRENT]}" 2>/dev/null)}")
  if [[ -n "$answers" ]]; then compadd -a answers; else _files; fi
}
compdef _tandem tandem
""",
    "fish": """\
# tandem: put into ~/.config/fish/config.fish   tandem completion fish | source
function __tandem_complete
  set -l typed (commandline -opc) (commandline -ct)
  set -l answers (tandem completion fish --words $typed[2..-1] 2>/dev/null)
  if test -n "$answers"
    printf '%s\\n' $answers
  else
    __fish_complete_path (commandline -ct)
  end
end
complete -c tandem -f -a '(__tandem_complete)'
""",
}


def _describe(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("shell", choices=tuple(SCRIPTS))


def _run(options: argparse.Namespace) -> int:
    print(SCRIPTS[options.shell], end="")
    return 0


COMMAND = Command("completion", "print a shell's completion script", SHELL, _describe, _run)


def complete(parser: argparse.ArgumentParser, words: Sequence[str]) -> list[str]:
    """Returns what may stand in the last word's place."""
    if not words:
        return []
    *before, last = words
    option: argparse.Action | None = None  # the one that takes the next word
    for word in before:
        if word.startswith("-"):
            option = None if "=" in word else flags_of(parser).get(word)
            if option is not None and option.nargs == 0:
                option = None
        elif option is not None:
            if option.nargs not in ("+", "*"):
                option = None
        elif (inner := subcommands(parser).get(word)) is not None:
            parser = described(inner)
    if option is not None and not last.startswith("-"):
        answers = _values(option)
    elif last.startswith("-"):
        answers = [name for name, action in flags_of(parser).items() if _is_shown(name, action)]
    else:
        answers = list(subcommands(parser)) or _positional_choices(parser)
    return sorted(answer for answer in answers if answer.startswith(last))


def _is_shown(name: str, action: argparse.Action) -> bool:
    return name.startswith("--") and action.help != argparse.SUPPRESS


def _positional_choices(parser: argparse.ArgumentParser) -> list[str]:
    positionals = [action for action in parser._actions if not action.option_strings]
    return [str(choice) for action in positionals for choice in action.choices or ()]


def _values(option: argparse.Action) -> list[str]:
    if option.choices:
        return [str(choice) for choice in option.choices]
    if option.dest == "set":
        from tandem.cluster.settings.names import dotted, known_settings

        return [f"{dotted(path)}=" for path in known_settings()]
    return []
