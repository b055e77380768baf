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
from customops._torch.probes import is_too_new_for, missing, probes
from customops._versions import NEWEST, OLDEST, spelled
from customops._versions import release as release_of
from customops.checks import CHECKS


def add_list_and_describe(commands: Any) -> None:
    listing = commands.add_parser(
        "list",
        help="list the ops of targets: schema, kernels, rules, samples",
        description="Import each TARGET and list the ops that it defines.",
        epilog="Exit status: 0, or 2 if a TARGET cannot be imported or defines no op.",
    )
    describing = commands.add_parser(
        "describe",
        help="say what ops are, have and lack",
        description="Describe ops: describe mylib::scale ops.py. Without a file or module, the module that is called "
        "as the namespace is imported; torch's own ops are there anyway.",
        epilog="Exit status: 0, or 2 if there is no such op.",
    )
    for parser, targets, run in ((listing, "TARGET", _list), (describing, "OP|TARGET", _describe)):
        parser.add_argument("targets", nargs="+", metavar=targets, help=TARGET_HELP)
        parser.add_argument("--json", action="store_true", help="print a list of objects")
        parser.set_defaults(run=run)


def _list(options: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    rows = [outline(op) for op in ops_of(options.targets)]
    objects = [dict(zip(OUTLINE, row, strict=True)) for row in rows]
    check.say(json.dumps(objects, indent=2) if options.json else table(rows, OUTLINE, width_of_screen()))
    return check.FINE


def _describe(options: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    found = [op.describe() for op in ops_of(options.targets)]
    if options.json:
        check.say(json.dumps([each.to_dict() for each in found], indent=2))
    else:
        check.say("\n\n".join(each.text() for each in found))
    return check.FINE


def add_doctor(commands: Any) -> None:
    parser = commands.add_parser(
        "doctor",
        help="say which private parts of torch are used, and whether this torch has them",
        description="Try each private name of torch that customops uses. For what is missing, say what does not work.",
        epilog="Exit status: 0 if all are there that this torch should have, 1 if one is missing.",
    )
    parser.set_defaults(run=_doctor)


def _doctor(options: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    release, tested = release_of(torch.__version__), f"torch {spelled(OLDEST)} to {spelled(NEWEST)}"
    rows, later, gone, there = [], [], [], 0
    for probe in probes():
        names = missing(probe)
        if not names:
            state = f"all {len(probe.names)} there"
            there += len(probe.names)
        elif probe.since is not None and is_too_new_for(probe, release):
            state = f"not yet there: {', '.join(names)}"
            later.append(f"from torch {spelled(probe.since)} on; until then: {probe.without}")
        else:
            state = f"missing: {', '.join(names)}"
            gone.append(f"missing: {probe.without}")
        rows.append((probe.subsystem, state, probe.without))
    width = width_of_screen()
    check.say(f"customops {customops.__version__}, torch {torch.__version__}, Python {platform.python_version()}")
    if release is None or release > NEWEST:
        check.say(check.wrapped(f"This torch is newer than those that customops was tested on, {tested}.", width))
    check.say(table(rows, ("part of torch", "state", "needed, or else"), width))
    advice = f"Use a torch that customops is tested on, {tested}, or report this output."
    for line in (*later, *gone, advice if gone else f"All of {there} names are there."):
        check.say(check.wrapped(line, width))
    return check.FAULTY if gone else check.FINE


# Completion of commands, options and names of checks in a shell.

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


def add_completion(commands: Any) -> None:
    parser = commands.add_parser(
        "completion",
        help="print what completes this command in a shell",
        description='Print the completion for a shell. In ~/.bashrc: eval "$(customops completion bash)"; '
        "for fish: customops completion fish > ~/.config/fish/completions/customops.fish.",
    )
    parser.add_argument("shell", choices=("bash", "zsh", "fish"))
    parser.set_defaults(run=_completion, commands=commands)


def _options(parser: argparse.ArgumentParser) -> list[argparse.Action]:
    return [action for action in parser._actions if action.option_strings]


def _values(action: argparse.Action) -> str:
    """What an option takes, if that is known."""
    if action.metavar == "CHECK":
        return " ".join(name.removeprefix("test_") for name in CHECKS)
    return " ".join(str(choice) for choice in action.choices or ())


def _completion(options: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
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
        check.say("\n".join(lines))
        return check.FINE
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
    check.say(head + _BASH.format(**words_of))
    return check.FINE
