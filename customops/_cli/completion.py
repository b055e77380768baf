"""``customops completion``: completes commands, options and names of checks in a shell."""

from __future__ import annotations

import argparse
from typing import Any

from customops._cli import check
from customops.checks import CHECKS

_SHELLS = ("bash", "zsh", "fish")

_BASH = """\
# In ~/.bashrc:  eval "$(customops completion bash)"
_customops() {{
    local word=${{COMP_WORDS[COMP_CWORD]}} before=${{COMP_WORDS[COMP_CWORD-1]}}
    case $before in
{values}
    esac
    if [ "$COMP_CWORD" -eq 1 ]; then
        COMPREPLY=($(compgen -W "{commands}" -- "$word"))
        return
    fi
    case ${{COMP_WORDS[1]}} in
{options}
    esac
}}
complete -o default -F _customops customops
"""

#: zsh runs functions that were written for bash.
_ZSH = """\
# In ~/.zshrc, after compinit:  eval "$(customops completion zsh)"
autoload -U +X bashcompinit && bashcompinit
"""


def add_parser(commands: Any) -> None:
    """Add the command to those of the command line."""
    parser = commands.add_parser(
        "completion",
        help="print what completes this command in a shell",
        description='Print the completion for a shell. In ~/.bashrc: eval "$(customops completion bash)"; '
        "for fish: customops completion fish > ~/.config/fish/completions/customops.fish.",
    )
    parser.add_argument("shell", choices=_SHELLS)
    parser.set_defaults(run=run, commands=commands)


def run(options: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    parsers: dict[str, argparse.ArgumentParser] = options.commands.choices
    check.say({"bash": _bash, "zsh": _zsh, "fish": _fish}[options.shell](parsers).rstrip("\n"))
    return 0


def _options(parser: argparse.ArgumentParser) -> list[argparse.Action]:
    return [action for action in parser._actions if action.option_strings]


def _values(action: argparse.Action) -> list[str]:
    """What an option takes, if that is known."""
    if action.metavar == "CHECK":
        return [name.removeprefix("test_") for name in CHECKS]
    return [str(choice) for choice in action.choices or ()]


def _bash(parsers: dict[str, argparse.ArgumentParser]) -> str:
    known = {
        name: _values(action) for parser in parsers.values() for action in _options(parser)
        for name in action.option_strings if _values(action)
    }  # fmt: skip
    values = [f'        {name}) COMPREPLY=($(compgen -W "{" ".join(all_)}" -- "$word")); return ;;'
              for name, all_ in known.items()]  # fmt: skip
    options = []
    for command, parser in parsers.items():
        words = [name for action in _options(parser) for name in action.option_strings]
        words += [value for action in parser._actions if not action.option_strings for value in _values(action)]
        line = f'COMPREPLY=($(compgen -W "{" ".join(words)}" -- "$word") $(compgen -f -- "$word"))'
        options.append(f"        {command}) {line} ;;")
    return _BASH.format(commands=" ".join(parsers), values="\n".join(values), options="\n".join(options))


def _zsh(parsers: dict[str, argparse.ArgumentParser]) -> str:
    return _ZSH + "\n".join(_bash(parsers).splitlines()[1:])


def _fish(parsers: dict[str, argparse.ArgumentParser]) -> str:
    lines = ["# customops completion fish > ~/.config/fish/completions/customops.fish"]
    for command, parser in parsers.items():
        about = (parser.description or "").partition(":")[0].partition(".")[0].replace("'", "")
        lines.append(f"complete -c customops -n __fish_use_subcommand -f -a {command} -d '{about}'")
        for action in _options(parser):
            names = " ".join(
                f"-l {name[2:]}" if name.startswith("--") else f"-s {name[1:]}" for name in action.option_strings
            )
            values = f" -x -a '{' '.join(_values(action))}'" if _values(action) else ""
            seen = f"'__fish_seen_subcommand_from {command}'"
            lines.append(f"complete -c customops -n {seen} {names}{values}")
    return "\n".join(lines) + "\n"
