"""Autocast for the device: which ops run in the lower dtype, which in float32, and a kernel that casts for them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from customops._rules.autocast import casting
from customops._schema.parse import from_dispatcher
from customops.backend import _compat

#: The ops that autocast runs in its dtype: products, which the lower precision is for.
LOWER_PRECISION = (
    "mm bmm addmm addbmm baddbmm addmv addr mv matmul linear bilinear einsum chain_matmul "
    "conv1d conv2d conv3d conv_transpose1d conv_transpose2d.input conv_transpose3d.input "
    "scaled_dot_product_attention lstm_cell gru_cell rnn_tanh_cell rnn_relu_cell"
).split()

#: The ops that it runs in float32: sums of many terms, and functions that amplify errors.
FLOAT32 = (
    "softmax.int log_softmax.int layer_norm native_layer_norm group_norm "
    "nll_loss nll_loss_nd cross_entropy_loss mse_loss l1_loss smooth_l1_loss huber_loss kl_div "
    "binary_cross_entropy_with_logits cosine_similarity cosine_embedding_loss poisson_nll_loss "
    "exp expm1 log log2 log10 log1p pow.Tensor_Scalar pow.Tensor_Tensor pow.Scalar reciprocal rsqrt "
    "sum sum.dim_IntList prod prod.dim_int cumsum cumprod norm.Scalar norm.ScalarOpt_dim "
    "dist cdist acos asin cosh sinh tan"
).split()


def casting_kernel(op: Any, name: str, dtype: torch.dtype | None) -> Callable[..., Any]:
    """A kernel for `op` at the device's autocast key; `dtype` None is that of the autocast context."""
    schema = from_dispatcher(_compat.schema_of(op))
    return casting(op, schema, name, "AutocastPrivateUse1", lambda: dtype or torch.get_autocast_dtype(name))
