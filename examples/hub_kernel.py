"""A kernel of the Hugging Face hub that is already on disk, as a further kernel of an op of yours.

What `huggingface_hub` downloaded lies in its cache: ``models--ORG--NAME`` (or ``kernels--ORG--NAME``), in it
``refs/main`` with a commit, and in ``snapshots/COMMIT/build`` a folder for each build: ``torch213-cxx11-cu130-x86_64-
linux`` of compiled ones, ``torch-cuda``, ``torch-cpu`` or ``torch-universal`` of those in Python and Triton. Nothing
here uses the network, or needs more than torch. To have a small example, `write_kernel` makes such a folder.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import platform
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import torch
from torch import Tensor

from customops import custom_op

# The cache of huggingface_hub -----------------------------------------------------------------------------------------


def cache_folder() -> Path:
    home = os.environ.get("HF_HOME", Path.home() / ".cache" / "huggingface")
    return Path(os.environ.get("HF_HUB_CACHE", Path(home) / "hub"))


def builds() -> list[str]:
    """The names of the builds that run here, the most special one first."""
    version = "".join(torch.__version__.split(".")[:2])
    cuda = torch.version.cuda
    device = "cpu" if cuda is None else "cu" + "".join(cuda.split(".")[:2])
    system = f"{platform.machine()}-{platform.system().lower()}"
    compiled = [f"torch{version}{abi}-{device}-{system}" for abi in ("-cxx11", "")]
    return [*compiled, "torch-cpu" if cuda is None else "torch-cuda", "torch-universal"]


def from_hub(repository: str, revision: str = "main", *, cache: Path | None = None) -> ModuleType:
    """The package of a kernel repository, of the snapshot that `revision`, a branch or a commit, stands for.

    Raises:
        ModuleNotFoundError: it is not on disk, or has no build for this torch, device and system.
    """
    names = [f"{kind}s--{repository.replace('/', '--')}" for kind in ("kernel", "model")]
    cache = cache_folder() if cache is None else cache
    folder = next((cache / name for name in names if (cache / name).is_dir()), None)
    if folder is None:
        raise ModuleNotFoundError(f"{repository} is not in {cache}: hf download {repository}")
    branch = folder / "refs" / revision
    snapshot = folder / "snapshots" / (branch.read_text("utf-8").strip() if branch.exists() else revision)
    build = next((snapshot / "build" / name for name in builds() if (snapshot / "build" / name).is_dir()), None)
    if build is None:
        there = ", ".join(sorted(path.name for path in snapshot.glob("build/*"))) or "none"
        raise ModuleNotFoundError(f"{repository} has no build for {builds()[0]}, but: {there}")
    # Builds of two revisions may be loaded in one process: the name of the module says which.
    name = f"{repository.rpartition('/')[2].replace('-', '_')}_{hashlib.sha256(str(build).encode()).hexdigest()[:8]}"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, build / "__init__.py")
        assert spec is not None
        assert spec.loader is not None
        sys.modules[name] = importlib.util.module_from_spec(spec)
        try:
            spec.loader.exec_module(sys.modules[name])
        except BaseException:
            del sys.modules[name]
            raise
    return sys.modules[name]


# A small repository of this layout ------------------------------------------------------------------------------------

_PACKAGE = '''
"""As kernels of the hub are: out comes first, and is written."""
import torch
from ._rows import halves

def silu_and_mul(out: torch.Tensor, x: torch.Tensor) -> None:
    gate, value = halves(x)
    torch.mul(torch.nn.functional.silu(gate), value, out=out)
'''

_ROWS = """
def halves(x):
    return x.chunk(2, -1)
"""


def write_kernel(cache: Path, repository: str, build: str = "torch-universal") -> None:
    """Put a kernel repository into a cache."""
    folder, commit = cache / f"models--{repository.replace('/', '--')}", "0123456789abcdef0123456789abcdef01234567"
    package = folder / "snapshots" / commit / "build" / build
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(_PACKAGE, "utf-8")
    (package / "_rows.py").write_text(_ROWS, "utf-8")
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text(commit, "utf-8")


# The op, and its kernels ----------------------------------------------------------------------------------------------


def plain(x: Tensor) -> Tensor:
    gate, value = x.chunk(2, -1)
    return gate * torch.sigmoid(gate) * value


@custom_op("examples::silu_and_mul", mutates_args=(), reference=plain)
def silu_and_mul(x: Tensor) -> Tensor:
    """The first half of each row through SiLU, times the second half."""
    gate, value = x.chunk(2, -1)
    return torch.nn.functional.silu(gate) * value


with tempfile.TemporaryDirectory() as folder:  # of a repository that you downloaded: activation = from_hub("org/name")
    write_kernel(Path(folder), "examples-community/activation")
    activation = from_hub("examples-community/activation", cache=Path(folder))


@silu_and_mul.register_kernel("cpu", name="hub", when=lambda x: x.is_contiguous() or "takes contiguous tensors")
def from_activation(x: Tensor) -> Tensor:
    out = x.new_empty([*x.shape[:-1], x.shape[-1] // 2])
    activation.silu_and_mul(out, x)
    return out


@silu_and_mul.register_samples
def _() -> Iterator[tuple[Tensor]]:
    yield (torch.randn(3, 8, requires_grad=True),)
    yield (torch.randn(8, 2).t(),)


def main() -> None:
    for (x,) in ([sample.args[0]] for sample in silu_and_mul.samples()):
        torch.testing.assert_close(silu_and_mul(x), plain(x))
        print([*x.shape], "runs", silu_and_mul.explain(x).steps[-1].what.partition("which is ")[2])
    with silu_and_mul.prefer("reference"):
        torch.testing.assert_close(silu_and_mul(x), plain(x))


if __name__ == "__main__":
    main()
