"""Import the package from one folder only, where `make dist` installs the wheel, and use it."""

import sys
from importlib.metadata import distribution
from pathlib import Path

folder = Path(sys.argv[1]).resolve()
sys.path.insert(0, str(folder))

import torch  # noqa: E402
from torch import Tensor  # noqa: E402

import customops  # noqa: E402

package = Path(customops.__file__).parent
assert package == folder / "customops", package
assert (package / "py.typed").is_file(), "type checkers find no types"
assert distribution("customops").version == customops.__version__
installed = {path.name for path in folder.iterdir() if path.suffix != ".dist-info"}
assert installed <= {"__pycache__", "bin", "customops", "customops_pytest"}, installed

for name in customops.__all__:
    if name != "from_tvm_ffi":  # it loads another package
        getattr(customops, name)


@customops.custom_op("installed::double", mutates_args=())
def double(x: Tensor) -> Tensor:
    return x * 2


double.register_fake(torch.empty_like)
double.register_autograd(lambda ctx, grad: grad * 2)
customops.opcheck(double, (torch.ones(2, requires_grad=True),))
print(f"customops {customops.__version__}, installed from a wheel: py.typed, metadata and one op are right")
