"""Digests: functions that do the same have equal ones, and what cannot be told apart has none twice."""

from __future__ import annotations

import enum
import functools
import logging
import math
import re
import sys
import types
from collections import defaultdict
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from typing import Any, NamedTuple

import pytest
import torch
from torch.autograd.function import once_differentiable

from customops import Registry, Tag
from customops._dispatch import fingerprint

FACTOR = 2
HELPER = types.ModuleType("digest_helper")
HELPER.scale = lambda x: x * 3  # type: ignore[attr-defined]


def _no_attribute(name: str) -> Any:
    raise (ValueError if name == "broken" else AttributeError)(name)


HELPER.__getattr__ = _no_attribute  # type: ignore[method-assign]


def digest(value: Any) -> str:
    return fingerprint.of_values([value])


def made(source: str, **names: Any) -> Callable[..., Any]:
    """A function of a source of its own, as a cell of a notebook makes one."""
    namespace = {"torch": torch, "math": math, **names}
    exec(source, namespace)
    return namespace["f"]  # type: ignore[no-any-return]


def closure(by: Any) -> Callable[..., Any]:
    return lambda x: x * by


PAIRS = {
    "text": ("def f(x): return x + 1", {}, "def f(x): return x + 2", {}),
    "operation": ("def f(x): return x + 1", {}, "def f(x): return x - 1", {}),
    "name": ("def f(x): return x.sin()", {}, "def f(x): return x.cos()", {}),
    "default": ("def f(x, k=1): return x", {}, "def f(x, k=2): return x", {}),
    "keyword default": ("def f(x, *, k=1): return x", {}, "def f(x, *, k=2): return x", {}),
    "global": ("def f(x): return x * K", {"K": 1}, "def f(x): return x * K", {"K": 2}),
    "global list": ("def f(x): return K[0]", {"K": [1]}, "def f(x): return K[0]", {"K": [2]}),
    "global dtype": ("def f(x): return x.to(K)", {"K": torch.half}, "def f(x): return x.to(K)", {"K": torch.float}),
    "function": ("def f(x): return g(x)", {"g": closure(1)}, "def f(x): return g(x)", {"g": closure(2)}),
    "inner function": (
        "def f(x): return (lambda y: y + K)(x)",
        {"K": 1},
        "def f(x): return (lambda y: y + K)(x)",
        {"K": 2},
    ),
    "pattern": ("def f(x): return K(x)", {"K": re.compile("a")}, "def f(x): return K(x)", {"K": re.compile("b")}),
    "partial": ("def f(x): return g(x)", {"g": functools.partial(max, 1)}, "def f(x): return g(x)", {"g": max}),
}


@pytest.mark.parametrize("pair", PAIRS)
def test_what_differs(pair: str) -> None:
    source, names, other, other_names = PAIRS[pair]
    assert digest(made(source, **names)) == digest(made(source, **names))
    assert digest(made(source, **names)) != digest(made(other, **other_names))


def test_lines_and_names_do_not_count() -> None:
    assert digest(made("def f(x): return x + 1")) == digest(made("\n\n\ndef f(x): return x + 1"))


def test_classes_and_objects() -> None:
    class Scale:
        def __init__(self, by: float) -> None:
            self.by = by

        def __call__(self, x: Any) -> Any:
            return x * self.by

    assert digest(Scale(2.0)) == digest(Scale(2.0))
    assert digest(Scale(2.0)) != digest(Scale(3.0))
    assert digest(Scale(2.0).__call__) != digest(Scale(3.0).__call__)


def test_recursion() -> None:
    assert digest(made("def f(x): return f(x - 1) if x else 0")) == digest(
        made("def f(x): return f(x - 1) if x else 0")
    )


def test_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    """Functions of a module that is named count, as far as they are used."""
    fn = made("def f(x): return helper.scale(x)", helper=HELPER)
    before = digest(fn)
    monkeypatch.setattr(HELPER, "unused", 5, raising=False)
    assert digest(fn) == before
    monkeypatch.setattr(HELPER, "scale", lambda x: x * 4)
    assert digest(fn) != before


@pytest.mark.parametrize(
    "value", [torch.ones(2), torch.nn.Linear(1, 1), open, object()], ids=["tensor", "module", "builtin", "object"]
)
def test_values_that_cannot_be_told_apart(value: Any) -> None:
    """No two digests of a function that holds one are equal: it may have changed."""
    assert (digest(closure(value)) == digest(closure(value))) is (value is open)


def test_a_fingerprint_is_of_all_ops(registry: Registry, ns: str) -> None:
    op = registry.custom_op(f"{ns}::f", _identity, mutates_args=())
    other = registry.custom_op(f"{ns}::g_", _in_place, mutates_args=("x",), tags=Tag.inplace)
    assert fingerprint.fingerprint({f"{ns}::another"}) is None
    before = fingerprint.fingerprint({f"{ns}::f"})
    assert before is not None
    assert fingerprint.fingerprint({f"{ns}::g___writes"}) == before
    op.register_kernel("cpu", lambda x: x + 1)
    assert fingerprint.fingerprint({f"{ns}::f"}) == before
    op.register_fake(lambda x: torch.empty_like(x))
    second = fingerprint.fingerprint({f"{ns}::f"})
    assert second != before
    other.unregister()
    assert fingerprint.fingerprint({f"{ns}::g_"}) is None
    assert fingerprint.fingerprint({f"{ns}::f"}) != second


