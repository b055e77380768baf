"""A process group of the device: two processes do each collective and train, as they do on the CPU."""

from __future__ import annotations

import functools
import gc
import importlib
import os
import textwrap
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers.covers import every
from helpers.isolated import isolated
from helpers.npy import ones
from helpers.processes import end_in_time, outcomes, run_spawned
from torch import nn
from torch.testing import assert_close

from customops.backend import BackendError, get_backend, register_backend
from customops.errors import CustomOpsError
from customops.testing import run_isolated

pytestmark = [
    pytest.mark.process,
    pytest.mark.skipif(not dist.is_available(), reason="torch was built without distributed"),
]

#: Each through gloo, through gloo with copies of the memory, and through collectives of the user.
COLLECTIVES = """
broadcast all_reduce all_reduce_bits all_reduce_dtypes all_reduce_of_views reduce all_gather all_gather_into_tensor
gather gather_single scatter reduce_scatter reduce_scatter_tensor all_to_all all_to_all_single barrier send_and_recv
batch_isend_irecv coalesced asynchronous objects subgroups functional differentiable compiled
""".split()
TRAINING = """
ddp ddp_with_options ddp_with_a_hook ddp_compiled ddp_with_unused_parameters ddp_with_a_static_graph
ddp_with_unused_parameters_compiled zero fsdp fsdp_compiled fsdp_from_meta fsdp_mixed_precision
fsdp_on_a_mesh fsdp_on_the_host tensor_parallel dtensor checkpoint pipeline
""".split()
GLOO = [
    *(f"gloo: {name}" for name in (*COLLECTIVES, *TRAINING)),
    *("gloo: random_numbers_of_shards", "gloo: errors_of_collectives", "gloo: memory_of_fsdp"),
]
CASES = [
    *GLOO,
    *every(4, [f"copies: {name}" for name in COLLECTIVES]),
    *(f"store: {name}" for name in COLLECTIVES),
    *every(4, [f"store: {name}" for name in TRAINING]),
]


def results_of(request: pytest.FixtureRequest, folder: Path, *, own_memory: bool) -> list[dict[str, str]]:
    """Run the cases that this session chose, in two processes."""
    program: Any = importlib.import_module("helpers.device_group")
    test = test_with_memory_of_its_own if own_memory else test_as_on_the_cpu
    items = [item for item in request.session.items if getattr(item, "function", None) is test]
    chosen = [item.callspec.params["case"] for item in items]
    target, patience = functools.partial(program.run, own_memory=own_memory), program.PATIENCE + 20
    run_spawned(target, (str(folder), chosen), folder / "caches", patience, ranks=2)
    return [outcomes(folder / f"{rank}.json", chosen) for rank in range(2)]


@pytest.fixture(scope="module")
def results(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, str]]:
    return results_of(request, tmp_path_factory.mktemp("device_group"), own_memory=False)


@pytest.fixture(scope="module")
def own_results(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, str]]:
    return results_of(request, tmp_path_factory.mktemp("device_group"), own_memory=True)


@pytest.mark.parametrize("case", every(4, GLOO))
def test_with_memory_of_its_own(own_results: list[dict[str, str]], case: str) -> None:
    """Of pages that the host cannot read, with a thread that does the work of each stream."""
    for rank, found in enumerate(own_results):
        assert not found[case], f"process {rank}:\n{found[case]}"


@pytest.mark.parametrize("case", CASES)
def test_as_on_the_cpu(results: list[dict[str, str]], case: str) -> None:
    for rank, found in enumerate(results):
        assert not found[case], f"process {rank}:\n{found[case]}"


def test_every_case_is_here() -> None:
    program: Any = importlib.import_module("helpers.device_group")
    assert {f"gloo: {name}" for name in (program.COLLECTIVES | program.TRAINING | program.OTHERS)} == {*GLOO}


def test_every_method_of_the_user_is_called(results: list[dict[str, str]]) -> None:
    if "store: calls" not in results[0]:
        pytest.skip("no case through collectives of the user was chosen")
    methods = "all_gather all_reduce all_to_all barrier broadcast gather recv reduce reduce_scatter scatter send"
    assert [found["store: calls"] for found in results] == [methods, methods]


# One process ----------------------------------------------------------------------------------------------------------


def with_device() -> None:
    register_backend("npy", device_count=2, collectives=lambda group: OWN.pop() if OWN else None)


#: The collectives of the next group.
OWN: list[object] = []
alone = isolated(with_device)


def start(backend: str | None = None, **options: Any) -> dist.ProcessGroup:
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, **options)
    return dist.group.WORLD


