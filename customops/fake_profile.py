"""Fake impls made from profiles: the metadata of the inputs and outputs of recorded calls.

For an op without a fake impl, `torch.export.draft_export` records profiles. `unsafe_generate_fake_kernels` makes a
temporary fake impl from them. Profiles are saved as JSON, which needs no further package; other YAML, such as torch
writes, is read with PyYAML.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import logging
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, NamedTuple

import torch

from customops import _torch
from customops._op.op import CustomOpDef
from customops._op.registry import default
from customops._schema.model import Schema
from customops.errors import CustomOpsError, brief

if TYPE_CHECKING:
    _TorchsMissingOpProfile = RuntimeError
else:
    # What torch's export catches to go on with the real values it has.
    _TorchsMissingOpProfile = _torch.tensors._fake_tensor.MissingOpProfile

__all__ = [
    "MissingOpProfile",
    "OpProfile",
    "ProfileError",
    "TensorMetadata",
    "generate_yaml_from_profiles",
    "load_op_profiles",
    "read_profiles_from_yaml",
    "save_op_profiles",
    "unsafe_generate_fake_kernels",
]

log = logging.getLogger(__name__)
File = str | os.PathLike[str] | IO[bytes]
_FILES = "a path, or a binary buffer"


class MissingOpProfile(CustomOpsError, _TorchsMissingOpProfile):
    """An op was traced with inputs that match no recorded profile, or several profiles with different outputs."""


class ProfileError(CustomOpsError, RuntimeError, ValueError):
    """Profiles cannot be used, written or read."""


@dataclass(frozen=True)
class TensorMetadata:
    """What a profile records of a tensor: rank, dtype, device and layout, but not its sizes."""

    rank: int
    dtype: torch.dtype
    device: torch.device
    layout: torch.layout

    @staticmethod
    def maybe_from_tensor(value: Any) -> TensorMetadata | None:
        """The metadata of a tensor; None for anything else."""
        if not isinstance(value, torch.Tensor):
            return None
        return TensorMetadata(value.dim(), value.dtype, value.device, value.layout)


@dataclass(frozen=True)
class OpProfile:
    """One recorded call: an entry for each argument (None if it is not a tensor), and one for each output."""

    args_profile: tuple[TensorMetadata | None, ...]
    out_profile: TensorMetadata | tuple[TensorMetadata | None, ...]


#: Profiles of ops by name, ``ns.name.overload``.
Profiles = Mapping[str, Iterable[OpProfile]]
_Inputs = tuple[TensorMetadata | None, ...]


def _inputs(args: Iterable[TensorMetadata | None]) -> _Inputs:
    """Arguments without the Nones at their end: a record may have been made with or without the defaults."""
    kept = list(args)
    while kept and kept[-1] is None:
        kept.pop()
    return tuple(kept)


def _own(metadata: Any) -> Any:
    """As a record of ours: torch's export makes records of torch's classes."""
    if metadata is None or isinstance(metadata, TensorMetadata):
        return metadata
    if isinstance(metadata, (tuple, list)):
        return tuple(_own(item) for item in metadata)
    return TensorMetadata(metadata.rank, metadata.dtype, metadata.device, metadata.layout)


def _fake_of(op: str, schema: Schema, profiles: Iterable[OpProfile]) -> Callable[..., Any]:
    """A fake impl that looks its inputs up among the recorded ones."""
    recorded: dict[_Inputs, set[Any]] = {}
    fix = f'register a fake impl: customops.register_fake("{op}", fn)'
    for profile in profiles:
        output = _own(profile.out_profile)
        # A fake makes tensors only; whether they are as many as the op's is checked at each call, as for any.
        if isinstance(output, tuple) and None in output:
            problem = "a profile has an output that is no tensor, and its value is not recorded"
            raise ProfileError(problem, op=op, got=str(schema), fix=fix)
        recorded.setdefault(_inputs(_own(profile.args_profile)), set()).add(output)

    def fake(*args: Any, **kwargs: Any) -> Any:
        found = _inputs(TensorMetadata.maybe_from_tensor(value) for value in (*args, *kwargs.values()))
        outputs = recorded.get(found, set())
        if len(outputs) != 1:
            expected = " or ".join(map(_show, recorded)) or "nothing: there is no profile"
            problem = (
                "its profiles contradict each other for these inputs" if outputs else "no profile has these inputs"
            )
            raise MissingOpProfile(problem, op=op, expected=expected, got=_show(found), fix=fix)
        (output,) = outputs
        if isinstance(output, TensorMetadata):
            return _make_tensor(output)
        if not schema.returns:
            return None
        made = [_make_tensor(item) for item in output]
        one = schema.returns[0].type if len(schema.returns) == 1 else ""
        return made[0] if one == "Tensor" and len(made) == 1 else made if one.endswith("]") else tuple(made)

    return fake


def _make_tensor(metadata: TensorMetadata) -> torch.Tensor:
    """A contiguous tensor of which every size is unknown."""
    ctx = torch.library.get_ctx()
    sizes = [ctx.new_dynamic_size() for _ in range(metadata.rank)]
    return torch.empty(sizes, dtype=metadata.dtype, device=metadata.device, layout=metadata.layout)


def _show(inputs: _Inputs) -> str:
    texts = (f"{m.dtype} of rank {m.rank} on {m.device}" if m else "no tensor" for m in inputs)
    return f"({', '.join(texts)})"


@contextmanager
def unsafe_generate_fake_kernels(op_profiles: Profiles) -> Iterator[list[_torch.library.Library]]:
    """Context manager that replaces the fake impls of ops by ones made from profiles.

    A fake impl finds the profile of a call by the rank, dtype, device and layout of each tensor argument. The sizes of
    its outputs are unknown to the tracer. This is unsafe: if the rank or dtype of an output depends on other arguments,
    or on data, the recorded one is used; and outputs are assumed to be contiguous.

    Args:
        op_profiles: the profiles of each op, by its name in graphs: ``ns.name.default``.

    Yields:
        A list of the libraries that hold the fake impls.

    Raises:
        RegistrationError: there is no such op.
        MissingOpProfile: (inside the context, when an op is traced) no profile matches the inputs.

    Example:
        >>> exported = torch.export.draft_export(model, inputs)
        >>> with unsafe_generate_fake_kernels(exported._report.op_profiles):
        ...     exported.run_decompositions()
    """
    with ExitStack() as stack:
        libraries = []
        for name, profiles in op_profiles.items():
            if "::" not in name and "." in name:  # ``ns.name.default`` is ``ns::name``
                name = name.replace(".", "::", 1).removesuffix(".default")
            op: CustomOpDef[Any, Any] = default.adopt(name)
            fake = _fake_of(op._qualname, op.schema, profiles)
            log.warning("%s: a fake impl made from profiles takes the place of any other", op._qualname)
            library = _torch.library.Library(op._definition.name.namespace, "FRAGMENT")
            stack.callback(_torch.library.destroy_library, library)
            op._register(library, op._rules.fake.register, fake)  # profiles are of what the schema says
            libraries.append(library)
        yield libraries


class _Numbers(NamedTuple):
    """The numbers by which exported programs name dtypes or layouts; they are part of a file format, so they stay."""

    what: str
    numbers: dict[str, int]

    def write(self, value: object) -> int:
        name = str(value).removeprefix("torch.")
        if name not in self.numbers:
            raise ProfileError(f"a profile with this {self.what} cannot be written", got=str(value))
        return self.numbers[name]

    def read(self, number: object) -> Any:
        name = next((name for name, known in self.numbers.items() if known == number), None)
        if name is None or type(number) is not int:
            raise ProfileError(f"the profiles have an unknown {self.what}", got=brief(number))
        return getattr(torch, name)


_DTYPES = "uint8 int8 int16 int32 int64 float16 float32 float64 complex32 complex64 complex128 bool bfloat16"
_NEWER_DTYPES = "uint16 float8_e4m3fn float8_e5m2 float8_e4m3fnuz float8_e5m2fnuz float8_e8m0fnu uint32 uint64"
_DTYPE_NUMBERS = _Numbers(
    "dtype",
    {name: number for number, name in enumerate(_DTYPES.split(), 1)}
    | {name: number for number, name in enumerate(_NEWER_DTYPES.split(), 28)},
)
_LAYOUTS = "sparse_coo sparse_csr sparse_csc sparse_bsr sparse_bsc _mkldnn strided"
_LAYOUT_NUMBERS = _Numbers("layout", {name: number for number, name in enumerate(_LAYOUTS.split(), 1)})


def get_torch_version() -> str:
    """``major.minor`` of the torch that runs: profiles are only good for the torch that they were made with."""
    return ".".join(torch.__version__.split(".")[:2])


def _written(item: Any) -> Any:
    """The metadata of a tensor, of ours or of torch, or of several, as JSON has it; None stands for no tensor."""
    if item is None:
        return None
    if isinstance(item, (tuple, list)):
        return [*map(_written, item)]
    dtype, layout = _DTYPE_NUMBERS.write(item.dtype), _LAYOUT_NUMBERS.write(item.layout)
    return {"rank": item.rank, "dtype": dtype, "device": str(item.device), "layout": layout}


def generate_yaml_from_profiles(op_profiles: Profiles) -> str:
    """Convert profiles to text: YAML that is also JSON.

    Raises:
        ProfileError: the format does not support a dtype or layout.
    """
    operators = {
        name: sorted(
            ({"args_profile": _written(p.args_profile), "out_profile": _written(p.out_profile)} for p in profiles),
            key=json.dumps,
        )
        for name, profiles in op_profiles.items()
    }
    return json.dumps({"torch_version": get_torch_version(), "operators": operators}, indent=1) + "\n"


def _read_tensor(data: dict[str, Any]) -> TensorMetadata:
    rank, dtype, layout = data["rank"], _DTYPE_NUMBERS.read(data["dtype"]), _LAYOUT_NUMBERS.read(data["layout"])
    if type(rank) is not int or rank < 0:
        raise ProfileError("the profiles have an impossible rank", got=brief(rank))
    try:
        return TensorMetadata(rank, dtype, torch.device(str(data["device"])), layout)
    except RuntimeError as error:
        raise ProfileError("the profiles have an unknown device", got=brief(data["device"])) from error


def _read_tensors(items: Iterable[Any]) -> tuple[TensorMetadata | None, ...]:
    return tuple(None if item is None else _read_tensor(item) for item in items)


def _list(data: Any) -> list[Any]:
    if not isinstance(data, list):
        raise TypeError(f"not a list: {brief(data)}")
    return data


def read_profiles_from_yaml(yaml_str: str) -> dict[str, set[OpProfile]]:
    """Read profiles from text written by `generate_yaml_from_profiles`, or by torch's function of that name.

    Torch's text omits arguments that are not tensors. If such an argument precedes a tensor, the profile matches no
    call.

    Raises:
        ProfileError: the text was written with another version of torch, contains no profiles, or is damaged.
        CustomOpsError: the text is not JSON, and PyYAML is not installed.
    """

    def read(profile: dict[str, Any]) -> OpProfile:
        args, out = _list(profile["args_profile"]), profile["out_profile"]
        return OpProfile(_read_tensors(args), _read_tensors(out) if isinstance(out, list) else _read_tensor(out))

    data = _parse(yaml_str)
    try:
        version, operators = str(data["torch_version"]), data["operators"]
        if version == get_torch_version():
            if not all(isinstance(name, str) for name in operators):
                raise TypeError("the name of an op is no string")
            return {name: set(map(read, _list(items))) for name, items in operators.items()}
    except ProfileError:
        raise
    except Exception as error:
        raise ProfileError("the text holds no profiles", got=brief(error, 200)) from error
    problem = "Unable to load outdated profile: it was written under another version of torch"
    raise ProfileError(problem, expected=get_torch_version(), got=version, fix="record the profiles again")


def _parse(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        pass
    if importlib.util.find_spec("yaml") is None:
        raise CustomOpsError("PyYAML is needed to read profiles that are not JSON", fix="pip install pyyaml")
    yaml = importlib.import_module("yaml")
    try:
        return yaml.safe_load(text)
    except Exception as error:  # of many kinds: PyYAML lets pass what Python raises for a number, or a date
        raise ProfileError("the text is not YAML", got=str(error) or brief(error)) from error


def save_op_profiles(op_profiles: Profiles, f: File) -> None:
    """Write profiles to a path or a binary buffer. `load_op_profiles` reads them.

    Raises:
        ProfileError: `f` is neither; or see `generate_yaml_from_profiles`.
    """
    data = generate_yaml_from_profiles(op_profiles).encode()
    if isinstance(f, (str, os.PathLike)):
        Path(f).write_bytes(data)
    elif hasattr(f, "write"):
        f.write(data)
    else:
        raise ProfileError("there is no file", expected=_FILES, got=brief(f))


def load_op_profiles(f: File) -> dict[str, set[OpProfile]]:
    """Read profiles from a path or a binary buffer.

    Raises:
        ProfileError: `f` is neither; or see `read_profiles_from_yaml`.
    """
    if isinstance(f, (str, os.PathLike)):
        data = Path(f).read_bytes()
    elif not hasattr(f, "read") or not isinstance(data := f.read(), bytes):
        raise ProfileError("there is no file", expected=_FILES, got=brief(f))
    try:
        text = data.decode()
    except UnicodeDecodeError as error:
        raise ProfileError("the text is not UTF-8", got=str(error)) from error
    return read_profiles_from_yaml(text)
