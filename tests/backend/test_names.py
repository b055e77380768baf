"""Names and options of a device: everything that can be wrong is found before anything is changed."""

from __future__ import annotations

import ast
import contextlib
import importlib.util
import operator
import re
import warnings
from multiprocessing import reduction
from pathlib import Path

import pytest
import torch
from helpers.isolated import isolated
from torch._C import _get_privateuse1_backend_name as current_name
from torch._C._autograd import DeviceType
from torch._C._profiler import ProfilerActivity
from torch.utils import backend_registration

from customops.backend import (
    BackendError,
    _compat,
    generate_methods_for_privateuse1_backend,
    get_backend,
    get_custom_mod_func,
    memory,
    register_backend,
    registration,
    rename_privateuse1_backend,
)
from customops.backend.registration import FALLBACKS

pytestmark = pytest.mark.process


fresh = isolated()


def raises(error, match, function, *args, **kwargs):
    """And nothing has happened."""
    with pytest.raises(error, match=match):
        function(*args, **kwargs)
    assert current_name() == "privateuseone"
    assert get_backend() is None
    assert not hasattr(torch.Tensor, "is_npy")


@pytest.mark.parity(100)
@fresh
def test_names_that_torch_could_not_parse() -> None:
    for name in ("npy2", "NPY", "my-dev", "", "npy:0", "_npy", 3, None):
        for function in (rename_privateuse1_backend, register_backend):
            raises(ValueError, "torch cannot read this as a device", function, name)


class Hooks(torch._C._acc.PrivateUse1Hooks):
    def is_available(self):
        return True

    is_built = has_primary_context = is_available


@fresh
def test_hooks_of_others() -> None:
    hooks = Hooks()
    assert torch._C._acc.register_python_privateuseone_hook(hooks)
    for _ in range(2):  # torch would end the process with the first op that records a gradient
        raises(BackendError, "somebody has registered hooks for PrivateUse1", register_backend, "npy")


@fresh
def test_a_fallback_of_others() -> None:
    for key in ("PrivateUse1", "AutocastPrivateUse1"):
        library = torch.library.Library("_", "IMPL")
        library.fallback(torch.library.fallthrough_kernel, key)
        raises(BackendError, f"somebody has registered a fallback for all ops at {key}", register_backend, "npy")
        library._destroy()
    register_backend("npy")
    assert (torch.ones(2, device="npy", requires_grad=True) * 2).tolist() == [2, 2]


@fresh
def test_a_module_of_others() -> None:
    rename_privateuse1_backend("npy")
    torch._register_device_module("npy", object())
    with pytest.raises(BackendError, match=r"torch\.npy is there already"):
        register_backend("npy")
    assert not hasattr(torch.Tensor, "is_npy")


@fresh
def test_a_default_device_is_no_obstacle() -> None:
    torch.set_default_device("meta")
    register_backend("npy")
    assert torch.ones(2, device="npy").tolist() == [1, 1]


@fresh
def test_names_of_torch() -> None:
    for name in ("cpu", "cuda", "xpu", "meta", "mps", "hip", "privateuseone"):
        raises(ValueError, "this device type is torch's own", register_backend, name)
    for name in ("abs", "float", "nn", "data", "bool", "sparse"):
        raises(ValueError, "the name is taken", rename_privateuse1_backend, name)
        raises(ValueError, "the name is taken", register_backend, name)


@fresh
def test_options() -> None:
    for count in (0, -1, 65, 1.0, True, "2"):
        raises(ValueError, "device_count is out of range", register_backend, "npy", device_count=count)
    raises(ValueError, "unknown fallback policy", register_backend, "npy", fallback="gpu")
    raises(ValueError, "unknown methods", register_backend, "npy", methods=("tensor", "tensors"))
    raises(BackendError, r"the methods of module call Tensor.npy\(\)", register_backend, "npy", methods=("module",))
    raises(ValueError, "amp_dtypes takes torch dtypes only", register_backend, "npy", amp_dtypes=["half"])
    raises(ValueError, "allocate is not callable", register_backend, "npy", allocate=3)
    raises(ValueError, "methods takes several", register_backend, "npy", methods=None)
    raises(ValueError, "amp_dtypes takes several", register_backend, "npy", amp_dtypes=16)


@fresh
def test_allocate_needs_numpy() -> None:
    find_spec = importlib.util.find_spec
    importlib.util.find_spec = lambda name: None if name == "numpy" else find_spec(name)
    raises(
        BackendError, "NumPy is not installed\n  fix:      pip install numpy", register_backend, "npy", allocate=print
    )
    importlib.util.find_spec = find_spec


