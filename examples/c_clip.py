"""A C function over DLPack tensors, by ctypes: `from_c` hands it shape, strides and dtype, so it writes where they lie.

The C source is compiled with ``cc`` when the module is imported; a package would ship the library.
"""

from __future__ import annotations

import ctypes
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from customops import Mut, custom_op
from customops.languages import DLTensor, from_c

SOURCE = """
#include <stdint.h>
typedef struct { void *data; int32_t device_type, device_id, ndim; uint8_t code, bits; uint16_t lanes;
                 int64_t *shape, *strides; uint64_t byte_offset; } DLTensor;

int clip(DLTensor *x, double low, double high) {
    if (x->ndim != 2 || x->code != 2 || x->bits != 32) return -1;  /* a matrix of float32 */
    float *data = (float *)((char *)x->data + x->byte_offset);
    int changed = 0;
    for (int64_t i = 0; i < x->shape[0]; i++)
        for (int64_t j = 0; j < x->shape[1]; j++) {
            float *at = data + i * x->strides[0] + j * x->strides[1];
            float value = *at < low ? (float)low : *at > high ? (float)high : *at;
            changed += value != *at;
            *at = value;
        }
    return changed;
}
"""

with tempfile.TemporaryDirectory() as folder:
    (Path(folder) / "clip.c").write_text(SOURCE)
    subprocess.run(["cc", "-O2", "-shared", "-fPIC", "-o", "clip.so", "clip.c"], cwd=folder, check=True)
    library = ctypes.CDLL(f"{folder}/clip.so")
library.clip.argtypes = [ctypes.POINTER(DLTensor), ctypes.c_double, ctypes.c_double]
clip = from_c(library.clip)


@custom_op("examples::c_clip")
def clip_(x: Mut[Tensor], low: float, high: float) -> int:
    """Clips a matrix in place; returns how many elements changed."""
    changed: int = clip(x, low, high)
    if changed < 0:
        raise TypeError(f"c_clip takes matrices of float32, not {x.dim()} dimensions of {x.dtype}")
    return changed


@clip_.register_fake
def _(x: Tensor, low: float, high: float) -> int:
    return torch.library.get_ctx().new_dynamic_size()  # type: ignore[return-value]


@clip_.register_samples
def _() -> Iterator[tuple[Tensor, float, float]]:
    yield torch.randn(3, 4), -0.5, 0.5
    yield torch.randn(6, 8)[::2, 1::3].t(), 0.0, 1.0


def main() -> None:
    whole = torch.randn(6, 8)
    before, x = whole.clone(), whole[::2, 1::3].t()
    changed = clip_(x, -0.5, 0.5)
    before[::2, 1::3].clamp_(-0.5, 0.5)
    torch.testing.assert_close(whole, before)
    print(f"{changed} of {x.numel()} elements clipped in place, between others that stay")
    try:
        clip_(torch.zeros(3), 0.0, 1.0)
    except TypeError as error:
        print(error)


if __name__ == "__main__":
    main()
