"""Statistics on a GPU: the Triton kernels against float64, without a sync, as fast as they are to be."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from tests.unit.scope_tensors import DTYPES, check, tensors

from trimtab.scope import vector as v
from trimtab.scope.device import cuda, tiles
from trimtab.scope.device.layout import MOST_DIMENSIONS, collapse
from trimtab.scope.device.measure import MeasureState, measure, warm
from trimtab.scope.device.pca import Components
from trimtab.scope.device.statistics import Statistician, warm_up
from trimtab.scope.device.workspace import RESULTS, Workspace
from trimtab.scope.subscription import Subscription

CUDA = torch.device("cuda", 0)
pytestmark = pytest.mark.timeout(280)


@contextmanager
def no_sync() -> Iterator[None]:
    """Whatever waits for the device fails."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_kernels_agree_with_float64(dtype: torch.dtype) -> None:
    for name, x in tensors(dtype, 50_000):
        on_card = x.to(CUDA) if x.is_contiguous() else strided(x)
        if len(collapse(on_card).sizes) > MOST_DIMENSIONS:
            continue
        workspace = Workspace(CUDA)
        for histogram in (True, False, True):
            check(name, cuda.measure(on_card, histogram, workspace), x, 2e-6)
        assert not workspace.histogram.any()
        assert not workspace.done.any()


def strided(x: torch.Tensor) -> torch.Tensor:
    """The same on the GPU, with the same gaps."""
    storage = torch.as_strided(x, (x.untyped_storage().nbytes() // x.element_size(),), (1,), 0)
    return storage.to(CUDA).as_strided(x.size(), x.stride(), x.storage_offset())


def test_large_tensors_and_the_same_bits_each_time() -> None:
    x = torch.randn(1 << 26, device=CUDA, generator=torch.Generator(CUDA).manual_seed(1)).to(torch.bfloat16)
    x[12345] = torch.nan
    workspace = Workspace(CUDA)
    first = cuda.measure(x, True, workspace)
    check("large", first, x, 2e-6)
    for _ in range(5):
        again = cuda.measure(x, True, workspace)
        assert torch.equal(again.vector, first.vector)
        assert first.exponents is not None
        assert again.exponents is not None
        assert torch.equal(again.exponents, first.exponents)


def test_shards_merge_to_the_whole() -> None:
    x = (torch.randn(256, 4096, device=CUDA) + torch.linspace(0, 300, 256, device=CUDA)[:, None]).to(torch.bfloat16)
    parts = [cuda.measure(part, False, Workspace(CUDA)) for part in x.chunk(4, dim=1)]
    merged = v.derive(*v.merge([p.vector.cpu().numpy() for p in parts], [float(p.shift) for p in parts]))
    whole = v.derive(v.vector_of(x.double().cpu().numpy(), 150.0), 150.0)
    for name, value in whole.as_dict().items():
        assert merged.as_dict()[name] == pytest.approx(value, rel=1e-6, abs=1e-6), name


def test_until_compiled_operators_measure_and_then_the_kernel() -> None:
    x = torch.randn(3000, device=CUDA).to(torch.float16)
    cuda.readiness.cache_clear()
    assert not cuda.usable(x, True)
    check("before", Statistician().measure(x, True), x, 1e-13)
    warm_up(torch.device("cuda"), torch.float16, True)
    assert cuda.usable(x, True)
    check("after", Statistician().measure(x, True), x, 2e-6)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_launch_by_its_handle_is_the_same_as_tritons(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    for histogram in (False, True):
        warm_up(CUDA, dtype, histogram)
        launches = cuda.readiness(CUDA, dtype, histogram).launches
        assert set(launches) == {0, 1, cuda.GROUP}, "this release of Triton is not in launch.TESTED"
        for name, x in tensors(dtype, 70_000):
            on_card = x.to(CUDA) if x.is_contiguous() else strided(x)
            if not cuda.usable(on_card, histogram):
                continue
            found = cuda.measure(on_card, histogram)
            check(name, found, x, 2e-6)
            with monkeypatch.context() as patched:
                patched.setattr(cuda, "INT32", 0)
                expected = cuda.measure(on_card, histogram)
            assert torch.equal(found.vector, expected.vector), name
            assert torch.equal(found.shift, expected.shift), name


def test_results_lie_side_by_side_and_are_left_alone() -> None:
    warm_up(CUDA, torch.bfloat16, False)
    statistician = Statistician()
    x = torch.ones(1 << 12, device=CUDA, dtype=torch.bfloat16)
    found = [statistician.measure(x * number) for number in range(3 * RESULTS)]
    assert [float(one.vector[v.SUM] + one.shift * (1 << 12)) for one in found] == [
        float(number << 12) for number in range(3 * RESULTS)
    ]
    assert len({one.vector.untyped_storage().data_ptr() for one in found}) <= 4


@pytest.mark.parametrize("what", ["statistics", "histogram", "tiles", "rows", "tokens", "raw", "pca"])
def test_nothing_waits_for_the_device(what: str) -> None:
    subscription = Subscription.from_dict({"pattern": "**", "what": what})
    warm(subscription, CUDA, torch.bfloat16)
    x = torch.randn(128, 2, 64, device=CUDA).to(torch.bfloat16)
    state = MeasureState()
    state.labels = ("s", "b", "h")
    measure(x, subscription, state)  # constants are brought to the device at the first time
    with no_sync():
        found = measure(x, subscription, state)
    assert found
    assert all(array.is_cuda for array in found.values())


def test_tiles_and_components_are_those_of_the_cpu() -> None:
    x = torch.randn(300, 96, generator=torch.Generator().manual_seed(2))
    matrix = tiles.matrix(x)
    cut = tiles.extent(matrix.shape, (16, 16))
    for reduction in tiles.REDUCTIONS:
        torch.testing.assert_close(
            tiles.reduce_tiles(matrix.to(CUDA), cut, reduction).cpu(), tiles.reduce_tiles(matrix, cut, reduction)
        )
    here, there = Components(96, 3, torch.device("cpu")), Components(96, 3, CUDA)
    x[:, :3] *= torch.tensor([9.0, 6.0, 4.0])
    for _ in range(3):
        here.update(x)
        there.update(x.to(CUDA))
    found, expected = there.project(x.to(CUDA)), here.project(x)
    torch.testing.assert_close(found.variance.cpu(), expected.variance, rtol=1e-2, atol=0)
    signs = (there.axes[:, :3].cpu() * here.axes[:, :3]).sum(0).sign()
    torch.testing.assert_close(found.coordinates.cpu() * signs, expected.coordinates, rtol=0, atol=0.2)
