"""``customops migrate``: what it finds in sources, the edits that it makes, and what it says of the rest."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from expecttest import assert_expected_inline
from helpers.command_line import Command, in_shell

import customops

SOURCE = '''\
"""Ops."""
from __future__ import annotations

import torch
import torch.library as lib
from torch import Tensor
from torch.library import (
    custom_op as make,
    impl_abstract,
    Library,
    NAMELESS_SCHEMA,
)

fake = torch.library.register_fake
own = Library("cli_migrated", "FRAGMENT")
torch.library.define("cli_migrated::e", "(Tensor x) -> Tensor"); "é"; lib.impl("cli_migrated::e", "CPU", torch.sin)


@make("cli_migrated::twice", mutates_args=())
def twice(x: Tensor) -> Tensor:
    from torch.library import opcheck
    return x * 2


fake("cli_migrated::twice")(torch.empty_like)
'''

WRITTEN = '''\
"""Ops."""
from __future__ import annotations

import customops
import torch
import torch.library as lib
from torch import Tensor
from customops import custom_op as make, register_fake as impl_abstract
from torch.library import Library, NAMELESS_SCHEMA

fake = customops.register_fake
own = Library("cli_migrated", "FRAGMENT")
customops.define("cli_migrated::e", "(Tensor x) -> Tensor"); "é"; customops.impl("cli_migrated::e", "CPU", torch.sin)


@make("cli_migrated::twice", mutates_args=())
def twice(x: Tensor) -> Tensor:
    from customops import opcheck
    return x * 2


fake("cli_migrated::twice")(torch.empty_like)
'''


def test_a_file_is_listed_and_written(run: Command, here: Path) -> None:
    """Bytes that are not of edited places stay: ends of lines, and columns after letters of two bytes."""
    path = Path("lib/migrated.py")
    path.parent.mkdir()
    path.write_bytes(SOURCE.encode().replace(b"\n", b"\r\n"))
    code, out, err = run("migrate", "lib")
    assert (code, err) == (1, "")
    assert path.read_bytes() == SOURCE.encode().replace(b"\n", b"\r\n")
    assert "lib/migrated.py:14:\n  - fake = torch.library.register_fake\n  + fake = customops.register_fake\n" in out
    assert "lib/migrated.py:7: torch.library.NAMELESS_SCHEMA stays: customops has no NAMELESS_SCHEMA\n" in out
    assert out.endswith(
        "6 places in 1 file to change (--write does it), 1 to look at; what raises: docs/torch_library.md\n"
    )
    assert run("migrate", "lib", "--write").code == 0
    assert path.read_bytes() == WRITTEN.encode().replace(b"\n", b"\r\n")
    code, out, _ = run("migrate", "lib")
    assert (code, out.count("\n")) == (0, 2)


def test_what_is_written_runs(run: Command, here: Path) -> None:
    Path("migrated.py").write_text(SOURCE)
    run("migrate", "migrated.py", "--write")
    import migrated  # type: ignore[import-not-found]  # noqa: PLC0415

    assert customops.default_registry["cli_migrated::twice"] is migrated.twice
    assert migrated.twice(torch.ones(2)).tolist() == [2, 2]
    assert migrated.twice(torch.ones(2, device="meta")).shape == (2,)
    assert torch.equal(torch.ops.cli_migrated.e(torch.ones(1)), torch.ones(1).sin())


@pytest.mark.parametrize(
    "source",
    [
        "import torch; f = torch.library.register_fake\n".encode("utf-8-sig"),
        "# -*- coding: latin-1 -*-\nimport torch\ns = 'é'; f = torch.library.register_fake\n".encode("latin-1"),
    ],
)
def test_encodings(run: Command, here: Path, source: bytes) -> None:
    """Columns count as in UTF-8, whatever the file is written in."""
    path = Path("encoded.py")
    path.write_bytes(source)
    assert run("migrate", "encoded.py", "--write").code == 0
    changed = source.replace(b"torch.library.", b"customops.")
    assert path.read_bytes() == changed.replace(b"import torch", b"import customops\nimport torch")
    compile(path.read_bytes(), path, "exec")


@pytest.mark.parametrize(
    ("above", "below"),
    [
        ('import os\n"""No docstring."""\n', "import torch\n"),
        ('import os\nos.environ["A"] = "1"\n', "from torch import nn\nimport torch\n"),
        ("import sys\ntry:\n    ", "import torch\nexcept ImportError:\n    torch = None\n"),
        ("import sys\nif sys:\n    import os; ", "import torch\n"),
        ("#!/usr/bin/env python\n# A script.\n", "def f():\n    import torch\n"),
        ('#!/usr/bin/env python\n"""What it is."""\n', "def f():\n    import torch\n"),
        ('"""What it is."""\nfrom __future__ import annotations\n\n', "import torch\n"),
    ],
)
def test_where_the_import_goes(run: Command, here: Path, above: str, below: str) -> None:
    below += "    torch.library.opcheck\n" if below.startswith("def") else "torch.library.opcheck\n"
    Path("placed.py").write_text(above + below)
    assert run("migrate", "placed.py", "--write").code == 0
    changed, line = below.replace("torch.library.", "customops."), above.rpartition("\n")[2]
    between = "; " if line.strip() else f"\n{line}"
    assert Path("placed.py").read_text() == f"{above}import customops{between}{changed}"


def test_an_import_that_is_there_is_enough(run: Command, here: Path) -> None:
    source = "import torch\nimport customops\ntorch.library.opcheck\ntorch._custom_ops.impl\n"
    Path("placed.py").write_text(source)
    assert run("migrate", "placed.py", "--write").code == 0
    changed = source.replace("torch.library.", "customops.").replace("torch._custom_ops", "customops.legacy")
    assert Path("placed.py").read_text() == f"import customops.legacy\n{changed}"


def test_nothing_is_to_change_where_the_import_is_there(run: Command, here: Path) -> None:
    Path("there.py").write_text("import torch\nimport customops\ntorch.library.opcheck\n")
    _, out, _ = run("migrate", "there.py")
    assert "1 place in 1 file" in out


def test_what_type_checkers_import_is_not_there(run: Command, here: Path) -> None:
    source = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import customops\n    from torch import Tensor\n"
    Path("typed.py").write_text(f"{source}import torch\ntorch.library.opcheck\n")
    assert run("migrate", "typed.py", "--write").code == 0
    assert Path("typed.py").read_text() == f"{source}import customops\nimport torch\ncustomops.opcheck\n"


def test_names_that_are_bound_again(run: Command, here: Path) -> None:
    """By what is no name of torch: the name stays what it is elsewhere in the file."""
    source = """\
