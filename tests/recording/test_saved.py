"""`dump`, `load` and `replay`: the arguments of a call, in a file, run again."""

from __future__ import annotations

import dataclasses
import enum
import logging
import re
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.serialization import config

import customops
from customops import Mut, Registry
from customops.errors import AliasError, ArgumentError, RegistrationError, UnsupportedError


class Mode(enum.Enum):
    FAST = "fast"
    EXACT = "exact"


def picky(x: Tensor, by: float = 2.0) -> Tensor:
    if x.stride() != (3, 1):
        raise ValueError(f"strides {x.stride()}")
    return x * by


@pytest.fixture
def op(registry: Registry, ns: str) -> Any:
    return registry.custom_op(f"{ns}::picky", picky, mutates_args=())


def test_a_failing_call_is_written_and_fails_again(op: Any, tmp_path: Path) -> None:
    x = torch.arange(6.0).reshape(3, 2).t()
    with customops.recording.dump(tmp_path / "new") as paths:
        op(torch.ones(2, 3))
        with pytest.raises(ValueError, match="strides"):
            op(x, by=3.0)
    (path,) = paths
    saved = customops.recording.load(path)
    assert torch.equal(saved.args[0], x)
    assert saved.args[0].stride() == x.stride()
    assert saved.kwargs == {"by": 3.0}
    assert (saved.op, saved.schema, saved.source) == (op._qualname, str(op.schema), op.source)
    assert saved.error == "ValueError('strides (1, 2)')"
    assert "raised ValueError" in str(saved)
    with pytest.raises(ValueError, match=r"strides \(1, 2\)"):
        customops.recording.replay(path)
    op.register_kernel("cpu", lambda x, by: x * by)
    assert torch.equal(customops.recording.replay(path), x * 3)


def test_failures_outside_the_kernel(registry: Registry, ns: str, tmp_path: Path) -> None:
    op = registry.custom_op(f"{ns}::same", lambda x: x, schema="(Tensor x) -> Tensor")
    with customops.recording.dump(tmp_path) as paths, pytest.raises(AliasError):
        op(torch.ones(2))
    assert len(paths) == 1


def test_all_calls_are_written_before_they_run(registry: Registry, ns: str, tmp_path: Path) -> None:
    seen: list[int] = []

    def look(x: Tensor) -> Tensor:
        seen.append(len(list(tmp_path.iterdir())))
        return x * 2

    op = registry.custom_op(f"{ns}::look", look)
    with customops.recording.dump(tmp_path, when="all", limit=2) as paths:
        for _ in range(4):
            op(torch.ones(1))
    assert seen == [1, 2, 2, 2]
    assert len(paths) == 2


def test_chosen_calls(op: Any, tmp_path: Path) -> None:
    with customops.recording.dump(tmp_path, when=lambda call: call.arguments["x"].shape[0] > 4) as paths:
        op(torch.ones(2, 3)), op(torch.ones(5, 3))
    assert [customops.recording.load(path).args[0].shape for path in paths] == [(5, 3)]
    with (
        pytest.raises(ArgumentError, match="when= has an invalid value"),
        customops.recording.dump(tmp_path, when="no"),
    ):  # type: ignore[arg-type]
        pass


def test_what_is_written_to_is_as_before_the_call(registry: Registry, ns: str, tmp_path: Path) -> None:
    def add_(x: Mut[Tensor], xs: Mut[list[Tensor]], y: Tensor) -> None:
        x.add_(y)
        xs[0].add_(y)

    op = registry.custom_op(f"{ns}::add_", add_)
    x, xs, y = torch.ones(2), [torch.ones(2)], torch.ones(2)
    with customops.recording.dump(tmp_path, when=lambda call: True) as paths:
        op(x, xs, y)
    saved = customops.recording.load(paths[0])
    assert saved.args[0].tolist() == saved.args[1][0].tolist() == [1, 1]
    assert x.tolist() == xs[0].tolist() == [2, 2]
    customops.recording.replay(paths[0])
    assert saved.args[0].tolist() == [1, 1]


def test_values_of_all_types(registry: Registry, ns: str, tmp_path: Path) -> None:
    def many(
        x: Tensor | None, mode: Mode, dtype: torch.dtype, device: torch.device, sizes: list[int], layout: torch.layout
    ) -> Tensor:
        return torch.zeros(sizes, dtype=dtype, device=device, layout=layout) + len(mode.value)

    op = registry.custom_op(f"{ns}::many", many)
    args = (torch.ones(1), Mode.EXACT, torch.float64, torch.device("cpu"), [2, 3], torch.strided)
    with customops.recording.dump(tmp_path, when="all") as paths:
        result = op(*args)
    assert torch.equal(customops.recording.replay(paths[0]), result)
    sample = customops.recording.load(paths[0]).sample
    assert sample.args[1:] == args[1:]


