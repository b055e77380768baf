"""The time of imports and of a module with 500 ops, each in a new process.

import    `import torch`, and `import customops` after it; wall time
500 ops   a module whose ops have two tensors, a number with a default, and a fake impl, by the way that it defines
          them; `functions` are the functions without ops
memory    the Python objects of an op by `tracemalloc`, without the memory of the dispatcher
"""

from __future__ import annotations

from functools import cache, partial
from typing import Any

import torch
from cases import Case, Cold, Contenders, Fn
from cases_calls import LIBRARIES
from torch import Tensor

import customops

# Torch leaves so many objects that the next large import triggers a garbage collection. It runs between the two.
IMPORT = """
import gc, sys, time
for name in ("torch", "customops"):
    gc.collect()
    start = time.perf_counter()
    __import__(name)
    if name == sys.argv[1]:
        print(1e3 * (time.perf_counter() - start))
"""

FUNCTION = """
def op{i}(x: Tensor, y: Tensor, by: float = 2.0) -> Tensor:
    return x + y
"""
FAKE = "op{i}.register_fake(lambda x, y, by: torch.empty_like(x))\n"
#: Contender -> the code of a module that defines one op.
DEFINITIONS = {
    "customops": '@customops.custom_op("bench_import::op{i}", mutates_args=())' + FUNCTION + FAKE,
    "functions": FUNCTION + "fake{i} = lambda x, y, by: torch.empty_like(x)\n",
    "custom_op": '@torch.library.custom_op("bench_import_torch::op{i}", mutates_args=())' + FUNCTION + FAKE,
    "Library": """
def op{i}(x, y, by=2.0):
    return x + y
libraries.append(torch.library.Library("bench_import_library", "FRAGMENT"))
libraries[-1].define("op{i}(Tensor x, Tensor y, float by=2.0) -> Tensor")
libraries[-1].impl("op{i}", op{i}, "CompositeExplicitAutograd")
torch.library.register_fake("bench_import_library::op{i}", lambda x, y, by: torch.empty_like(x), lib=libraries[-1])
""",
}
OPS = 500
DEFINE = """
import gc, sys, time, tracemalloc
import torch, customops
from torch import Tensor
libraries = []
code = compile(sys.stdin.read(), "ops", "exec")
measured, count = sys.argv[1], int(sys.argv[2])
if measured == "time":
    start = time.process_time()
    exec(code)
    print(1e3 * (time.process_time() - start))
else:
    tracemalloc.start()
    exec(code)
    gc.collect()
    print(tracemalloc.get_traced_memory()[0] / count / 1024)
"""


@cache
def define_one(contender: str) -> Fn:
    """Define an op in this process as the module of a contender does."""
    variables: dict[str, Any] = {"torch": torch, "customops": customops, "Tensor": Tensor, "libraries": LIBRARIES}
    exec(DEFINITIONS[contender].format(i=0), variables)
    return torch.ops.bench_import_library.op0 if contender == "Library" else variables["op0"]


def call_one(contender: str) -> Tensor:
    return define_one(contender)(torch.ones(4), torch.arange(4.0))


def modules(measured: str) -> Contenders:
    return {
        contender: Cold(
            DEFINE,
            (measured, str(OPS)),
            stdin="".join(code.format(i=i) for i in range(OPS)),
            work=partial(call_one, contender),
        )
        for contender, code in DEFINITIONS.items()
    }


def imports() -> Contenders:
    return {name: Cold(IMPORT, (name,)) for name in ("customops", "torch")}


def cases() -> list[Case]:
    return [
        Case("import", "import", imports, rounds=9, unit="ms", repeats=1),
        Case(f"{OPS} ops", "import", lambda: modules("time"), rounds=9, unit="ms"),
        Case(f"{OPS} ops, memory of each", "import", lambda: modules("memory"), rounds=1, unit="KiB"),
    ]
