"""Findings on ops of aten that torch's documentation allows, or that follow from another finding."""

from __future__ import annotations

from real_ops.explained import row

ALLOWED = [
    row(
        "aten::max_unpool2d aten::max_unpool3d",
        "test_gradients",
        "the gradient of self is not the derivative",
        "the sample has indices that repeat: documented as not deterministic",
    ),
    row(
        "aten::as_strided aten::as_strided_ aten::as_strided_copy aten::as_strided_scatter",
        "test_kernels",
        "a result for",
        "it addresses the storage, by definition, and not the tensor",
    ),
    row(
        "aten::as_strided aten::as_strided_ aten::as_strided_copy aten::as_strided_scatter",
        "test_layouts",
        "results depend on the layout",
        "it addresses the storage, by definition, and not the tensor",
    ),
    row(
        "aten::_linalg_eigh",
        "test_kernels",
        "a result for",
        "documented: eigenvectors are not unique",
    ),
    row(
        "aten::linalg_cholesky_ex",
        "test_gradients",
        "the gradient of self is not the derivative",
        "of a matrix that is not positive definite: `info` says so, and what the result is is open",
    ),
    row(
        "aten::_ctc_loss",
        "test_gradients",
        "the gradient of log_probs is not the derivative",
        "documented: log_probs are results of log_softmax, and its formula takes them for that",
    ),
    row(
        "aten::normal",
        "test_gradients",
        "backward gives mean no gradient",
        "declared nondeterministic_seeded; torch defines the gradient of sampling as 0",
    ),
    row(
        "aten::linalg_pinv",
        "test_gradients",
        "the gradient of self is not the derivative",
        "hermitian=True of a matrix that is not: documented as a condition",
    ),
    row(
        "aten::index_put aten::index_put_ aten::scatter aten::scatter_",
        "test_gradients",
        "the gradient of",
        "documented: with indices that repeat it is open which write is the last",
    ),
    row(
        "aten::linalg_eig",
        "test_forward_mode",
        "forward mode is wrong",
        "documented: the order of the eigenvalues is open",
    ),
    row(
        "aten::linalg_eig",
        "test_aot_dispatch_dynamic",
        "the operator's backward fails in eager mode",
        "documented: a loss that depends on the phase of the eigenvectors is refused",
    ),
    row(
        "aten::empty_like aten::new_empty aten::new_empty_strided aten::empty aten::empty_strided aten::empty_permuted",
        "test_aot_dispatch_dynamic",
        "output 0 differs",
        "its result is uninitialised, by definition",
    ),
    row(
        "aten::_ctc_loss",
        "test_state",
        "results depend on earlier calls",
        "follows from the memory that is never written",
    ),
    row(
        "aten::_linalg_eigh",
        "test_precision",
        "a result for",
        "documented: eigenvectors are not unique",
    ),
    row(
        "aten::_linalg_eigh",
        "test_forward_mode",
        "forward mode is wrong",
        "documented: the matrix has to be symmetric; the formula takes its tangent for that",
        """
a, tangent = torch.rand(4, 4).double(), torch.rand(4, 4).double()
values = lambda a: torch.linalg.eigh(a, UPLO="U").eigenvalues
_, found = torch.func.jvp(values, (a,), (tangent,))
differ(found, (values(a + 1e-6 * tangent) - values(a - 1e-6 * tangent)) / 2e-6)
""",
    ),
    row(
        "aten::resize_ aten::resize_as_",
        "test_aot_dispatch_dynamic",
        "the operator fails when traced",
        "torch cannot trace a resize of a copy without Dynamo",
    ),
]
