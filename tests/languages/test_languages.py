"""The names of the room."""

from __future__ import annotations

import sys

import pytest

import customops
from customops import languages
from customops.errors import ArgumentError


def test_names() -> None:
    assert dir(languages) == sorted(languages.__all__)
    with pytest.raises(AttributeError, match="no attribute 'from_rust'"):
        _ = languages.from_rust  # type: ignore[attr-defined]


def test_a_package_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tvm_ffi", None)
    monkeypatch.delitem(sys.modules, "customops.languages._tvm_ffi", raising=False)
    monkeypatch.delattr(languages, "_tvm_ffi", raising=False)
    with pytest.raises(ImportError, match="pip install apache-tvm-ffi"):
        _ = customops.languages.from_tvm_ffi


@pytest.mark.parametrize("name", ["numpy", "c"])
def test_what_is_no_function(name: str) -> None:
    language = {"numpy": "NumPy", "c": "C"}[name]
    with pytest.raises(ArgumentError, match=f"a {language} kernel must be a function") as caught:
        getattr(languages, f"from_{name}")("kernel.so")
    assert (caught.value.argument, caught.value.got) == ("fn", "'kernel.so'")
