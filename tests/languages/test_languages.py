"""The names of the room."""

from __future__ import annotations

import sys

import pytest

from customops import languages
from customops.errors import ArgumentError


def test_a_package_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tvm_ffi", None)
    with pytest.raises(ImportError, match="kernels in TVM-FFI need a package: pip install apache-tvm-ffi"):
        languages.from_tvm_ffi(None)


@pytest.mark.parametrize("name", ["numpy", "c"])
def test_what_is_no_function(name: str) -> None:
    language = {"numpy": "NumPy", "c": "C"}[name]
    with pytest.raises(ArgumentError, match=f"a {language} kernel must be a function") as caught:
        getattr(languages, f"from_{name}")("kernel.so")
    assert (caught.value.argument, caught.value.got) == ("fn", "'kernel.so'")
