"""The packages, and where their tests are."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Client:
    """A package that defines its operators with `torch.library`.

    Attributes:
        requirements: what pip installs, beside torch; dependencies are named, since pip would bring another torch.
        repository, commit: where its tests are; a tag or a commit.
        tests: files or folders of tests, relative to `cwd`.
        options: for pytest; what needs a GPU or a network is left out here.
        cwd: where the tests are run, relative to the repository.
        in_tree: import the package from the repository, not from its wheel.
        environment: variables that its tests ask for.
        edits: file of the repository, text in it, and what to write instead.
        explained: tests that end otherwise, and the fault of the package or of torch that makes the difference.
    """

    name: str
    requirements: tuple[str, ...]
    repository: str
    commit: str
    tests: tuple[str, ...]
    options: tuple[str, ...] = ()
    cwd: str = "."
    in_tree: bool = False
    environment: tuple[tuple[str, str], ...] = ()
    edits: tuple[tuple[str, str, str], ...] = ()
    explained: tuple[tuple[str, str], ...] = ()


AOT_STATE = "torch's check fails in its own set-up, before it calls the operator"

CLIENTS = [
    Client(
        "bitsandbytes",
        ("bitsandbytes==0.50.1", "scipy", "einops", "lion-pytorch==0.2.3"),
        "https://github.com/bitsandbytes-foundation/bitsandbytes",
        "0.50.1",
        ("tests/test_ops.py",),
        environment=(("BNB_TEST_DEVICE", "cpu"),),
        explained=(
            (
                "tests.test_ops.TestLLMInt8Ops::test_int8_vectorwise_quant[cpu-6.0]",
                "`int8_vectorwise_quant` sets outliers of its input to 0 and puts them back; its schema has no write",
            ),
        ),
    ),
    Client(
        "optimum-quanto",
        ("optimum-quanto==0.2.7", "safetensors", "huggingface-hub", "ninja", "tqdm", "pyyaml", "requests"),
        "https://github.com/huggingface/optimum-quanto",
        "v0.2.7",
        ("test",),
        options=("--ignore=test/models", "--ignore=test/cli"),  # these download models
    ),
    Client(
        "nvalchemi-toolkit-ops",
        ("warp-lang==1.10.1",),
        "https://github.com/NVIDIA/nvalchemi-toolkit-ops",
        "v0.2.0",
        ("test",),
        options=("-m", "not slow and not gpu", "--continue-on-collection-errors"),  # one file wants torch-pme
        in_tree=True,
        explained=(
            (
                "test.test_autograd.TestMultipleOutputs::test_multiple_outputs_inference_mode",
                "a `setup_context(ctx, inputs, outputs)`: torch calls it with `output=`, a `TypeError` once there is a "
                "gradient to compute",
            ),
        ),
    ),
    Client(
        "aimnet",
        ("nvalchemi-toolkit-ops", "warp-lang", "h5py", "click", "requests", "pyyaml", "ase", "scipy"),
        "https://github.com/isayevlab/aimnetcentral",
        "704325e",
        ("tests",),
        options=("-m", "not gpu and not network and not hf and not weights"),
        in_tree=True,
    ),
    Client(
        "fbgemm-gpu-cpu",
        ("fbgemm-gpu-cpu==1.8.0",),
        "https://github.com/pytorch/FBGEMM",
        "v1.8.0",
        ("jagged", "sparse", "permute", "combine"),
        options=("-p", "few_examples", "--hypothesis-seed=0"),
        cwd="fbgemm_gpu/test",
        edits=(  # the checks of operators are off outside Meta
            ("fbgemm_gpu/test/test_utils.py", 'if hasattr(fbgemm_gpu, "open_source"):', "if False:"),
            (
                "fbgemm_gpu/test/sparse/common.py",
                "    if not open_source:\n        generate",
                "    if True:\n        generate",
            ),
        ),
        explained=(
            (
                "jagged.repeat_arange_test.RepeatArangeTest::test_aot_dispatch_dynamic__test_repeat_arange_correctness",
                AOT_STATE,
            ),
            (
                "jagged.jagged_to_padded_dense_test.JaggedToPaddedDenseTest"
                "::test_aot_dispatch_dynamic__test_jagged_to_padded_dense",
                "the same, listed as expected; ours does not fail",
            ),
        ),
    ),
]