@alone
def test_the_device_has_it_by_default() -> None:
    assert dist.Backend.default_device_backend_map["npy"] == "npy"
    assert dist.Backend.default_device_backend_map["cpu"] == "gloo"
    assert torch.accelerator.current_accelerator() == torch.device("npy")
    for backend in (None, "npy", "cpu:gloo,npy:npy", "npy:npy,cpu:gloo"):
        group: Any = start(backend)
        assert type(group).__name__ == "DeviceGroup"
        assert {device.type for device in group._device_types} == {"cpu", "npy"}
        for device in ("cpu", "npy:1"):
            x = torch.ones(2, device=device)
            dist.all_reduce(x)
            dist.barrier()
            assert x.tolist() == [1, 1]
            assert x.device == torch.device(device)
        assert group.get_group_store().num_keys() > 0
        dist.destroy_process_group()


@alone
def test_a_device_is_bound() -> None:
    start(device_id=torch.device("npy:0"))
    x = ones(2)
    dist.all_reduce(x)
    assert x.tolist() == [1, 1]


@alone
def test_a_mesh_starts_it() -> None:
    start()
    mesh = dist.device_mesh.init_device_mesh("npy", (1, 1), mesh_dim_names=("data", "tensor"))
    x = ones(2)
    for group in (mesh.get_group("data"), mesh["tensor"].get_group()):
        assert type(group).__name__ == "DeviceGroup"
        dist.all_reduce(x, group=group)
    assert mesh.device_type == "npy"
    assert x.tolist() == [1, 1]


@alone
def test_it_is_found_without_a_group_and_with_one_of_others() -> None:
    with pytest.raises(ValueError, match="process group has not been initialized"):
        dist.all_reduce(ones(2))
    start("gloo")
    with pytest.raises(RuntimeError, match="No backend type associated with device type npy"):
        dist.all_reduce(ones(2))


@alone
def test_tensors_of_other_devices() -> None:
    start()
    with pytest.raises(ValueError, match="one collective has tensors of one device") as error:
        dist.all_reduce(torch.ones(2, device="meta"))
    assert error.value.got == "meta"
    assert error.value.fix == "x.to('npy')"
    with pytest.raises(ValueError, match="one collective has tensors of one device") as error:
        dist.all_gather([torch.ones(2)], ones(2))
    assert error.value.got == "cpu, npy"


@alone
def test_ops_and_dtypes_of_gloo() -> None:
    start()
    with pytest.raises(ValueError, match=r"does not support RedOpType\.MAX on complex tensors"):
        dist.all_reduce(ones(2, dtype=torch.complex64), dist.ReduceOp.MAX)
    with pytest.raises(RuntimeError, match="gloo refuses it") as error:
        dist.all_gather_into_tensor(ones(2), ones(2, dtype=torch.float64))
    assert "invalid tensor type" in error.value.got
    assert "a method all_gather of what collectives= returns" in error.value.fix


@alone
def test_what_a_method_of_the_user_returns() -> None:
    class Own:
        def all_reduce(self, x: Any, op: Any) -> Any:
            return self.answer

        answer: Any = None

    own = Own()
    OWN.append(own)
    group: Any = start()
    x = ones(2)
    for answer in (None, NotImplemented):
        own.answer = answer
        work = dist.all_reduce(x, async_op=True)
        work.wait()
        assert work.get_future().value()[0] is x
    own.answer = torch.futures.Future()
    work = dist.all_reduce(x, async_op=True)
    assert not work.is_completed()
    own.answer.set_result(None)
    work.wait()
    assert work.is_completed()
    own.answer = torch.futures.Future()
    own.answer.set_exception(ArithmeticError("of the user"))
    with pytest.raises(ArithmeticError, match="of the user"):
        dist.all_reduce(x)
    with pytest.raises(RuntimeError, match="of the user"):
        dist.all_reduce(x, async_op=True).get_future().wait()
    own.answer = 5
    with pytest.raises(CustomOpsError, match="all_reduce returned something else than a collective does") as error:
        dist.all_reduce(x)
    assert error.value.got == "5"
    own.answer = None
    with pytest.raises(CustomOpsError, match="in a short form") as error:
        group.allreduce(x)
    assert error.value.fix == "torch.distributed.all_reduce(...), which takes a group"


