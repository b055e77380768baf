"""The ops of torchvision, on small versions of the inputs of its tests (`test/test_ops.py`)."""

from __future__ import annotations

import ctypes
import subprocess
from pathlib import Path

import torch
from real_ops import library
from real_ops.subject import Sample

REQUIREMENTS = ("torchvision==0.28.0", "pillow")
NAMESPACES = ("torchvision",)

#: What `_C.so` wants of torch's libraries for CUDA. Its ops for the CPU call none of it.
_CUDA_SYMBOLS = """
    _ZN2at4cuda26getCurrentDevicePropertiesEv _ZN3c104cuda12device_countEv _ZN3c104cuda14ExchangeDeviceEa
    _ZN3c104cuda14MaybeSetDeviceEa _ZN3c104cuda17getStreamFromPoolEba _ZN3c104cuda17getStreamFromPoolEia
    _ZN3c104cuda20CUDACachingAllocator9allocatorE _ZN3c104cuda20getCurrentCUDAStreamEa
    _ZN3c104cuda20getDefaultCUDAStreamEa _ZN3c104cuda20setCurrentCUDAStreamENS0_10CUDAStreamE
    _ZN3c104cuda29c10_cuda_check_implementationEiPKcS2_jb _ZN3c104cuda9GetDeviceEPa _ZN3c104cuda9SetDeviceEab
    _ZNK3c104cuda10CUDAStream11synchronizeEv _ZNK3c104cuda10CUDAStream5queryEv _ZNK3c104cuda10CUDAStream6streamEv
"""


def load() -> None:
    folder = library.site("torchvision", *REQUIREMENTS)
    if torch.version.cuda is None:
        _load_without_cuda(folder)
    import torchvision  # noqa: F401, PLC0415


def _load_without_cuda(folder: Path) -> None:
    """The wheel is built for CUDA: where torch is not, libraries that do nothing take the place of torch's."""
    empty = folder.parent / "without_cuda"
    empty.mkdir(exist_ok=True)
    functions = "\n".join(
        f'long f{i}(void) __asm__("{name}"); long f{i}(void) {{ return 0; }}'
        for i, name in enumerate(_CUDA_SYMBOLS.split())
    )
    for name, code in (("libc10_cuda.so", functions), ("libtorch_cuda.so", "int nothing;")):
        if not (empty / name).exists():
            (empty / "source.c").write_text(code)
            command = ["gcc", "-shared", "-fPIC", f"-Wl,-soname,{name}", "-o", str(empty / name)]
            subprocess.run([*command, str(empty / "source.c")], check=True)
        ctypes.CDLL(str(empty / name), ctypes.RTLD_GLOBAL)


def samples() -> dict[str, list[Sample]]:
    rois = torch.tensor([[0, 0, 0, 9, 9], [0, 0, 5, 4, 9], [1, 5, 5, 9, 9], [1, 1.5, 2.0, 3.5, 7.25]])
    image = torch.rand(2, 3, 10, 10, requires_grad=True)
    by_position = torch.rand(2, 8, 10, 10, requires_grad=True)
    boxes = torch.tensor([[0, 0, 9, 9], [1, 1, 9.5, 10], [5, 5, 12, 12], [20, 20, 30, 25.0]])
    boxes_in_first = torch.tensor([[0, 0, 0, 9, 9], [0, 0, 5, 4, 9]])
    pixels = torch.randint(0, 255, (2, 3, 10, 10), dtype=torch.uint8)
    rotated = torch.tensor([[5, 5, 4, 2, 30.0], [6, 5, 3, 3, -20.0], [20, 20, 5, 5, 0.0]])
    scores = torch.tensor([0.9, 0.3, 0.8, 0.5])
    pooled, pooled_at = torch.ops.torchvision.roi_pool(image.detach(), rois, 1.0, 2, 2)
    positions, channels = torch.ops.torchvision.ps_roi_pool(by_position.detach(), rois, 1.0, 2, 2)
    aligned, channels_aligned = torch.ops.torchvision.ps_roi_align(by_position.detach(), rois, 1.0, 2, 2, 2)
    gradient = torch.rand(pooled.shape)
    deform = _deform()
    output = torch.ops.torchvision.deform_conv2d(*deform)
    return {
        "torchvision::nms": [((boxes, scores, 0.5), {})],
        "torchvision::qnms": [((boxes.to(torch.uint8), (scores * 100).to(torch.uint8), 0.5), {})],
        "torchvision::box_iou_rotated": [((rotated, rotated + 0.5), {})],
        "torchvision::roi_align": [
            ((image, rois, 1.0, 2, 2, 2, False), {}),
            ((image, rois, 0.5, 3, 2, -1, True), {}),
        ],
        "torchvision::qroi_align": [((pixels[:1], boxes_in_first.to(torch.uint8), 0.1, 128, 1.0, 0, 1.0, 2, 2, 2, True), {})],
        "torchvision::roi_pool": [((image, rois, 1.0, 2, 2), {})],
        "torchvision::ps_roi_align": [((by_position, rois, 1.0, 2, 2, 2), {})],
        "torchvision::ps_roi_pool": [((by_position, rois, 1.0, 2, 2), {})],
        "torchvision::deform_conv2d": [(deform, {})],
        "torchvision::_roi_align_backward": [((gradient, rois, 1.0, 2, 2, 2, 3, 10, 10, 2, False), {})],
        "torchvision::_roi_pool_backward": [((gradient, rois, pooled_at, 1.0, 2, 2, 2, 3, 10, 10), {})],
        "torchvision::_ps_roi_align_backward": [
            ((torch.rand(aligned.shape), rois, channels_aligned, 1.0, 2, 2, 2, 2, 8, 10, 10), {})
        ],
        "torchvision::_ps_roi_pool_backward": [
            ((torch.rand(positions.shape), rois, channels, 1.0, 2, 2, 2, 8, 10, 10), {})
        ],
        "torchvision::_deform_conv2d_backward": [
            ((torch.rand(output.shape), *(a.detach() if isinstance(a, torch.Tensor) else a for a in deform)), {})
        ],
        "torchvision::_cuda_version": [((), {})],
    }


def _deform() -> tuple[object, ...]:
    """Two groups of weights, three of offsets, as in torchvision's test."""
    image = torch.rand(2, 6, 5, 4, requires_grad=True)
    offset = torch.randn(2, 3 * 2 * 3 * 2, 2, 3, requires_grad=True)
    mask = torch.randn(2, 3 * 3 * 2, 2, 3, requires_grad=True)
    weight = torch.randn(2, 3, 3, 2, requires_grad=True)
    bias = torch.randn(2, requires_grad=True)
    return (image, weight, offset, mask, bias, 2, 1, 1, 0, 2, 1, 2, 3, True)
