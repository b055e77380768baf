"""``customops completion``: commands, options and names of checks, completed in a shell."""

from __future__ import annotations

import argparse
from typing import Any

from customops._cli.screen import FINE, say
from customops.checks import CHECKS

_BASH_HEAD = """\
# In ~/.bashrc:  eval "$(customops completion bash)"
"""
#: zsh runs functions that were written for bash.
_ZSH_HEAD = """\
# In ~/.zshrc, after compinit:  eval "$(customops completion zsh)"
autoload -U +X bashcompinit && bashcompinit
"""
_BASH = """\
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
complete -o default -F _customops customops"""


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "completion",
        help="print what completes this command in a shell",
        description='Print the completion for a shell. In ~/.bashrc: eval "$(customops completion bash)"; '
        "for fish: customops completion fish > ~/.config/fish/completions/customops.fish.",
    )
    parser.add_argument("shell", choices=("bash", "zsh", "fish"))
    parser.set_defaults(run=run, commands=commands)


def _options(parser: argparse.ArgumentParser) -> list[argparse.Action]:
    return [action for action in parser._actions if action.option_strings]


def _values(action: argparse.Action) -> str:
    """What an option takes, if that is known."""
    if action.metavar == "CHECK":
        return " ".join(name.removeprefix("test_") for name in CHECKS)
    return " ".join(str(choice) for choice in action.choices or ())


def run(options: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    parsers: dict[str, argparse.ArgumentParser] = options.commands.choices
    if options.shell == "fish":
        lines = ["# customops completion fish > ~/.config/fish/completions/customops.fish"]
        for command, subparser in parsers.items():
            about = (subparser.description or "").partition(":")[0].partition(".")[0].replace("'", "")
            lines.append(f"complete -c customops -n __fish_use_subcommand -f -a {command} -d '{about}'")
            for action in _options(subparser):
                names = " ".join(f"-l {n[2:]}" if n.startswith("--") else f"-s {n[1:]}" for n in action.option_strings)
                taken = f" -x -a '{_values(action)}'" if _values(action) else ""
                lines.append(f"complete -c customops -n '__fish_seen_subcommand_from {command}' {names}{taken}")
        say("\n".join(lines))
        return FINE
    values: dict[str, str] = {}
    commands = []
    for command, subparser in parsers.items():
        words: list[str] = []
        for action in _options(subparser):
            words += action.option_strings
            if known := _values(action):
                line = f'COMPREPLY=($(compgen -W "{known}" -- "$word")); return ;;'
                values |= {name: f"        {name}) {line}" for name in action.option_strings}
        words += filter(None, (_values(action) for action in subparser._actions if not action.option_strings))
        line = f'COMPREPLY=($(compgen -W "{" ".join(words)}" -- "$word") $(compgen -f -- "$word")) ;;'
        commands.append(f"        {command}) {line}")
    head = _BASH_HEAD if options.shell == "bash" else _ZSH_HEAD
    words_of = {"values": "\n".join(values.values()), "options": "\n".join(commands), "commands": " ".join(parsers)}
    say(head + _BASH.format(**words_of))
    return FINE
