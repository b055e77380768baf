"""Findings on ops of torchvision 0.28, bitsandbytes 0.50 and torchao 0.18."""

from __future__ import annotations

from real_ops.explained import CRASH, FAKE, PROMISES, REFUSES, row

_ROI_OPS = (
    "torchvision::roi_align torchvision::roi_pool torchvision::ps_roi_align torchvision::ps_roi_pool "
    "torchvision::_roi_align_backward torchvision::_roi_pool_backward torchvision::_ps_roi_align_backward "
    "torchvision::_ps_roi_pool_backward torchvision::qroi_align"
)
_INT_MM = "bitsandbytes::int8_linear_matmul bitsandbytes::int8_scaled_mm bitsandbytes::int8_mixed_scaled_mm"

TORCHVISION = [
    row(
        "torchvision::nms torchvision::qnms",
        FAKE,
        PROMISES,
        "the fake says that two boxes or more are kept (create_unbacked_symint has min=2)",
        """
mode = FakeTensorMode(shape_env=(env := ShapeEnv()))
boxes, scores = torch.tensor([[0.0, 0.0, 1.0, 1.0]] * 2), torch.rand(2)
with mode:
    fake = torch.ops.torchvision.nms(*(mode.from_tensor(t, static_shapes=True) for t in (boxes, scores)), 0.5)
kept = torch.ops.torchvision.nms(boxes, scores, 0.5)
assert kept.numel() == 1 < env.bound_sympy(fake.shape[0].node.expr).lower
""",
    ),
    row(
        "torchvision::box_iou_rotated",
        FAKE,
        REFUSES,
        "there is no fake",
        "refuses(lambda: run_fake(torch.ops.torchvision.box_iou_rotated.default, torch.rand(1, 5), torch.rand(1, 5)))",
    ),
    row(
        _ROI_OPS,
        "inputs",
        CRASH,
        "sizes of 0 and the images that `rois` names are not looked at",
        """
rois = torch.tensor([[1e6, 0, 0, 4, 4]])
torch.ops.torchvision.roi_align(torch.rand(1, 1, 8, 8), rois, 1.0, 2, 2, 2, False)
""",
        crashes=True,
    ),
    row(
        _ROI_OPS,
        "test_writes",
        "the result depends on memory outside",
        "`rois` of another number of columns are taken, and so read beyond their end",
        "torch.ops.torchvision.roi_pool(torch.rand(1, 1, 8, 8), torch.zeros(1, 1), 1.0, 1, 1)",
    ),
    row(
        _ROI_OPS,
        FAKE,
        REFUSES,
        "`rois` of another number of columns: the fake refuses, the kernel takes them",
        "fake_refuses(torch.ops.torchvision.roi_pool.default, torch.rand(1, 1, 8, 8), torch.zeros(1, 1), 1.0, 1, 1)",
    ),
    row(
        _ROI_OPS,
        "test_gradients",
        "the operator fails where its inputs require grad",
        "`rois` of another number of columns: backward refuses, the kernel takes them",
    ),
    row(
        "torchvision::deform_conv2d torchvision::_deform_conv2d_backward",
        "inputs",
        CRASH,
        "divides by a stride, a dilation or a number of groups of 0",
        """
x, weight, offset = torch.rand(1, 1, 4, 4), torch.rand(1, 1, 2, 2), torch.rand(1, 8, 3, 3)
mask, bias = torch.rand(1, 4, 3, 3), torch.rand(1)
torch.ops.torchvision.deform_conv2d(x, weight, offset, mask, bias, 0, 1, 0, 0, 1, 1, 1, 1, True)
""",
        crashes=True,
    ),
    row(
        "torchvision::deform_conv2d",
        FAKE,
        PROMISES,
        "a bias of float64 makes the result float64, that of the fake is float32",
        """
x, weight, offset, mask = torch.rand(1, 1, 4, 4), torch.rand(1, 1, 2, 2), torch.rand(1, 8, 3, 3), torch.rand(1, 4, 3, 3)
bias = torch.rand(1).double()
fake_differs(
    torch.ops.torchvision.deform_conv2d.default, x, weight, offset, mask, bias, 1, 1, 0, 0, 1, 1, 1, 1, True
)
""",
    ),
    row(
        "torchvision::_deform_conv2d_backward",
        FAKE,
        PROMISES,
        "the gradient of the bias has the shape and dtype of the output's channels, that of the fake those of the bias",
        """
x, weight, offset, mask = torch.rand(1, 1, 4, 4), torch.rand(1, 1, 2, 2), torch.rand(1, 8, 3, 3), torch.rand(1, 4, 3, 3)
bias, gradient = torch.rand(1).half(), torch.rand(1, 1, 3, 3)
fake_differs(
    torch.ops.torchvision._deform_conv2d_backward.default,
    *(gradient, x, weight, offset, mask, bias, 1, 1, 0, 0, 1, 1, 1, 1, True),
)
""",
    ),
]

