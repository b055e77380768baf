"""``customops new``: write a package of ops, or of a device, from the files in ``package`` or ``device``."""

from __future__ import annotations

import argparse
import keyword
import re
import sys
from pathlib import Path
from typing import Any

from customops._cli.screen import FINE, say
from customops._torch.library import names_in
from customops.backend.errors import BackendNameError
from customops.backend.registration import check_free, check_spelling

#: In names and texts, NAME stands for that of the package; ``.txt`` at the end keeps tools off the files.
TEMPLATES = {what: Path(__file__).parent / what for what in ("package", "device")}


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "new",
        help="write a package of ops, or of a device, with tests",
        description="Write the package NAME into DIR. Of ops: pyproject.toml, an op with a NumPy kernel and one with a "
        "Triton kernel, tests, and a GitHub workflow. Of a device (customops.backend): ten kernels, torch's own tests "
        "of their ops, and the entry point by which `import torch` makes it. The tests pass as written.",
        epilog="Exit status: 0, or 2 if NAME cannot name a package or device, or DIR is there already.",
    )
    parser.add_argument("what", metavar=f"{{{','.join(TEMPLATES)}}}", choices=[*TEMPLATES])
    parser.add_argument("name", metavar="NAME", help="the package, and the namespace of its ops, or the device: mylib")
    parser.add_argument("directory", nargs="?", type=Path, metavar="DIR", help="by default NAME")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    name, folder = options.name, options.directory or Path(options.name)
    if options.what == "device":
        try:
            check_spelling(name)
            check_free(name)
        except BackendNameError as error:
            parser.error(str(error))
    if not _is_spelled(name):
        cured = re.sub(r"\W+", "_", name.lower(), flags=re.ASCII).strip("_0123456789")
        cure = f"; {cured} does" if _is_spelled(cured) and not _is_taken(cured) else ""
        parser.error(f"{name} cannot name a package: small letters, digits and _ can, and no keyword of Python{cure}")
    if _is_taken(name):
        other = f"{name}_{'ops' if options.what == 'package' else 'device'}"
        cure = "" if _is_taken(other) else f"; {other} is free"
        parser.error(f"{name} is the name of another package, or of a namespace in torch.ops{cure}")
    if folder.exists():
        parser.error(f"{folder} exists, and no file is overwritten; name another folder: new {options.what} {name} DIR")
    template = TEMPLATES[options.what]
    for source in sorted(template.rglob("*.txt")):
        path = folder / str(source.relative_to(template)).removesuffix(".txt").replace("NAME", name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(source.read_text(encoding="utf-8").replace("NAME", name), encoding="utf-8")
        say(f"wrote {path}")
    say(f'\nnext: cd {folder} && pip install -e ".[test]" && pytest')
    return FINE


def _is_spelled(name: str) -> bool:
    return bool(re.fullmatch("[a-z][a-z0-9_]*", name)) and not keyword.iskeyword(name)


def _is_taken(name: str) -> bool:
    known = (*sys.stdlib_module_names, "tests", "torch", "triton", "numpy", "customops")
    return name in known or bool(names_in(name))