def test_a_saved_call_is_a_sample_and_a_benchmark(op: Any, tmp_path: Path) -> None:
    op.register_fake(lambda x, by: torch.empty_like(x))
    with customops.recording.dump(tmp_path, when="all") as paths:
        op(torch.ones(2, 3, requires_grad=True))
    saved = customops.recording.load(paths[0])
    assert saved.sample.args[0].requires_grad
    report = customops.check(op, [saved.sample], only="test_faketensor", isolate=False)
    assert report.count("passed")
    assert 0 < saved.benchmark(0.01) < 0.1


def test_what_cannot_be_written_is_said(op: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    class Sub(Tensor):
        pass

    with customops.recording.dump(tmp_path, when="all") as paths, caplog.at_level(logging.WARNING):
        op(torch.ones(2, 3).as_subclass(Sub))
    assert not paths
    assert not list(tmp_path.iterdir())
    assert "were not written" in caplog.text


def test_a_generator_cannot_be_written(
    registry: Registry, ns: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    schema = "(Tensor x, Generator? generator=None) -> Tensor"
    draw = registry.custom_op(f"{ns}::draw", lambda x, generator=None: x * 2, schema=schema)
    with customops.recording.dump(tmp_path, when="all") as paths, caplog.at_level(logging.WARNING):
        draw(torch.ones(1), generator=torch.Generator())
    assert not paths
    assert not list(tmp_path.iterdir())
    assert f"{ns}::draw: the arguments of a call were not written" in caplog.text
    assert "a file cannot hold an argument of this type" in caplog.text
    assert "got: Generator" in caplog.text


def test_the_op_has_to_be_there(registry: Registry, ns: str, tmp_path: Path) -> None:
    op = registry.custom_op(f"{ns}::f", lambda x: x.clone(), schema="(Tensor x) -> Tensor")
    with customops.recording.dump(tmp_path, when="all") as paths:
        op(torch.ones(1))
    op.unregister()
    with pytest.raises(RegistrationError, match="there is no such operator"):
        customops.recording.replay(paths[0])


def test_other_files_are_refused(tmp_path: Path) -> None:
    torch.save([1], tmp_path / "list.pt")
    torch.save(Path(), tmp_path / "object.pt")  # which torch would read if code may run
    (tmp_path / "empty.pt").touch()
    (tmp_path / "text.pt").write_text("import torch")
    for name in ("list", "object", "empty", "text"):
        with pytest.raises(ArgumentError, match="was not written by"):
            customops.recording.load(tmp_path / f"{name}.pt")


def test_modes_see_nothing_of_it(op: Any, tmp_path: Path) -> None:
    class Seen(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            names.append(str(func))
            return func(*args, **(kwargs or {}))

    names: list[str] = []
    x = torch.ones(2, 3)
    with Seen(), customops.recording.dump(tmp_path, when="all") as paths:
        op(x)
    assert len(paths) == 1
    assert names == [f"{op._qualname.replace('::', '.')}.default"]


def test_modes_do_not_see_copies_of_what_is_written_to(registry: Registry, ns: str, tmp_path: Path) -> None:
    class Seen(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            names.append(str(func))
            return func(*args, **(kwargs or {}))

    names: list[str] = []

    def fill(x: Mut[Tensor]) -> None:
        x.fill_(1)

    op, x = registry.custom_op(f"{ns}::fill", fill), torch.zeros(2)
    with Seen(), customops.recording.dump(tmp_path, when=lambda call: True) as paths:
        op(x)
    assert names == [f"{ns}.fill.default"]
    assert customops.recording.load(paths[0]).args[0].tolist() == [0, 0]


def test_strides_and_shared_memory_are_replayed(registry: Registry, ns: str, tmp_path: Path) -> None:
    def look(x: Mut[Tensor], y: Mut[Tensor], z: Tensor) -> list[int]:
        x.add_(1)
        shared = y.untyped_storage().data_ptr() == x.untyped_storage().data_ptr()
        return [*x.stride(), *z.stride(), int(shared), int(y[0])]

    op = registry.custom_op(f"{ns}::look", look)
    base = torch.zeros(6)
    with customops.recording.dump(tmp_path, when=lambda call: True) as paths:
        seen = op(base[::2], base[::3], torch.ones(1).expand(3))
    assert seen == [2, 0, 1, 1]
    assert customops.recording.replay(paths[0]) == seen


def test_files_are_never_written_over(op: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    found = []
    for size in (1, 2):
        with customops.recording.dump(tmp_path, when="all") as paths:
            op(torch.ones(size, 3))
        found += paths
    with customops.recording.dump(tmp_path, when="all"):  # which cannot be written
        op(torch.ones(3, 3).as_subclass(type("Sub", (Tensor,), {})))
    assert "were not written" in caplog.text
    assert [customops.recording.load(path).args[0].shape for path in found] == [(1, 3), (2, 3)]
    assert sorted(tmp_path.iterdir()) == sorted(found)


def test_mutated_arguments_by_name(registry: Registry, ns: str, tmp_path: Path) -> None:
    def fill(*, x: Mut[Tensor]) -> None:
        x.fill_(1)

    op = registry.custom_op(f"{ns}::fill", fill)
    with customops.recording.dump(tmp_path, when=lambda call: True) as paths:
        op(x=torch.zeros(1))
    assert customops.recording.load(paths[0]).kwargs["x"].item() == 0


@pytest.mark.parametrize("kind", ["part", "strided", "expanded", "transposed", "conj", "empty", "sparse", "shared"])
def test_only_the_elements_of_a_view_are_written(
    op: Any, registry: Registry, ns: str, tmp_path: Path, kind: str
) -> None:
    buffer = torch.full((1_000_000,), 42.0)
    buffer[:16] = torch.arange(16.0)
    views = {
        "part": lambda: [buffer[3:6]],
        "strided": lambda: [buffer[1:12:4]],
        "expanded": lambda: [buffer[3:4].expand(5), buffer[:0].expand(5, 0)],
        "transposed": lambda: [buffer[2:8].view(2, 3).t()],
        "conj": lambda: [torch.view_as_complex(buffer[2:6].view(2, 2)).conj()],
        "empty": lambda: [buffer[5:5]],
        "sparse": lambda: [torch.eye(2).to_sparse()],
        "shared": lambda: [buffer[:4], buffer[2:9:2]],
    }
    xs = views[kind]()
    op = registry.custom_op(f"{ns}::keep", lambda xs: None, schema="(Tensor[] xs) -> ()")
    with torch.inference_mode(kind == "part"), customops.recording.dump(tmp_path, when="all") as paths:
        op(xs)
    assert paths[0].stat().st_size < 10_000
    (copies,) = customops.recording.load(paths[0]).args
    for x, copy in zip(xs, copies, strict=True):
        assert torch.equal(x.to_dense(), copy.to_dense())
        if kind != "sparse":
            assert (x.shape, x.stride(), x.is_conj()) == (copy.shape, copy.stride(), copy.is_conj())
            assert 42 not in torch.tensor(copy.untyped_storage().tolist(), dtype=torch.uint8).view(torch.float32)
    if kind == "shared":
        copies[0][2] = -1
        assert copies[1][0] == -1


def _with_contents(file: Path, contents: object) -> Path:
    torch.save(contents, file)
    return file


@pytest.fixture
def contents(op: Any, tmp_path: Path) -> dict[str, Any]:
    """What a file of `dump` holds."""
    with customops.recording.dump(tmp_path, when="all") as paths:
        op(torch.ones(2, 3), by=3.0)
    contents: dict[str, Any] = torch.load(paths[0], weights_only=True)
    return contents


def test_damaged_files_are_refused(op: Any, tmp_path: Path) -> None:
    with customops.recording.dump(tmp_path, when="all") as paths:
        op(torch.arange(6.0).reshape(2, 3), by=3.0)
    whole, good, file = paths[0].read_bytes(), customops.recording.load(paths[0]), tmp_path / "damaged.pt"
    for size in range(0, len(whole), 7):
        file.write_bytes(whole[:size])
        with pytest.raises(ArgumentError, match="or it is damaged"):
            customops.recording.load(file)
    refused = 0
    for at in range(0, len(whole), 3):
        flipped = bytearray(whole)
        flipped[at] ^= 1 << at % 8
        file.write_bytes(flipped)
        try:
            found = customops.recording.load(file)
        except ArgumentError:
            refused += 1
        else:  # of a byte that nobody reads
            assert torch.equal(found.args[0], good.args[0])
            assert dataclasses.replace(found, args=()) == dataclasses.replace(good, args=())
    assert refused > 100


def test_an_entry_that_is_marked_as_a_folder(op: Any, tmp_path: Path) -> None:
    with customops.recording.dump(tmp_path, when="all") as paths:
        op(torch.arange(6.0).reshape(2, 3), by=3.0)
    whole = paths[0].read_bytes()
    for entry in re.finditer(rb"PK\x01\x02", whole):  # torch reads nothing of it, and no checksum covers the mark
        marked = bytearray(whole)
        marked[entry.start() + 38] |= 0x10
        (tmp_path / "marked.pt").write_bytes(marked)
        with pytest.raises(ArgumentError, match="or it is damaged"):
            customops.recording.load(tmp_path / "marked.pt")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("format", 2),
        ("op", 5),
        ("op", None),
        ("args", None),
        ("args", "ab"),
        ("args", {"torch": "float32"}),
        ("args", [{"torch": "ones"}]),
        ("args", [{"torch": "load"}]),
        ("args", [{"torch": 3}]),
        ("args", [{"torch": "float32", "device": "cpu"}]),
        ("args", [{"device": "nowhere"}]),
        ("args", [[{}]]),
        ("args", [(1,)]),
        ("args", [{1}]),
        ("kwargs", None),
        ("kwargs", [1]),
        ("kwargs", {1: 2}),
        ("kwargs", {"x": {"torch": "nn"}}),
        ("line", 1),
        ("other", ""),
    ],
)
def test_files_with_other_contents_are_refused(contents: Any, tmp_path: Path, name: str, value: object) -> None:
    assert customops.recording.load(_with_contents(tmp_path / "x.pt", contents)).kwargs == {"by": 3.0}
    with pytest.raises(ArgumentError, match="was not written by") as caught:
        customops.recording.load(_with_contents(tmp_path / "x.pt", contents | {name: value}))
    assert name != "format" or "format 1 was expected" in str(caught.value.got)
    with pytest.raises(ArgumentError, match="was not written by"):
        customops.recording.load(
            _with_contents(tmp_path / "x.pt", {k: v for k, v in contents.items() if k != name} | {"x": ""})
        )


def test_deeply_nested_files_are_refused(contents: Any, tmp_path: Path) -> None:
    good, deep = _with_contents(tmp_path / "good.pt", contents | {"args": []}), 100_000
    with zipfile.ZipFile(good) as old, zipfile.ZipFile(tmp_path / "deep.pt", "w") as new:
        for item in old.infolist():
            data = old.read(item)
            if item.filename.endswith("data.pkl"):
                (at,) = (each.start() for each in re.finditer(rb"args(q.)?\]", data))
                at = data.index(b"]", at)
                data = data[:at] + b"]" * deep + b"a" * (deep - 1) + data[at + 1 :]
            new.writestr(item.filename, data)
    with pytest.raises(ArgumentError, match="RecursionError"):
        customops.recording.load(tmp_path / "deep.pt")


def test_a_missing_device_is_said(contents: Any, tmp_path: Path) -> None:
    def nowhere(storage: Any, location: str) -> Any:
        raise RuntimeError("no such device")

    file = _with_contents(tmp_path / "x.pt", contents)
    with pytest.raises(ArgumentError, match="no such device") as caught:
        customops.recording.load(file, map_location=nowhere)
    assert 'map_location="cpu"' in str(caught.value)
    with pytest.raises(FileNotFoundError):
        customops.recording.load(tmp_path / "none.pt")


def test_torchs_own_ops_run_only_if_asked(contents: Any, tmp_path: Path) -> None:
    made = tmp_path / "made"
    call = {"op": "aten::from_file", "args": [str(made), True, 4], "kwargs": {}}
    file = _with_contents(tmp_path / "x.pt", contents | call)
    saved = customops.recording.load(file)
    for run in (saved.replay, saved.benchmark, lambda: customops.recording.replay(file)):
        with pytest.raises(UnsupportedError, match="torch_ops=True"):
            run()
    assert not made.exists()
    assert customops.recording.replay(file, torch_ops=True).shape == (4,)
    assert made.exists()


def test_files_are_read_where_checksums_are_off(op: Any, tmp_path: Path) -> None:
    with config.patch("save.compute_crc32", False), customops.recording.dump(tmp_path, when="all") as paths:  # type: ignore[attr-defined]
        op(torch.ones(2, 3))
    assert torch.equal(customops.recording.load(paths[0]).args[0], torch.ones(2, 3))