BITSANDBYTES = [
    row(
        _INT_MM,
        "test_layouts",
        "results depend on the layout of an input",
        "torch._int_mm is wrong for expanded matrices on the CPU",
        """
a, b = torch.ones(10, 20).char(), torch.ones(1, 20).char()
differ(torch._int_mm(a, b.expand(30, 20).t()), torch._int_mm(a, b.expand(30, 20).contiguous().t()))
""",
    ),
    row(
        _INT_MM,
        "test_kernels",
        "the kernel for cpu has other results",
        "torch._int_mm is wrong for matrices of one column on the CPU",
        """
a, b = torch.ones(10, 1).char(), torch.ones(30, 1).char()
differ(torch._int_mm(a, b.t()), torch.ones(10, 30).int())
""",
    ),
    row(
        "bitsandbytes::int8_linear_matmul",
        FAKE,
        REFUSES,
        "the kernel takes int32, the fake int8 only",
        """
a, b, out = torch.ones(2, 3).int(), torch.ones(4, 3).int(), torch.ones(2, 4).int()
fake_refuses(torch.ops.bitsandbytes.int8_linear_matmul.out, a, b, out)
""",
    ),
    row(
        "bitsandbytes::int8_mm_dequant",
        FAKE,
        PROMISES,
        "the result has two dimensions, that of the fake as many as the input",
        "fake_differs(torch.ops.bitsandbytes.int8_mm_dequant.default, torch.ones(3, 4, 5).int(), torch.ones(12), "
        "torch.ones(5))",
    ),
    row(
        "bitsandbytes::int8_vectorwise_dequant",
        FAKE,
        REFUSES,
        "the kernel takes int32, the fake int8 only",
        "fake_refuses(torch.ops.bitsandbytes.int8_vectorwise_dequant.default, torch.ones(1, 1).int(), torch.ones(1))",
    ),
    row(
        "bitsandbytes::int8_vectorwise_dequant",
        FAKE,
        PROMISES,
        "of float64 statistics the result is float64, that of the fake float32",
        "fake_differs(torch.ops.bitsandbytes.int8_vectorwise_dequant.default, torch.ones(1, 1).char(), "
        "torch.ones(1).double())",
    ),
    row(
        "bitsandbytes::int8_vectorwise_quant",
        "test_schema",
        "Argument A is not defined as mutable",
        "it sets outliers to 0 and puts them back; its schema has no write",
        """
a = torch.ones(2, 3).half()
before = a._version
torch.ops.bitsandbytes.int8_vectorwise_quant(a, 0.5)
assert a._version != before
""",
    ),
    row(
        "bitsandbytes::int8_vectorwise_quant",
        FAKE,
        PROMISES,
        "of a transposed input the result is transposed, that of the fake is contiguous; and of a negative threshold "
        "there is no third result, where the fake has one",
        "fake_differs(torch.ops.bitsandbytes.int8_vectorwise_quant.default, torch.rand(4, 6).t(), 0.0)",
    ),
    row(
        "bitsandbytes::int8_mixed_scaled_mm",
        FAKE,
        PROMISES,
        "the second result is a matrix of the dtype of A, that of the fake a vector of int64",
        """
a, stats, bias = torch.ones(2, 2).half(), torch.ones(2), torch.ones(2).half()
quantized, columns = a.char(), torch.tensor([0])
arguments = (a, quantized, quantized, stats, stats, columns, bias)
mixed = torch.ops.bitsandbytes.int8_mixed_scaled_mm.default
assert mixed(*arguments)[1].dtype != run_fake(mixed, *arguments)[1].dtype
""",
    ),
    row(
        "bitsandbytes::quantize_blockwise",
        "inputs",
        CRASH,
        "256 elements of the code are read, however many there are",
        "torch.ops.bitsandbytes.quantize_blockwise(torch.rand(8, 33), torch.rand(0), 64)",
        crashes=True,
    ),
    row(
        "bitsandbytes::quantize_blockwise",
        "test_writes",
        "the result depends on memory outside",
        "a strided code is read as a contiguous one",
        """
x, code = torch.randn(8, 64), torch.linspace(-1, 1, 512)[::2]
quantize = torch.ops.bitsandbytes.quantize_blockwise
differ(quantize(x, code, 64)[0], quantize(x, code.contiguous(), 64)[0])
""",
    ),
    row(
        "bitsandbytes::quantize_blockwise",
        "test_layouts",
        "results depend on the layout of an input",
        "a strided code is read as a contiguous one: see test_writes",
    ),
    row(
        "bitsandbytes::quantize_blockwise",
        "test_uninitialized_memory",
        "a result depends on memory that was never written",
        "a code of bfloat16 is read as one of float32, beyond its end",
        """
x, code = torch.randn(8, 64).bfloat16(), torch.linspace(-1, 1, 256)
quantize = torch.ops.bitsandbytes.quantize_blockwise
differ(quantize(x, code, 64)[0], quantize(x, code.bfloat16(), 64)[0])
""",
    ),
    row(
        "bitsandbytes::quantize_blockwise",
        "test_kernels",
        "the kernel for cpu has other results",
        "a code of less than 256 elements is read beyond its end",
    ),
    row(
        "bitsandbytes::quantize_blockwise",
        FAKE,
        PROMISES,
        "the result is contiguous, that of the fake has the strides of the input",
        "fake_differs(torch.ops.bitsandbytes.quantize_blockwise.default, torch.rand(64, 8).t(), torch.rand(256), 64)",
    ),
    row(
        "bitsandbytes::quantize_blockwise",
        FAKE,
        REFUSES,
        "the kernel takes float64, the fake does not",
        "fake_refuses(torch.ops.bitsandbytes.quantize_blockwise.default, torch.rand(1, 64).double(), "
        "torch.rand(256).double(), 64)",
    ),
    row(
        "bitsandbytes::dequantize_blockwise",
        "test_layouts",
        "results depend on the layout of an input",
        "strided statistics, or a strided code, are read as contiguous ones",
        """
quantized, absmax, code = torch.arange(128).byte(), torch.ones(2), torch.linspace(-1, 1, 512)[::2]
dequantize = torch.ops.bitsandbytes.dequantize_blockwise
results = [dequantize(quantized, absmax, c, 64, torch.float32) for c in (code, code.contiguous())]
differ(*results)
""",
    ),
    row(
        "bitsandbytes::dequantize_blockwise",
        FAKE,
        PROMISES,
        "the result is contiguous, that of the fake has the strides of the input",
        "fake_differs(torch.ops.bitsandbytes.dequantize_blockwise.default, torch.ones(64, 2).byte().t(), "
        "torch.ones(2), torch.rand(256), 64, torch.float32)",
    ),
    row(
        "bitsandbytes::dequantize_blockwise",
        FAKE,
        REFUSES,
        "the kernel takes a blocksize of 0, the fake does not",
    ),
    row(
        "bitsandbytes::quantize_4bit",
        FAKE,
        REFUSES,
        "the kernel takes any blocksize, the fake powers of 2",
        "fake_refuses(torch.ops.bitsandbytes.quantize_4bit.default, torch.rand(4, 6), 129, 'nf4', torch.uint8)",
    ),
]