import torch
from torch import library
try:
    import torch._dynamo
except ImportError:
    torch = None
def define(make):
    library = make()
    return library
library.define("ns::f", "() -> ()")
torch.library.opcheck
"""
    Path("bound.py").write_text(source)
    assert run("migrate", "bound.py", "--write").code == 0
    changed = source.replace("torch.library.o", "customops.o").replace("library.define", "customops.define")
    assert Path("bound.py").read_text() == f"import customops\n{changed}"


def test_names_that_are_assigned(run: Command, here: Path) -> None:
    path = Path("assigned.py")
    path.write_text("import torch\nlib = torch.library\nlib.opcheck(1)\ncheck = lib.opcheck\ncheck(2)\n")
    assert run("migrate", "assigned.py", "--write").code == 0
    changed = "lib = torch.library\ncustomops.opcheck(1)\ncheck = customops.opcheck\ncheck(2)\n"
    assert path.read_text() == f"import customops\nimport torch\n{changed}"


def test_imports_of_all_names(run: Command, here: Path) -> None:
    Path("stars.py").write_text("from torch import *\nfrom torch.library import *\n")
    code, out, _ = run("migrate", "stars.py")
    assert (code, out.splitlines()[0]) == (
        0,
        "stars.py:2: stays, and what it names is not looked at: import the names of torch.library",
    )


BREAKS = """\
import torch
from torch.library import Library, register_kernel
lib = Library("cli_b", "DEF")
lib.define("f(Tensor x) -> Tensor")
lib._register_fake("f", torch.empty_like)
@register_kernel("cli_b::f", "cpu")
def kernel(x):
    if x.numel():
        return x
    def inner(x):
        return x
    return x.clone()
def setup(ctx, inputs, outputs):
    pass
torch.library.register_autograd("cli_b::f", lambda ctx, grad: grad, setup_context=setup)
torch.library.register_fake("cli_elsewhere::g", torch.empty_like)
torch.library.define("cli_b::lambda", "(Tensor x) -> Tensor")
if hasattr(torch.library, "custom_op"):
    pass
"""


def test_what_breaks_and_what_stays(run: Command, here: Path) -> None:
    Path("breaks.py").write_text(BREAKS)
    Path("no.py").write_text("def f(:")
    Path(".hidden").mkdir()
    Path(".hidden/a.py").write_text(BREAKS)
    _, out, _ = run("migrate", ".")
    said = [line for line in out.splitlines() if not line.startswith("  ") and not line.endswith(":")]
    assert_expected_inline(
        "\n".join(said[:-1]),
        """\
