"""Findings on ops of aten (torch 2.13): faults of torch."""

from __future__ import annotations

from real_ops.explained import CRASH, FAKE, LOOP, PROMISES, REFUSES, row

ATEN = [
    # Fakes -----------------------------------------------------------------------------------------------------------
    row(
        "aten::addbmm_",
        FAKE,
        REFUSES,
        "the kernel makes `self` of another shape, in place; the fake refuses",
        "fake_refuses(aten.addbmm_.default, torch.rand(1), torch.rand(1, 1, 1), torch.rand(1, 1, 1))",
    ),
    row(
        "aten::block_diag",
        FAKE,
        REFUSES,
        "of no tensors the kernel makes an empty one, and the fake an IndexError",
        "fake_refuses(aten.block_diag.default, [])",
    ),
    row(
        "aten::masked_select",
        FAKE,
        PROMISES,
        "the fake bounds the size by that of `self`, and not by that of `self` and `mask` broadcast",
        """
mode = FakeTensorMode(shape_env=(env := ShapeEnv()))
x, mask = torch.rand(1, 4), torch.ones(4, 4, dtype=torch.bool)
with mode:
    fake = aten.masked_select(*(mode.from_tensor(t, static_shapes=True) for t in (x, mask)))
assert aten.masked_select(x, mask).numel() > env.bound_sympy(fake.shape[0].node.expr).upper
""",
    ),
    row(
        "aten::native_group_norm",
        FAKE,
        PROMISES,
        "float16 input and float32 weights: mean and rstd are float32, those of the fake float16",
        "fake_differs(aten.native_group_norm.default, torch.rand(1, 6, 3).half(), torch.rand(6), torch.rand(6), "
        "1, 6, 3, 2, 0.5)",
    ),
    row(
        "aten::native_group_norm",
        FAKE,
        REFUSES,
        "the kernel goes by N, C and HxW and takes 2 dimensions, the fake does not",
        "fake_refuses(aten.native_group_norm.default, torch.rand(6, 3), torch.rand(6), None, 1, 6, 3, 2, 0.5)",
    ),
    row(
        "aten::native_layer_norm",
        FAKE,
        PROMISES,
        "float16 input and float32 weights: mean and rstd are float32, those of the fake float16",
        "fake_differs(aten.native_layer_norm.default, torch.rand(2, 3).half(), [2, 3], torch.rand(2, 3), "
        "torch.rand(2, 3), 0.5)",
    ),
    row(
        "aten::native_batch_norm aten::_native_batch_norm_legit aten::_batch_norm_with_update",
        FAKE,
        PROMISES,
        "the result is contiguous, that of the fake has the strides of the input",
        "fake_differs(aten.native_batch_norm.default, torch.rand(5, 4, 3).mT, None, None, None, None, True, 0.5, 0.6)",
    ),
    row(
        "aten::native_batch_norm aten::_native_batch_norm_legit aten::_batch_norm_with_update",
        FAKE,
        REFUSES,
        "of one element for each channel: the kernel gives NaN for the variance, the fake a ZeroDivisionError",
        "fake_refuses(aten.native_batch_norm.default, torch.rand(1, 1, 1), None, None, torch.rand(1), torch.rand(1), "
        "True, 0.5, 0.6)",
    ),
    row(
        "aten::native_batch_norm",
        "test_state",
        "results depend on earlier calls",
        "it writes running_mean and running_var, which its schema does not say",
        """
mean = torch.zeros(5)
aten.native_batch_norm(torch.rand(5, 5, 5), None, None, mean, torch.ones(5), True, 0.5, 0.6)
assert mean.any() and "(a!)" not in str(aten.native_batch_norm.default._schema)
""",
    ),
    row(
        "aten::_adaptive_avg_pool3d",
        FAKE,
        REFUSES,
        "of an empty batch the kernel returns a tensor with a size of -1",
        "assert aten._adaptive_avg_pool3d(torch.rand(0, 1, 1, 1, 1), [5, 7, -1]).shape[-1] == -1",
    ),
    row(
        "aten::upsample_nearest1d aten::upsample_nearest2d aten::_upsample_nearest_exact1d "
        "aten::_upsample_nearest_exact2d",
        FAKE,
        REFUSES,
        "of an empty batch: the fake passes a number to torch._check",
        "fake_refuses(aten.upsample_nearest1d.default, torch.rand(0, 1, 1), [3])",
    ),
    row(
        "aten::soft_margin_loss aten::huber_loss",
        FAKE,
        PROMISES,
        "float16 and float32: the result is float16, that of the fake float32",
        "fake_differs(aten.huber_loss.default, torch.rand(3).half(), torch.rand(3))",
    ),
    row(
        "aten::normal",
        FAKE,
        PROMISES,
        "float16 and float32: the result is float16, that of the fake float32",
        "fake_differs(aten.normal.Tensor_Tensor, torch.rand(3).half(), torch.rand(3))",
    ),
    row(
        "aten::_softmax_backward_data",
        FAKE,
        PROMISES,
        "the kernel goes by the dtype of the gradient where `input_dtype` is wider, the fake by `input_dtype`",
        "fake_differs(aten._softmax_backward_data.default, torch.rand(2), torch.rand(2), 0, torch.float64)",
    ),
    row(
        "aten::multi_margin_loss",
        FAKE,
        PROMISES,
        "of 0-dimensional input: the shape is (), that of the fake (1,)",
        "fake_differs(aten.multi_margin_loss.default, torch.tensor(1.0), torch.tensor(0), reduction=0)",
    ),
    row(
        "aten::multi_margin_loss",
        FAKE,
        REFUSES,
        "p=2.5: the kernel computes with another p, the fake refuses",
        "fake_refuses(aten.multi_margin_loss.default, torch.rand(2, 3), torch.tensor([0, 1]), 2.5)",
    ),
    row(
        "aten::multilabel_margin_loss_forward",
        FAKE,
        PROMISES,
        "of 0-dimensional input: the shape is (), that of the fake (1,)",
        "fake_differs(aten.multilabel_margin_loss_forward.default, torch.tensor(1.0), torch.tensor(0), 0)",
    ),
    row(
        "aten::max_unpool2d",
        FAKE,
        PROMISES,
        "of channels-last input the result is channels-last, that of the fake is contiguous",
        """
x = torch.rand(1, 2, 1, 3).to(memory_format=torch.channels_last)
fake_differs(aten.max_unpool2d.default, x, torch.arange(6).reshape(1, 2, 1, 3), [3, 6])
""",
    ),
    row(
        "aten::native_dropout_backward",
        FAKE,
        PROMISES,
        "of a transposed gradient the result is transposed, that of the fake contiguous",
        "fake_differs(aten.native_dropout_backward.default, torch.rand(5, 4).t(), torch.ones(4, 5) > 0, 0.5)",
    ),
    row(
        "aten::channel_shuffle",
        FAKE,
        PROMISES,
        "of channels-last input the result is channels-last, that of the fake is contiguous",
        "fake_differs(aten.channel_shuffle.default, torch.rand(1, 4, 2, 2).to(memory_format=torch.channels_last), 2)",
    ),
    row(
        "aten::segment_reduce",
        FAKE,
        PROMISES,
        "with lengths and offsets the kernel goes by the offsets, the fake by the lengths",
        "fake_differs(aten.segment_reduce.default, torch.rand(1), 'max', lengths=torch.tensor([0]), "
        "offsets=torch.tensor([0]))",
    ),
    row(
        "aten::nll_loss_forward",
        FAKE,
        PROMISES,
        "reduction=-1: the kernel takes it for a mean, the fake for none",
        "fake_differs(aten.nll_loss_forward.default, torch.rand(1, 1), torch.tensor([0]), None, -1, -100)",
    ),
    row(
        "aten::nll_loss_forward",
        "test_vmap",
        LOOP,
        "reduction=-1: the kernel takes it for a mean, the decomposition of vmap for none",
        "vmap_differs(lambda x, y: aten.nll_loss_forward(x, y, None, -1, -100)[0], torch.rand(3, 1, 1), "
        "torch.zeros(3, 1).long())",
    ),
    row(
        "aten::nll_loss_forward",
        FAKE,
        REFUSES,
        "the kernel takes targets of uint8, the fake does not",
        "fake_refuses(aten.nll_loss_forward.default, torch.rand(1, 1), torch.zeros(1).byte(), None, 0, -100)",
    ),
    row(
        "aten::huber_loss",
        FAKE,
        REFUSES,
        "reduction=-1: the kernel takes it for none, the fake refuses",
        "fake_refuses(aten.huber_loss.default, torch.rand(1), torch.rand(1), -1)",
    ),
    row(
        "aten::grid_sampler_2d",
        FAKE,
        REFUSES,
        "interpolation_mode=-1: the kernel does as if there were such a mode, the fake refuses",
        "fake_refuses(aten.grid_sampler_2d.default, torch.rand(1, 1, 1, 1), torch.rand(1, 1, 1, 2), -1, 0, False)",
    ),
    row(
        "aten::where aten::_unsafe_masked_index aten::_unsafe_masked_index_put_accumulate",
        FAKE,
        REFUSES,
        "the kernel takes a mask of uint8, with a warning, and the fake does not",
        "fake_refuses(aten.where.self, torch.zeros(1).byte(), torch.rand(1), torch.rand(1))",
    ),
    row(
        "aten::triu_indices aten::tril_indices",
        FAKE,
        REFUSES,
        "dtype=None: the kernel takes int64, the fake refuses",
        "fake_refuses(aten.tril_indices.default, 2, 2, dtype=None)",
    ),
    row(
        "aten::_to_copy",
        FAKE,
        REFUSES,
        "pin_memory=True: the kernel takes it, the fake says that it is not supported",
        "fake_refuses(aten._to_copy.default, torch.rand(2), pin_memory=True)",
    ),
    row(
        "aten::nan_to_num_",
        FAKE,
        REFUSES,
        "the kernel takes complex numbers, the fake does not",
        "fake_refuses(aten.nan_to_num_.default, torch.rand(2, dtype=torch.complex64))",
    ),
    # Traces ----------------------------------------------------------------------------------------------------------
    row(
        "aten::geqrf aten::histogram aten::_histogramdd_bin_edges aten::_histogramdd_from_bin_tensors",
        "test_aot_dispatch_dynamic",
        "the operator fails when traced",
        "there is no fake",
        "refuses(lambda: aten.geqrf(torch.rand(2, 2, device='meta')))",
    ),
    row(
        "aten::upsample_linear1d aten::upsample_trilinear3d",
        "test_aot_dispatch_dynamic",
        "the operator fails when traced",
        "an internal assert of torch where sizes are symbols",
        """
x = torch.rand(2, 4, 5, requires_grad=True)
compiled = torch.compile(lambda x: aten.upsample_linear1d(x, [3], True), backend="aot_eager", dynamic=True)
refuses(lambda: compiled(x))
""",
    ),
    row(
        "aten::polygamma_",
        "test_aot_dispatch_dynamic",
        "the operator fails when traced",
        "torch cannot functionalize it",
        """
refuses(lambda: torch.compile(lambda x: aten.polygamma_(x.clone(), 1), backend="aot_eager")(torch.rand(3)))
""",
    ),
    # vmap ------------------------------------------------------------------------------------------------------------
    row(
        "aten::linspace",
        "test_vmap",
        LOOP,
        "steps=0: vmap gives int64",
        "vmap_differs(lambda start: aten.linspace.Tensor_Scalar(start, 3, 0), torch.rand(2))",
    ),
    row(
        "aten::aminmax",
        "test_vmap",
        LOOP,
        "vmap drops the dimensions that keepdim=True keeps",
        "vmap_differs(lambda x: aten.aminmax(x, keepdim=True)[0], torch.rand(3, 2, 2))",
    ),
    row(
        "aten::lu_unpack",
        "test_vmap",
        LOOP,
        "the empty tensors of unpack_data=False have no batch under vmap",
        """
lu, pivots = torch.linalg.lu_factor(torch.rand(3, 2, 2))
vmap_differs(lambda lu, pivots: aten.lu_unpack(lu, pivots, unpack_data=False)[1], lu, pivots)
""",
    ),
    row(
        "aten::_linalg_svd aten::_linalg_eigh",
        "test_vmap",
        LOOP,
        "the empty tensors in the place of vectors have no batch under vmap",
        "vmap_differs(lambda x: aten._linalg_svd(x, compute_uv=False)[0], torch.rand(3, 2, 2))",
    ),
    row(
        "aten::linalg_lstsq",
        "test_vmap",
        LOOP,
        "the empty residuals have no batch under vmap: with out_dims=-1 a size of 2**35 comes out",
        """
lstsq = torch.vmap(lambda a, b: torch.linalg.lstsq(a, b, driver="gels")[1], out_dims=-1)
assert lstsq(torch.rand(3, 2, 2), torch.rand(3, 2, 1)).shape != (0, 3)
""",
    ),
    row(
        "aten::grid_sampler_2d aten::grid_sampler_3d",
        "test_vmap",
        f"{LOOP}: batched along different dimensions",
        "vmap gives a wrong shape where input and grid are batched along different dimensions",
        """
x, grid = torch.rand(3, 2, 1, 4, 4), torch.rand(3, 2, 5, 5, 2)
sample = lambda x, grid: aten.grid_sampler_2d(x, grid, 0, 0, False)
assert torch.vmap(sample, in_dims=(0, 1))(x, grid.transpose(0, 1)).shape != torch.vmap(sample)(x, grid).shape
""",
    ),
    row(
        "aten::all aten::any",
        "test_vmap",
        LOOP,
        "dim=[] is no dimension, and under vmap all of them",
        "vmap_differs(lambda x: aten.all.dims(x, []), torch.rand(3, 4))",
    ),
    row(
        "aten::squeeze_",
        "test_vmap",
        LOOP,
        "of a batch of one the batch is squeezed, too",
        "assert torch.vmap(lambda x: x.squeeze_())(torch.rand(1, 2, 1)).shape == (2,)",
    ),
    row(
        "aten::resize_",
        "test_vmap",
        LOOP,
        "under vmap the elements are taken from the whole batch",
        "vmap_differs(lambda x: x.resize_([]), torch.arange(24.0).reshape(3, 2, 2, 2))",
    ),
    row(
        "aten::_native_batch_norm_legit",
        "test_vmap",
        LOOP,
        "where running_mean alone is batched, running_var is not written",
        """
x, mean, var = torch.rand(4, 2), torch.zeros(3, 2), torch.ones(2)
torch.vmap(lambda mean: aten._native_batch_norm_legit(x, None, None, mean, var, True, 0.5, 0.6)[0])(mean)
assert torch.equal(var, torch.ones(2))
""",
    ),
    # Memory ----------------------------------------------------------------------------------------------------------
    row(
        "aten::native_group_norm",
        "test_layouts",
        "results depend on the layout of an input",
        "strided weights are read as contiguous ones",
        """
x, weight = torch.rand(1, 6, 3), torch.rand(12)[::2]
norm = lambda weight: aten.native_group_norm(x, weight, None, 1, 6, 3, 2, 0.5)[0]
differ(norm(weight), norm(weight.contiguous()))
""",
    ),
    row(
        "aten::_ctc_loss",
        "test_uninitialized_memory",
        "a result depends on memory that was never written",
        "the second result, log_alpha, has elements beyond the lengths, which stay as the memory was",
        """
torch.utils.deterministic.fill_uninitialized_memory = True
torch.use_deterministic_algorithms(True, warn_only=True)
ones = torch.tensor([1])
loss = aten._ctc_loss.Tensor(torch.rand(2, 1, 2), torch.tensor([[1]]), ones, ones)
assert loss[1].isnan().any()
""",
    ),
    row(
        "aten::_ctc_loss",
        "test_threads",
        "two calls at the same time",
        "follows from the memory that is never written",
    ),
    row(
        "aten::_ctc_loss",
        "test_layouts",
        "results depend on the layout",
        "follows from the memory that is never written",
    ),
    row(
        "aten::grid_sampler_3d",
        "test_vmap",
        f"{LOOP}: all tensors batched",
        "interpolation_mode=-1: the kernel writes nothing, and returns the memory as it was",
        """
torch.utils.deterministic.fill_uninitialized_memory = True
torch.use_deterministic_algorithms(True, warn_only=True)
assert aten.grid_sampler_3d(torch.rand(1, 1, 1, 1, 1), torch.rand(1, 1, 1, 1, 3), -1, 0, False).isnan().any()
""",
    ),
    row(
        "aten::grid_sampler_3d",
        "test_gradients",
        "backward is wrong",
        "interpolation_mode=-1: backward writes nothing, and returns the memory as it was",
    ),
    row(
        "aten::_chunk_cat",
        "inputs",
        CRASH,
        "of 0-dimensional tensors",
        "aten._chunk_cat([torch.tensor(1.0), torch.tensor(2.0)], -1, 5)",
        crashes=True,
    ),
    row(
        "aten::max_pool2d_with_indices_backward",
        "inputs",
        CRASH,
        "indices are not compared with the size of the input",
        """
x, indices = torch.rand(1, 1, 4, 4), torch.full((1, 1, 2, 2), 1 << 40)
aten.max_pool2d_with_indices_backward(torch.rand(1, 1, 2, 2), x, [2, 2], [2, 2], [0, 0], [1, 1], False, indices)
""",
        crashes=True,
    ),
    row(
        "aten::_embedding_bag",
        "inputs",
        CRASH,
        "a negative offset is taken; whether it crashes is chance",
        """
indices, offsets = torch.zeros(4).long(), torch.tensor([0, -(1 << 40)])
aten._embedding_bag(torch.rand(5, 3), indices, offsets)
""",
    ),
    # Gradients -------------------------------------------------------------------------------------------------------
    row(
        "aten::native_group_norm",
        "test_gradients",
        "backward is wrong where only some of the outputs are used",
        "no gradient comes from mean and rstd where the first output is not used",
        """
x = torch.rand(1, 6, 3, requires_grad=True)
out, mean, rstd = aten.native_group_norm(x, None, None, 1, 6, 3, 2, 0.5)
assert mean.requires_grad and torch.autograd.grad(mean.sum(), x, allow_unused=True) == (None,)
""",
    ),
    row(
        "aten::as_strided_scatter",
        "test_gradients",
        "backward is wrong where the gradient it is given is not contiguous",
        "backward reads outside of the gradient that it is given, if that has an offset",
        """
x, source = torch.rand(1, requires_grad=True), torch.tensor(1.0, requires_grad=True)
scattered = aten.as_strided_scatter(x, source, [], [], 0)
_, found = torch.autograd.grad(scattered, (x, source), torch.tensor([1.0, 2.0, 3.0, 4.0])[1:2])
assert found != 2.0
""",
    ),
    row(
        "aten::polar",
        "test_gradients",
        "the gradient of abs is not the derivative",
        "backward takes abs for positive",
        """
radius = torch.tensor(-1.0, requires_grad=True)
(found,) = torch.autograd.grad(aten.polar(radius, torch.tensor(0.0)).real, radius)
assert found != slope(lambda x: aten.polar(x, torch.tensor(0.0).double()).real, radius)
""",
    ),
]