def _identity(x: torch.Tensor) -> torch.Tensor:
    return x.clone()


def _in_place(x: torch.Tensor) -> torch.Tensor:
    return x.add_(1)


def test_ops_in_formulas_go_by_their_names(registry: Registry, ns: str) -> None:
    """What they do is in the fingerprint anyway; a formula that calls one is the same in another process."""
    op = registry.custom_op(f"{ns}::f", _identity, mutates_args=())
    other = registry.custom_op(f"{ns}::g", _identity, mutates_args=())
    assert digest(closure(op)) == digest(closure(op)) != digest(closure(other))


def test_a_package_called_test_is_a_users() -> None:
    one, other = (made("def f(x): return x * K", __name__="test.formulas", K=k) for k in (1, 2))
    assert digest(one) != digest(other)


def test_an_object_that_answers_to_any_name() -> None:
    class Strange:
        def __getattr__(self, name: str) -> Any:
            raise ValueError(name)

    assert digest(Strange()) == digest(Strange())


# Functions that hold others ---------------------------------------------------------------------------------------


#: Sources of ``f`` in which K counts, wherever it stands.
HOLDING = {
    "decorator of torch": "@once_differentiable\ndef f(ctx, g): return g * K",
    "no_grad": "@torch.no_grad()\ndef f(ctx, g): return g * K",
    "helper under no_grad": "@torch.no_grad()\ndef h(g): return g * K\ndef f(ctx, g): return h(g)",
    "vmap": "h = torch.vmap(lambda g: g * K)\ndef f(ctx, g): return h(g)",
    "grad": "h = torch.func.grad(lambda g: (g * K).sum())\ndef f(ctx, g): return h(g)",
    "context manager": "@contextmanager\ndef h(): yield K\ndef f(ctx, g):\n  with h() as k: return g * k",
    "named tuple": (
        "class C(NamedTuple):\n  a: int\n  def k(self): return K * self.a\nc = C(1)\ndef f(ctx, g): return g * c.k()"
    ),
    "subclass of dict": "class C(dict):\n  def k(self): return K\nc = C()\ndef f(ctx, g): return g * c.k()",
    "attribute of a dict": "class C(dict): pass\nc = C()\nc.k = K\ndef f(ctx, g): return g * c.k",
    "subclass of float": "class C(float):\n  def k(self): return K\nc = C(1)\ndef f(ctx, g): return g * c.k()",
    "built-in method": "get = {'a': K}.get\ndef f(ctx, g): return g * get('a')",
    "attribute of a function": "def h(): pass\nh.k = K\ndef f(ctx, g): return g * h.k",
    "enum": "class C(Enum):\n  A = 1\n  @property\n  def k(self): return K\nc = C.A\ndef f(ctx, g): return g * c.k",
    "metaclass": (
        "class M(type):\n  @property\n  def k(cls): return K\nclass C(metaclass=M): pass\ndef f(ctx, g): return g * C.k"
    ),
    "default factory": "d = defaultdict(lambda: K)\ndef f(ctx, g): return g * d['z']",
    "slots": "class C:\n  __slots__ = ('k',)\nc = C()\nc.k = K\ndef f(ctx, g): return g * c.k",
    "dataclass": "@dataclass\nclass C:\n  k: float = K\nc = C()\ndef f(ctx, g): return g * c.k",
    "import in the body": "def f(ctx, g):\n  from digest_user import number\n  return g * number",
    "import of a module": "def f(ctx, g):\n  import digest_user\n  return g * digest_user.number",
    "import of a helper": "def f(ctx, g):\n  from digest_user import helper\n  return helper(g)",
    "module of a package": "import digest_user\ndef f(ctx, g): return g * digest_user.inner.number",
    "module in a closure": (
        "def o():\n  import digest_user as m\n  def f(ctx, g): return g * m.number\n  return f\nf = o()"
    ),
    "module as a default": "import digest_user\ndef f(ctx, g, m=digest_user): return g * m.number",
    "getattr": "import digest_user as m\ndef f(ctx, g): return g * getattr(m, 'number')",
    "getattr of a package": "import digest_user as m\ndef f(ctx, g): return g * getattr(m.inner, 'number', 1)",
    "getattr in the body": "def f(ctx, g):\n  import digest_user.inner as m\n  return g * getattr(m, 'number')",
    "dictionary of a module": "import digest_user as m\ndef f(ctx, g): return g * m.inner.__dict__['number']",
    "__getattr__ of a module": "import digest_user as m\ndef f(ctx, g): return g * m.late",
    "import by __getattr__": "def f(ctx, g):\n  from digest_user import late as k\n  return g * k",
    "put into torch": "def f(ctx, g): return g * torch.digest_number",
    "put into a module of torch": "import torch.nn.functional as F\ndef f(ctx, g): return g * F.digest_number",
    "function of torch": "def f(ctx, g): return torch.nn.functional.relu(g)",
    "imported function of torch": "def f(ctx, g):\n  from torch.nn.functional import relu\n  return relu(g)",
    "method of tensors": "def f(ctx, g): return g.relu_()",
}