_AFFINE = (
    "quantized_decomposed::quantize_per_channel quantized_decomposed::dequantize_per_channel "
    "quantized_decomposed::quantize_per_channel_group"
)

TORCHAO = [
    row(
        "blocksparse::bsr_to_dense",
        "inputs",
        CRASH,
        "numbers of blocks that are out of range are taken",
        """
crow, columns = torch.tensor([0, 1 << 40, 1]), torch.tensor([0])
torch.ops.blocksparse.bsr_to_dense(crow, columns, torch.rand(1, 2, 2), 4, 4)
""",
        crashes=True,
    ),
    row(
        _AFFINE,
        FAKE,
        PROMISES,
        "of a transposed input the strides of the result are others than the fake's",
        """
x, scales, zeros = torch.rand(8, 4).t(), torch.ones(4, 2), torch.zeros(4, 2).long()
quantize = torch.ops.quantized_decomposed.quantize_per_channel_group.default
fake_differs(quantize, x, scales, zeros, -128, 127, torch.int8, 4)
""",
    ),
    row(
        "quantized_decomposed::dequantize_per_tensor",
        FAKE,
        PROMISES,
        "out_dtype=torch.int64: the kernel of the overload tensor2 makes float32 of it, its fake int64",
        """
x, one = torch.ones(1).char(), torch.tensor(1)
dequantize = torch.ops.quantized_decomposed.dequantize_per_tensor.tensor2
fake_differs(dequantize, x, torch.tensor(1.0), one, one, one, torch.int8, out_dtype=torch.int64)
""",
    ),
    row(
        "quantized_decomposed::dequantize_per_token",
        FAKE,
        REFUSES,
        "the kernel takes int64, the fake does not",
        """
x, one = torch.ones(1, 1).long(), torch.ones(1, 1)
dequantize = torch.ops.quantized_decomposed.dequantize_per_token.default
fake_refuses(dequantize, x, one, one.long(), -128, 127, torch.int64, torch.float32)
""",
    ),
    row(
        "quantized_decomposed::fake_quant_per_channel",
        "test_modes",
        "the operator fails in inference mode",
        "it has a kernel for the key Autograd alone",
        """
x, scales, zeros = torch.rand(1, 1), torch.ones(1), torch.zeros(1).long()
with torch.inference_mode():
    refuses(lambda: torch.ops.quantized_decomposed.fake_quant_per_channel(x, scales, zeros, 1, -128, 127))
""",
    ),
    row(
        "quantized_decomposed::dequantize_per_channel_group",
        "test_symbolic_sizes",
        "the fake impl fails on sizes that are symbols",
        "it calls an op that takes numbers for sizes",
        """
mode = FakeTensorMode(shape_env=ShapeEnv())
x, scales, zeros = torch.ones(4, 8).char(), torch.ones(4, 2), torch.zeros(4, 2).long()
fakes = [mode.from_tensor(t) for t in (x, scales, zeros)]
dequantize = torch.ops.quantized_decomposed.dequantize_per_channel_group
with mode:
    refuses(lambda: dequantize(*fakes, -128, 127, torch.int8, 4, torch.float32))
""",
    ),
]

LIBRARIES = [*TORCHVISION, *BITSANDBYTES, *TORCHAO]
