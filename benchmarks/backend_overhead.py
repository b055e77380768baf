"""The time of a call on a device written in Python, beside the CPU and the C++ device of the examples.

    cpu       torch's own kernel
    library   the same function as a Python kernel of torch.library, on the CPU: the least that a Python kernel costs
    npy       the device of customops.backend
    cpp       the device of examples/cpp_device, if it can be built here

Tensors have four elements, so that the time is that of the way to the kernel and back. Each device has its own process,
so devices cannot take turns; the script reports the best of many rounds. The ratio is npy to library. It should be at
most 3 for a kernel of the device, and 10 for an op that falls back to the CPU.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
import timeit
from pathlib import Path
from typing import Any

import torch
from bench import take_turns
from torch import Tensor

from customops.backend import register_backend
from customops.testing import IsolationError, run_isolated

CPP = Path(__file__).resolve().parents[1] / "examples" / "cpp_device"

#: Name -> the statement, the kernel that runs on npy, and the highest ratio that the script accepts.
CASES: dict[str, tuple[str, str, float | None]] = {
    "kernel": ("op(x, y)", "a kernel of the device", 3),
    "kernel, NumPy": ("op_numpy(x, y)", "the same, by numpy(x)", 3),
    "kernel, out=": ("op_out(x, y, out)", "the same, into a tensor", 3),
    "add": ("x + y", "the fallback", 10),
    "add, out=": ("torch.add(x, y, out=out)", "the fallback", 10),
    "add_": ("x.add_(y)", "the fallback", 10),
    "relu": ("torch.relu(x)", "the fallback", 10),
    "abs": ("x.abs()", "the fallback", 10),
    "view": ("x.view(2, 2)", "the CPU's kernel", None),
    "empty": ("torch.empty(4, device=device)", "", None),
    "to the CPU": ("x.cpu()", "", None),
    "linear": ("linear(x).sum().backward()", "the fallback, forward and backward", None),
}


def measure(device: str, rounds: int) -> dict[str, float]:
    """Return the best microseconds of each case."""
    torch.set_num_threads(1)
    names = _names(device)
    timers = {
        case: timeit.Timer(statement, globals=names)
        for case, (statement, *_) in CASES.items()
        if _has(names, statement)
    }
    meters = {case: lambda timer=timer: 1e6 * timer.timeit(300) / 300 for case, timer in timers.items()}
    return {case: min(times) for case, times in take_turns(meters, rounds).items()}


def check(device: str) -> dict[str, Any]:
    """Return the results of the cases as numbers."""
    names = _names(device)
    results = {}
    for case, (statement, *_) in CASES.items():
        if case not in ("kernel, out=", "empty", "linear", "add_") and _has(names, statement):
            results[case] = eval(statement, names).flatten().tolist()
    return results


def _has(names: dict[str, Any], statement: str) -> bool:
    return statement.partition("(")[0] in names or not statement.startswith("op")


def _names(device: str) -> dict[str, Any]:
    where = {"library": "cpu", "cpp": "toy"}.get(device, device)
    names: dict[str, Any] = {"torch": torch, "device": where}
    if device == "npy":
        names |= _kernels(register_backend("npy"))
    elif device == "library":
        names |= _kernels(None)
    elif device == "cpp":
        sys.path.insert(0, str(CPP))
        importlib.import_module("toy").register()
        names["op"] = torch.add  # the device has a kernel for it
    else:
        names["op"] = torch.add
        names["op_out"] = lambda x, y, out: torch.add(x, y, out=out)
    linear = torch.nn.Linear(4, 4)
    torch.nn.init.ones_(linear.weight)
    x, y = torch.tensor([[-1.0, 2.0, 3.0, 4.0], [5.0, 6.0, 7.0, 8.0]]).to(where)
    return names | {"x": x, "y": y, "out": torch.empty(4).to(where), "linear": linear.to(where)}


def _kernels(backend: Any) -> dict[str, Any]:
    """Define an addition as three ops, with kernels for the backend or for the CPU, and return the ops."""

    def itself(x: Any) -> Any:
        return x

    host, wrap = (backend.host, backend.wrap) if backend else (itself, itself)
    array, from_array = (backend.numpy, backend.wrap) if backend else (Tensor.numpy, torch.from_numpy)

    def add_out(x: Tensor, y: Tensor, out: Tensor) -> None:
        torch.add(host(x), host(y), out=host(out))

    kernels = {
        "op": ("(Tensor x, Tensor y) -> Tensor", lambda x, y: wrap(host(x) + host(y))),
        "op_numpy": ("(Tensor x, Tensor y) -> Tensor", lambda x, y: from_array(array(x) + array(y))),
        "op_out": ("(Tensor x, Tensor y, Tensor(a!) out) -> ()", add_out),
    }
    library = torch.library.Library("bench_backend", "DEF")
    _libraries.append(library)
    for name, (schema, kernel) in kernels.items():
        library.define(name + schema)
        if backend:
            backend.kernel(f"bench_backend::{name}")(kernel)
        else:
            library.impl(name, kernel, "CPU")
    return {name: getattr(torch.ops.bench_backend, name) for name in kernels}


_libraries: list[Any] = []


def devices() -> list[str]:
    return ["cpu", "library", "npy", *(["cpp"] if CPP.is_dir() else [])]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="compare the results of the devices; time nothing")
    parser.add_argument("--quick", action="store_true", help="a tenth of the rounds")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures to FILE")
    options = parser.parse_args()
    function, arguments = (check, ()) if options.check else (measure, (6 if options.quick else 60,))
    found: dict[str, dict[str, Any]] = {}
    for device in devices():
        try:
            found[device] = run_isolated(function, device, *arguments, timeout=600).value
        except (IsolationError, RuntimeError) as error:
            if device != "cpp":
                raise
            print(f"no cpp: {str(error).splitlines()[0]}")
    if options.check:
        return _agree(found)
    if options.json:
        options.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    return _print(found)


def _agree(found: dict[str, dict[str, Any]]) -> int:
    for case in CASES:
        results = [each[case] for each in found.values() if case in each]
        assert all(result == results[0] for result in results), case
    print(f"{len(CASES)} cases: the devices agree")
    return 0


def _print(found: dict[str, dict[str, float]]) -> int:
    # The addition by a Python kernel on the CPU. Cases that the CPU has no Python kernel for are compared with it.
    floor = found["library"]["kernel"]
    print(f"{'us':14}" + "".join(f"{device:>9}" for device in found) + f"{'ratio':>8}")
    above = 0
    for case, (_, how, highest) in CASES.items():
        cells = "".join(f"{found[d][case]:9.2f}" if case in found[d] else f"{'-':>9}" for d in found)
        own = found["library"].get(case, floor) if case.startswith("kernel") else floor
        ratio = found["npy"][case] / own
        mark = "" if highest is None or ratio <= highest else f"   above {highest:g}"
        above += bool(mark)
        print(f"{case:14}{cells}{ratio:8.1f}  {how}{mark}")
    return 1 if above else 0


if __name__ == "__main__":
    sys.exit(main())