@fresh
def test_methods_need_a_name_first() -> None:
    raises(BackendError, "the device has no name yet", generate_methods_for_privateuse1_backend)
    raises(BackendError, "Try to call torch.privateuseone.f", get_custom_mod_func, "f")
    raises(ValueError, "a string", get_custom_mod_func, 3)


@fresh
def test_another_accelerator_is_refused_unless_forced() -> None:
    torch.accelerator.current_accelerator = lambda: torch.device("cuda")
    torch.accelerator.is_available = lambda: True
    raises(BackendError, "CUDA_VISIBLE_DEVICES", register_backend, "npy")
    assert register_backend("npy", force=True).name == "npy"


@fresh
def test_a_torch_without_the_names_is_refused() -> None:

    _compat.NEEDED.append("_C._nothing")
    raises(BackendError, "this torch cannot have a device from Python", register_backend, "npy")


@fresh
def test_another_layout_of_capsules_is_refused() -> None:

    _compat._HOST = 77
    raises(BackendError, "unknown layout", register_backend, "npy")


# The functions in torch's shape -----------------------------------------------------------------------------------


@pytest.mark.parity(100)
@fresh
def test_rename_once() -> None:
    rename_privateuse1_backend("maia")  # a device type that torch reserves and has no code for
    rename_privateuse1_backend("maia")
    with pytest.raises(RuntimeError, match="has already been set"):
        rename_privateuse1_backend("npy")
    with pytest.raises(RuntimeError, match="has already been set"):
        register_backend("npy")
    assert current_name() == "maia"
    assert not hasattr(torch, "maia")
    with pytest.raises(AssertionError, match="Tried to use AMP with the"):
        torch.autocast("maia")
    with pytest.raises(RuntimeError, match=r"Try to call torch\.maia"):
        get_custom_mod_func("is_available")
    with pytest.raises(RuntimeError, match="already been registered with is_maia"):
        register_backend("maia")
    register_backend("maia", methods=())  # the rest of it, under the same name
    assert torch.maia.device_count() == 1
    assert torch.autocast("maia").device == "maia"
    assert torch._utils._get_device_index("maia:1") == 1
    assert get_custom_mod_func("is_available")() is True


@fresh
def test_a_prefix_of_a_device_type_is_a_name() -> None:
    rename_privateuse1_backend("cudax")
    assert torch.device("cudax:1").index == 1


@pytest.mark.parity(101)
@fresh
def test_methods_once() -> None:
    rename_privateuse1_backend("npy")
    with pytest.raises(BackendError, match="which is not there"):
        generate_methods_for_privateuse1_backend(for_tensor=False)
    with pytest.raises(ValueError, match="unsupported_dtype takes"):
        generate_methods_for_privateuse1_backend(unsupported_dtype=["float"])
    assert not hasattr(torch.Tensor, "npy")
    generate_methods_for_privateuse1_backend(for_storage=True, unsupported_dtype=[torch.float64])
    for cls in (torch.Tensor, torch.nn.utils.rnn.PackedSequence, torch.UntypedStorage, torch.TypedStorage):
        assert hasattr(cls, "npy")
        assert hasattr(cls, "is_npy")
    assert hasattr(torch.nn.Module, "npy")
    with pytest.raises(RuntimeError, match="The custom device module of"):
        generate_methods_for_privateuse1_backend(for_module=False)
    assert not torch.ones(1).is_npy


@pytest.mark.parity(101)
@fresh
def test_unsupported_dtype() -> None:

    warnings.simplefilter("ignore")  # TypedStorage is deprecated
    rename_privateuse1_backend("npy")
    generate_methods_for_privateuse1_backend(for_storage=True, unsupported_dtype=[torch.float64])
    with pytest.raises(RuntimeError, match="float64 dtype is not supported by this backend"):
        torch.ones(1, dtype=torch.float64).storage().npy()


@pytest.mark.parity(101)
@fresh
def test_names_of_the_rest_of_torch() -> None:
    register_backend("npy")

    if hasattr(backend_registration, "_rename_device_type"):  # from torch 2.13 on
        assert DeviceType.NPY == DeviceType.PrivateUse1
        assert repr(DeviceType.NPY) == "<DeviceType.NPY: 20>"
        assert ProfilerActivity.NPY == ProfilerActivity.PrivateUse1
    with pytest.raises(RuntimeError, match="The runtime module of"):
        torch._register_device_module("npy", torch.npy)
    with pytest.raises(RuntimeError, match=r"Try to call torch\.npy\.nothing"):
        get_custom_mod_func("nothing")


# register_backend -------------------------------------------------------------------------------------------------