@alone
def test_a_factor_is_handed_over() -> None:
    found = []

    class Own:
        def all_reduce(self, x: Any, op: Any) -> None:
            found.append(op)

    OWN.append(Own())
    start()
    dist.all_reduce(ones(1), dist.ReduceOp.AVG)
    dist.all_reduce(ones(1), dist._make_nccl_premul_sum(0.5))
    assert found[0] is dist.ReduceOp.AVG or found[0] == dist.ReduceOp.AVG
    assert found[1].__getstate__()[1] == 0.5
    assert found[1] not in (dist.ReduceOp.SUM, dist.ReduceOp.AVG)


@alone
def test_a_storage_is_emptied_and_filled_again() -> None:
    x = ones(4)
    view = x[1:]
    before = torch.npy.memory_allocated()
    for size in (0, 8, 16, 32):
        assert x.untyped_storage().resize_(size).nbytes() == size
        gc.collect()
        torch.npy.synchronize()
        assert torch.npy.memory_allocated() == before - 16 + size
        for each in (x, view):
            storage = each.untyped_storage()
            assert (storage.size(), len(storage), each.storage().size()) == (size, size, size // 4)
            if not size:
                for use in (each.tolist, each.clone, lambda each=each: each.fill_(1), lambda each=each: each + each):
                    with pytest.raises(BackendError, match=r"storage of this tensor was emptied .* by resize_"):
                        use()
        if size == 8:
            assert x[:2].fill_(1).tolist() == [1, 1]
        if size == 16:
            assert view.fill_(2).tolist() == [2, 2, 2]
    assert (x + x).tolist() == [2, 4, 4, 4]
    assert torch.UntypedStorage(3).resize_(2).nbytes() == 2


@alone
def test_memory_of_the_host_outlives_the_storage_that_shared_it() -> None:
    host = torch.ones(2)
    x = get_backend().wrap(host)
    x.untyped_storage().resize_(0)
    x.untyped_storage().resize_(8)
    assert x.fill_(5).tolist() == [5, 5]
    assert host.tolist() == [1, 1]


def test_unused_parameters_need_pinned_memory() -> None:
    code = """
    import torch
    import torch.distributed as dist
    from customops.backend import register_backend

    register_backend("npy", pin_memory=False)
    dist.init_process_group(store=dist.HashStore(), rank=0, world_size=1)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2).npy(), static_graph=True)
    try:
        model(torch.ones(1, 2, device="npy")).sum().backward()
    except NotImplementedError as error:
        result = error.problem, error.fix
    """
    problem, fix = run_isolated(textwrap.dedent(code)).value
    assert "takes pinned memory" in problem
    assert fix == "register_backend(..., pin_memory=True)"


def test_models_of_the_cpu_need_nothing_of_the_device() -> None:
    code = """
    import torch
    import torch.distributed as dist
    from customops.backend import register_backend

    register_backend("npy", pin_memory=False)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2), static_graph=True)
    for x, net in ((torch.ones(1, 2), model), (torch.ones(1, 2, device="npy"), torch.nn.Linear(2, 2).npy())):
        net(x).sum().backward()
    result = model.module.weight.grad.tolist()
    """
    assert run_isolated(textwrap.dedent(code)).value == [[1, 1], [1, 1]]


def test_names_of_other_backends() -> None:
    with pytest.raises(ValueError, match="the name is taken") as error:
        register_backend("gloo")
    assert error.value.got == "torch.distributed.Backend.GLOO"
    with pytest.raises(ValueError, match="collectives is not callable"):
        register_backend("npy", collectives=object())  # type: ignore[arg-type]


@alone
def test_gradients_of_one_process() -> None:
    start()
    model = nn.Linear(2, 2)
    parallel = nn.parallel.DistributedDataParallel(nn.Linear(2, 2).to("npy"))
    parallel.module.load_state_dict(model.state_dict())
    for each, x in ((model, torch.ones(3, 2)), (parallel, ones(3, 2))):
        each(x).square().sum().backward()
    assert_close(parallel.module.weight.grad.cpu(), model.weight.grad)


def waits_for_ever(rank: int, folder: str) -> None:
    end_in_time(Path(folder) / f"{rank}.json", 0.5)
    if not rank:
        os._exit(0)
    threading.Event().wait()


def test_a_process_that_hangs_is_named(tmp_path: Path) -> None:
    run_spawned(waits_for_ever, (str(tmp_path),), tmp_path / "caches", 60, ranks=2)
    first, second = (outcomes(tmp_path / f"{rank}.json", ["case"])["case"] for rank in range(2))
    assert first == "process 0 did not come to it. It has ended."
    assert second.startswith("process 1 did not come to it. Timeout")
    assert "in waits_for_ever" in second