no.py: left as it is, since it cannot be read: invalid syntax (<unknown>, line 1)
breaks.py:9: raises AliasError if that is the argument: return x.clone(), or use impl
breaks.py:13: raises CallbackError: setup_context(ctx, inputs, outputs) has to be (ctx, inputs, output)
breaks.py:16: raises RegistrationError if cli_elsewhere::g is not defined by then: \
import the library that defines the op first
breaks.py:17: raises DefinitionError: lambda cannot be looked up in torch.ops; name it lambda_
breaks.py:18: stays: it asks torch; customops has the name in each torch that it supports, so drop this""",
    )
    assert said[-1].startswith("7 places in 1 file")


LIBRARIES = """\
import torch
import torch.library as tl
from torch.library import Library as L
q = L("cli_q", "DEF")
q.define("a(Tensor x) -> Tensor"); q.impl("a", torch.neg, "CPU")
schema = "b(Tensor x) -> Tensor"
q.define(schema)
q.define("many(Tensor x, "
         "int n) -> Tensor")
q.impl("many", lambda x, n: x * n, "CompositeExplicitAutograd")
q._register_fake("a", torch.empty_like)
other: L = tl.Library("cli_q", "FRAGMENT")
name = other.define("c(Tensor x) -> Tensor")
def register(lib, my):
    lib.impl("c", torch.sin, "CPU")
    with tl._scoped_library("cli_q", "FRAGMENT") as my: my.impl("c", torch.sin, "CPU", with_keyset=True)
if True: from torch.library import Library, infer_schema
"""


def test_libraries(run: Command, here: Path) -> None:
    """Each call of a method is listed: of any name of a Library, and of what may be one; the plain ones are written."""
    Path("libraries.py").write_text(LIBRARIES)
    _, out, _ = run("migrate", "libraries.py", "--write")
    assert_expected_inline(
        out,
        """\
libraries.py:1:
  + import customops
libraries.py:5:
  - q.define("a(Tensor x) -> Tensor"); q.impl("a", torch.neg, "CPU")
  + customops.define("cli_q::a", "(Tensor x) -> Tensor", lib=q); customops.impl("cli_q::a", "CPU", torch.neg, lib=q)
libraries.py:8:
  - q.define("many(Tensor x, "
  -          "int n) -> Tensor")
  + customops.define("cli_q::many", "(Tensor x, int n) -> Tensor", lib=q)
libraries.py:10:
  - q.impl("many", lambda x, n: x * n, "CompositeExplicitAutograd")
  + customops.impl("cli_q::many", "CompositeExplicitAutograd", lambda x, n: x * n, lib=q)
libraries.py:11:
  - q._register_fake("a", torch.empty_like)
  + customops.register_fake("cli_q::a", torch.empty_like, lib=q)
libraries.py:17:
  - if True: from torch.library import Library, infer_schema
  + if True: from torch.library import Library; from customops import infer_schema
libraries.py:7: stays: torch's q.define; customops.define(..., lib=q) checks its arguments
libraries.py:13: stays: torch's other.define; customops.define("cli_q::c", ..., lib=other) checks its arguments
libraries.py:15: stays: torch's lib.impl; customops.impl(..., lib=lib) checks its arguments
libraries.py:16: stays: torch's my.impl; customops.impl(..., lib=my) checks its arguments
libraries.py:16: torch.library._scoped_library stays: customops has no _scoped_library
7 places in 1 file changed, 5 to look at; what raises: docs/torch_library.md
""",
    )
    import libraries  # type: ignore[import-not-found]  # noqa: F401, PLC0415

    ops = torch.ops.cli_q
    assert (ops.a(torch.ones(1)).item(), ops.many(torch.ones(1), 3).item()) == (-1, 3)
    assert ops.a(torch.ones(2, device="meta")).shape == (2,)


def test_no_source(run: Command) -> None:
    code, _, err = run("migrate", "nothing")
    assert (code, err) == (2, "error: no such file or folder: nothing\n")


@pytest.mark.process
def test_nothing_is_imported(here: Path) -> None:
    Path("raises.py").write_text("import torch.library\n1 / 0\ntorch.library.opcheck\n")
    code, out, _ = in_shell("migrate", str(here / "raises.py"))
    assert code == 1
    assert "+ customops.opcheck" in out
    assert "raises" not in sys.modules