def holding(source: str, number: int, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """``f`` of a source with a number for K, which is what the user's modules hold, too."""
    user, inner = types.ModuleType("digest_user"), types.ModuleType("digest_user.inner")
    user.number = inner.number = number  # type: ignore[attr-defined]
    user.inner = inner  # type: ignore[attr-defined]
    user.helper = made(f"def f(x): return x * {number}")  # type: ignore[attr-defined]
    user.__getattr__ = {"late": number}.__getitem__  # type: ignore[method-assign]
    for of in (torch, torch.nn.functional):
        monkeypatch.setattr(of, "digest_number", number, raising=False)
    for of in (torch.nn.functional, torch.Tensor):
        monkeypatch.setattr(of, "relu" if of is torch.nn.functional else "relu_", user.helper)
    monkeypatch.setitem(sys.modules, "digest_user", user)
    monkeypatch.setitem(sys.modules, "digest_user.inner", inner)
    monkeypatch.setitem(sys.modules, "digest_test", types.ModuleType("digest_test"))  # dataclasses look there
    names = {"__name__": "digest_test", "once_differentiable": once_differentiable, "Enum": Enum}
    names |= {"contextmanager": contextmanager, "NamedTuple": NamedTuple, "dataclass": dataclass}
    return made(re.sub(r"\bK\b", str(number), source), **names, defaultdict=defaultdict)


@pytest.mark.parametrize("source", HOLDING)
def test_functions_that_hold_others(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    digests = [digest(holding(HOLDING[source], number, monkeypatch)) for number in (2, 2, 3)]
    assert digests[0] == digests[1] != digests[2]


@pytest.mark.parametrize(
    "source",
    [
        "K = 2\ndef f(ctx, g): return g * globals()['K']",
        "import os\ndef f(ctx, g): return g * float(os.environ['CUSTOMOPS_TEST_K'])",
        "def f(ctx, g):\n  import no_such_module\n  return g * no_such_module.K",
        "class C: pass\nc = C()\nc.m = helper\ndef f(ctx, g): return g * c.m.K",
        "def f(ctx, g): return g * vars(helper)['K']",
        "def f(ctx, g):\n  for name in 'K': g = g * getattr(helper, name)\n  return g",
        "def f(ctx, g):\n  m = helper\n  return g * m.K",
        "def h(m): return getattr(m, 'K')\ndef f(ctx, g): return g * h(helper)",
        "get = lambda name: getattr(helper, name)\ndef f(ctx, g): return g * get('K')",
        "import sys\ndef f(ctx, g): return g * sys.modules['digest_helper'].K",
        "from sys import modules\ndef f(ctx, g): return g * modules['digest_helper'].K",
        "import sys\ndef f(ctx, g): return g * sys._getframe().f_globals['K']",
        "def h(): pass\ndef f(ctx, g): return g * getattr(h, '__globals__')['K']",
        "def f(ctx, g): return g * helper.broken",
    ],
)
def test_functions_that_may_come_to_anything(source: str, caplog: pytest.LogCaptureFixture) -> None:
    """Nothing in a cache is theirs, not even in this process: what they use may have changed. It is said once."""
    fingerprint._told.clear()
    caplog.set_level(logging.DEBUG, logger="customops")
    fn = made(source, helper=HELPER)
    assert digest(fn) != digest(fn)
    (record,) = caplog.records
    assert "keep no graph with ops of customops: <string>:" in record.message


@pytest.mark.parametrize(
    "source",
    [
        "def f(ctx, g, name='real'): return helper.scale(getattr(g, name))",
        "def f(ctx, g): return helper.scale(g) * helper.missing",
        "def f(ctx, g): return torch.ops.aten.mul.Tensor(g, getattr(torch.backends.cudnn, 'enabled'))",
        "import math\ndef f(ctx, g): return [helper.scale(x) for x in g.modules()] * int(math.pi)",
        "def f(ctx, g):\n  import torch.nn.functional as F\n  return (lambda x: F.gelu(x))(g)",
        "def f(ctx, g):\n  import digest_module as m\n  return (lambda x: m.scale(x))(g)",
    ],
)
def test_what_is_told_apart(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Names that are looked up of objects, which count as a whole, and of torch's modules."""
    monkeypatch.setitem(sys.modules, "digest_module", HELPER)
    assert digest(made(source, helper=HELPER)) == digest(made(source, helper=HELPER))


class Bits(enum.IntEnum):
    FOUR = 4
    EIGHT = 8


def test_a_number_that_is_an_enum_is_the_same_in_each_process() -> None:
    walk = fingerprint._Walk()
    walk.add(Bits)  # raises where a digest would hold for this process alone
    assert walk.hash.hexdigest() != fingerprint._Walk().hash.hexdigest()