@fresh
def test_registered_once() -> None:
    assert get_backend() is None
    backend = register_backend("npy", device_count=2)
    assert register_backend("npy", device_count=2) is backend is get_backend()
    for name, count in (("npy", 1), ("other", 2)):
        with pytest.raises(BackendError, match="this process has a device already") as info:
            register_backend(name, device_count=count)
        assert "run_isolated" in info.value.fix
    assert (backend.name, backend.device_count, backend.module) == ("npy", 2, torch.npy)
    assert repr(backend) == "<Backend 'npy', 2 devices, fallback 'cpu'>"


@fresh
def test_methods_by_choice() -> None:
    register_backend("npy", methods="tensor")
    assert hasattr(torch.Tensor, "npy")
    assert not hasattr(torch.nn.Module, "npy")
    assert not hasattr(torch.UntypedStorage, "npy")


@fresh
def test_no_methods() -> None:
    register_backend("npy", methods=())
    assert not hasattr(torch.Tensor, "npy")
    assert torch.ones(2).to("npy").sum().item() == 2


@fresh
def test_torch_has_set_it_up_already() -> None:
    torch.utils.rename_privateuse1_backend("other")
    with pytest.raises(BackendError, match="already been set to 'other'"):
        register_backend("npy")


# All or nothing ---------------------------------------------------------------------------------------------------


class Missing:
    """In the place of an attribute of a class, which may be inherited from C: it is not there."""

    def __get__(self, *_):
        raise AttributeError


@contextlib.contextmanager
def without(path: str):
    """torch, without one name."""
    place, _, attribute = path.rpartition(".")
    owner = operator.attrgetter(place)(torch) if place else torch
    own = vars(owner).get(attribute)
    if isinstance(owner, type):
        setattr(owner, attribute, Missing())
    else:
        delattr(owner, attribute)
    try:
        yield
    finally:
        if isinstance(owner, type) and own is None:
            delattr(owner, attribute)
        else:
            setattr(owner, attribute, own)


def state_of_torch() -> list[object]:
    """All that a registration changes."""
    places = ["UntypedStorage", "Tensor", "_C", "autograd", "autograd.graph", "library.Library", "nn.Module"]
    attributes = [dict(vars(operator.attrgetter(place)(torch))) for place in places]
    keys = ("PrivateUse1", "AutocastPrivateUse1", "AutogradPrivateUse1", "CPU", "Conjugate", "Negative")
    names = torch._C._dispatch_get_all_op_names()
    kernels = [
        (name, key) for name in names for key in keys if torch._C._dispatch_has_kernel_for_dispatch_key(name, key)
    ]
    fallbacks = [torch._C._dispatch_has_backend_fallback(torch._C._parse_dispatch_key(key)) for key in FALLBACKS]
    return [attributes, kernels, fallbacks, torch.UntypedStorage in reduction.ForkingPickler._extra_reducers]


@pytest.mark.parity(101)
@fresh
def test_every_name_is_looked_up_before_anything_is_changed() -> None:
    """Each name that is missing is one error, which names it."""
    before = state_of_torch()
    for path in (*_compat.NEEDED, *registration.REPLACED_PATHS):
        with without(path):
            raises(
                BackendError,
                rf"this torch cannot have a device from Python(.|\n)*{re.escape(path)}",
                register_backend,
                "npy",
            )
    find_op = _compat.find_op
    for op in memory.NEEDED_OPS:
        _compat.find_op = lambda name, gone=f"aten::{op}": None if name == gone else find_op(name)
        raises(BackendError, rf"cannot have a device from Python(.|\n)*aten::{re.escape(op)}", register_backend, "npy")
    _compat.find_op = find_op
    assert state_of_torch() == before
    register_backend("npy")
    assert (torch.ones(2, device="npy") * 2).tolist() == [2, 2]


@fresh
def test_what_was_done_before_an_error_is_undone() -> None:
    """Something fails that nobody foresaw, late: at the hooks."""

    def fail() -> None:
        raise ValueError("unforeseen")

    before, install_hooks = state_of_torch(), _compat.install_hooks
    _compat.install_hooks = fail
    raises(ValueError, "unforeseen", register_backend, "npy")
    assert state_of_torch() == before
    assert torch.UntypedStorage(3).resize_(4).nbytes() == 4
    w = torch.ones(2, requires_grad=True)
    (w * 2).sum().backward()
    assert reduction.ForkingPickler.dumps(w.detach()) is not None
    _compat.install_hooks = install_hooks
    register_backend("npy")
    assert (torch.ones(2, device="npy", requires_grad=True) * 2).tolist() == [2, 2]


def test_private_names_are_all_among_those() -> None:
    """None is used in `_compat` without being looked up first."""
    tree = ast.parse(Path(_compat.__file__).read_text())
    used = {ast.unparse(node) for node in ast.walk(tree) if isinstance(node, ast.Attribute) and node.attr[0] == "_"}
    assert {name for name in used if name.startswith(("torch.", "_C."))} <= {"torch.__version__"}
