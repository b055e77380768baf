"""``customops list``, ``describe``, ``doctor`` and ``completion``."""

from __future__ import annotations

import argparse
import json
import platform
from typing import Any

import torch

import customops
from customops._cli import check
from customops._cli.check import TARGET_HELP
from customops._cli.targets import ops_of
from customops._describe.description import OUTLINE, outline
from customops._describe.render import table, width_of_screen
from customops._torch.probes import Probe, is_too_new_for, missing, probes
from customops._versions import NEWEST, OLDEST, spelled
from customops._versions import release as release_of
from customops.checks import CHECKS


def add_list(commands: Any) -> None:
    parser = commands.add_parser(
        "list",
        help="list the ops of targets: schema, kernels, rules, samples",
        description="Import each TARGET and list the ops that it defines.",
        epilog="Exit status: 0, or 2 if a TARGET cannot be imported or defines no op.",
    )
    parser.add_argument("targets", nargs="+", metavar="TARGET", help=TARGET_HELP)
    parser.add_argument("--json", action="store_true", help="print a list of objects")
    parser.set_defaults(run=_list)


def _list(options: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    rows = [outline(op) for op in ops_of(options.targets)]
    if options.json:
        check.say(json.dumps([dict(zip(OUTLINE, row, strict=True)) for row in rows], indent=2))
    else:
        check.say(table(rows, OUTLINE, width_of_screen()))
    return 0


def add_describe(commands: Any) -> None:
    parser = commands.add_parser(
        "describe",
        help="say what ops are, have and lack",
        description="Describe ops: describe mylib::scale ops.py. Without a file or module, the module that is called "
        "as the namespace is imported; torch's own ops are there anyway.",
        epilog="Exit status: 0, or 2 if there is no such op.",
    )
    parser.add_argument("targets", nargs="+", metavar="OP|TARGET", help=TARGET_HELP)
    parser.add_argument("--json", action="store_true", help="print a list of objects")
    parser.set_defaults(run=_describe)


def _describe(options: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    found = [op.describe() for op in ops_of(options.targets)]
    if options.json:
        check.say(json.dumps([each.to_dict() for each in found], indent=2))
    else:
        check.say("\n\n".join(each.text() for each in found))
    return 0


def add_doctor(commands: Any) -> None:
    parser = commands.add_parser(
        "doctor",
        help="say which private parts of torch are used, and whether this torch has them",
        description="Try each private name of torch that customops uses. For what is missing, say what does not work.",
        epilog="Exit status: 0 if all are there that this torch should have, 1 if one is missing.",
    )
    parser.set_defaults(run=_doctor)


def _doctor(options: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    found = [(probe, missing(probe)) for probe in probes()]
    width = width_of_screen()
    release = release_of(torch.__version__)
    check.say(f"customops {customops.__version__}, torch {torch.__version__}, Python {platform.python_version()}")
    tested = f"torch {spelled(OLDEST)} to {spelled(NEWEST)}"
    if release is None or release > NEWEST:
        check.say(check.wrapped(f"This torch is newer than those that customops was tested on, {tested}.", width))
    rows = [(probe.subsystem, _state(probe, names, release), probe.without) for probe, names in found]
    check.say(table(rows, ("part of torch", "state", "needed, or else"), width))
    later = [probe for probe, names in found if names and is_too_new_for(probe, release)]
    gone = [probe for probe, names in found if names and probe not in later]
    for probe in later:
        since = spelled(probe.since)  # type: ignore[arg-type]
        check.say(check.wrapped(f"from torch {since} on; until then: {probe.without}", width))
    if not gone:
        count = sum(len(probe.names) for probe in probes() if probe not in later)
        check.say(f"All of {count} names are there.")
        return 0
    for probe in gone:
        check.say(check.wrapped(f"missing: {probe.without}", width))
    advice = f"Use a torch that customops is tested on, {tested}, or report this output."
    check.say(check.wrapped(advice, width))
    return 1


def _state(probe: Probe, names: list[str], release: tuple[int, int] | None) -> str:
    if not names:
        return f"all {len(probe.names)} there"
    word = "not yet there" if is_too_new_for(probe, release) else "missing"
    return f"{word}: {', '.join(names)}"


# Completion of commands, options and names of checks in a shell.

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


def add_completion(commands: Any) -> None:
    parser = commands.add_parser(
        "completion",
        help="print what completes this command in a shell",
        description='Print the completion for a shell. In ~/.bashrc: eval "$(customops completion bash)"; '
        "for fish: customops completion fish > ~/.config/fish/completions/customops.fish.",
    )
    parser.add_argument("shell", choices=("bash", "zsh", "fish"))
    parser.set_defaults(run=_completion, commands=commands)


def _completion(options: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    parsers: dict[str, argparse.ArgumentParser] = options.commands.choices
    if options.shell == "fish":
        text = _fish(parsers)
    else:
        text = _bash(parsers)
        if options.shell == "zsh":
            text = _ZSH + text.partition("\n")[2]
    check.say(text.rstrip("\n"))
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
