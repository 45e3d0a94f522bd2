"""Statistics on a CPU, by the compiled kernel and by operators of PyTorch: all types and layouts, against float64."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.unit.scope_tensors import DTYPES, check, tensors

from trimtab.scope import vector as v
from trimtab.scope.device import cuda, eager, layout, native
from trimtab.scope.device.eager import Measured, measure_eagerly
from trimtab.scope.device.statistics import Statistician, warm_up


@pytest.fixture(scope="module")
def kernel() -> native.Kernel:
    """Compiled, in the user's cache, as in a job."""
    warm_up(torch.device("cpu"), torch.float32, False)
    found = native.load()
    if found is None:
        pytest.skip("no compiler works here: the compiled statistics are not tested")
    return found


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_operators_agree_with_float64(dtype: torch.dtype) -> None:
    for name, x in tensors(dtype, 5_000):
        check(name, measure_eagerly(x, True), x, 1e-13)


def test_operators_for_a_device_agree_with_those_for_a_cpu() -> None:
    shift = torch.tensor(0.5, dtype=torch.float64)
    for name, x in tensors(torch.float32, 5_000):
        part = x.reshape(-1)
        here, there = eager._vector_on_cpu(part, shift), eager._vector(part, shift)
        torch.testing.assert_close(there, here, rtol=1e-9, atol=0, equal_nan=True, msg=name)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_compiled_kernel_agrees_with_float64(dtype: torch.dtype, kernel: native.Kernel) -> None:
    for name, x in tensors(dtype, 5_000):
        found = kernel.measure(x, True)
        assert (found is None) == (name == "five dimensions"), name
        if found is not None:
            check(name, found, x, 1e-13)


def test_the_shift_is_the_mean_where_that_stands_clear_of_0(kernel: native.Kernel) -> None:
    x = torch.randn(20_000, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    far = (x * 0.1 + 30_000).float()
    expected = v.derive(v.vector_of(far.double().numpy(), 30_000.0), 30_000.0)
    for found, near in (
        (measure_eagerly(far, False), measure_eagerly(x.float(), False)),
        (kernel.measure(far, False), kernel.measure(x.float(), False)),
    ):
        assert found is not None
        assert near is not None
        assert float(near.shift) == 0.0
        assert float(found.shift) == pytest.approx(30_000, abs=0.05)
        assert v.derive(found.vector.numpy(), float(found.shift)).kurtosis == pytest.approx(expected.kurtosis, rel=1e-9)


@pytest.mark.parametrize("dtype", [torch.float64, torch.int32, torch.bool, torch.uint8], ids=str)
def test_other_types_are_measured_too(dtype: torch.dtype) -> None:
    x = torch.arange(-3, 3000).remainder(7).to(dtype)
    found = Statistician().measure(x, histogram=True)
    check("other", found, x, 1e-13)
    assert found.shift.dtype == found.vector.dtype == torch.float64
    empty = Statistician().measure(x[:0], histogram=True)
    assert np.array_equal(empty.vector.numpy(), v.empty())
    assert empty.exponents is not None
    assert not empty.exponents.any()


def test_what_is_beyond_float32_is_in_the_outermost_bins() -> None:
    x = torch.tensor([1e300, -1e300, torch.inf, 1e-300], dtype=torch.float64)
    found = Statistician().measure(x, histogram=True)
    assert found.exponents is not None
    assert {int(b): int(found.exponents[b]) for b in found.exponents.nonzero()} == {0: 1, 254: 2, 255: 1}


def test_threads_change_no_bit(kernel: native.Kernel) -> None:
    x = torch.randn(600_000, generator=torch.Generator().manual_seed(2)).to(torch.bfloat16)
    before = torch.get_num_threads()
    found: list[Measured] = []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            measured = kernel.measure(x, True)
            assert measured is not None
            found.append(measured)
    finally:
        torch.set_num_threads(before)
    for other in found[1:]:
        assert torch.equal(other.vector, found[0].vector)
        assert other.exponents is not None
        assert torch.equal(other.exponents, found[0].exponents)
    check("threads", found[0], x, 1e-13)


def test_shards_merge_to_the_whole(kernel: native.Kernel) -> None:
    generator = torch.Generator().manual_seed(4)
    x = (torch.randn(64, 1000, generator=generator) + torch.linspace(0, 300, 64)[:, None]).to(torch.bfloat16)
    whole = v.derive(v.vector_of(x.double().numpy(), 150.0), 150.0)
    parts = [kernel.measure(part, True) for part in x.chunk(4)]
    assert all(part is not None for part in parts)
    done = [part for part in parts if part is not None]
    assert len({float(part.shift) for part in done}) > 1, "the shards have shifts of their own"
    merged = v.derive(*v.merge([p.vector.numpy() for p in done], [float(p.shift) for p in done]))
    for name, value in whole.as_dict().items():
        assert merged.as_dict()[name] == pytest.approx(value, rel=1e-9), name
    histogram = v.merge_exponents([p.exponents.numpy() for p in done if p.exponents is not None])
    assert np.array_equal(histogram, v.exponents_of(x.double().numpy()))


def test_results_are_memory_of_their_own(kernel: native.Kernel) -> None:
    statistician = Statistician()
    first = statistician.measure(torch.ones(10), histogram=True)
    kept = first.vector.clone()
    second = statistician.measure(torch.zeros(10), histogram=True)
    assert torch.equal(first.vector, kept)
    assert first.vector.data_ptr() != second.vector.data_ptr()


def test_without_a_compiler_or_a_home_operators_do_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("CXX", "/bin/false")
    assert not native.build()
    assert native.load() is None
    assert not list(tmp_path.rglob("*.so"))
    assert not list(tmp_path.rglob("*.building"))
    check("eager", Statistician().measure(torch.arange(9.0), histogram=True), torch.arange(9.0), 1e-13)
    path = native._path()
    assert path is not None
    path.write_bytes(b"no library")
    path.chmod(0o700)
    assert native.load() is None


def test_what_others_may_write_is_not_loaded(
    kernel: native.Kernel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    built = native._path()
    assert built is not None
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    path = native._path()
    assert path is not None
    path.parent.mkdir(mode=0o700)
    path.write_bytes(built.read_bytes())
    path.chmod(0o777)
    assert native.load() is None
    path.chmod(0o700)
    assert native.load() is not None


@st.composite
def views(draw: st.DrawFn) -> torch.Tensor:
    """Any view of a small tensor: sliced, permuted, expanded."""
    shape = draw(st.lists(st.integers(1, 4), min_size=0, max_size=5))
    x = torch.arange(int(np.prod(shape)), dtype=torch.float32).reshape(shape)
    x = x.permute(draw(st.permutations(range(x.dim()))))
    for dim in range(x.dim()):
        start, step = draw(st.integers(0, x.shape[dim] - 1)), draw(st.integers(1, 2))
        x = x[(slice(None),) * dim + (slice(start, None, step),)]
    return x[:, None].expand(-1, 3, *(-1,) * (x.dim() - 1)) if x.dim() and draw(st.booleans()) else x


@settings(max_examples=60, deadline=None)
@given(x=views(), elements=st.integers(1, 40))
def test_views_are_taken_apart_without_losing_an_element(x: torch.Tensor, elements: int) -> None:
    expected = sorted(x.reshape(-1).tolist())
    sizes, strides = layout.collapse(x)
    base = x.storage_offset()
    offsets = [
        base + sum(i * s for i, s in zip(place, strides, strict=True))
        for place in itertools.product(*(range(size) for size in sizes))
    ]
    storage = torch.as_strided(x, (x.untyped_storage().nbytes() // 4,), (1,), 0)
    assert sorted(storage[offsets].tolist()) == expected
    pieces = layout.pieces(x, elements)
    assert sorted(value for piece in pieces for value in piece.tolist()) == expected
    assert all(piece.dim() == 1 for piece in pieces)
    flat = layout.flat(x)
    if x.is_contiguous():
        assert flat is not None
    if flat is not None:
        assert flat.untyped_storage().data_ptr() == x.untyped_storage().data_ptr()


def test_the_kernel_for_gpus_is_used_where_it_is_compiled_and_fits() -> None:
    cuda.readiness.cache_clear()
    x = torch.zeros(64)
    try:
        assert not cuda.usable(x, False), "not compiled yet: training must not wait for that"
        cuda.readiness(x.device, x.dtype, False).compiled = True
        assert cuda.usable(x, False)
        assert not cuda.usable(x, True)
        assert not cuda.usable(x[1:], False), "begins where a kernel of its own would be needed"
        assert not cuda.usable(x[:0], False)
        assert not cuda.usable(x.int(), False)
        assert not cuda.usable(torch.zeros(6, 6, 6, 6, 6)[:5, :5, :5, :5, :5], False)
    finally:
        cuda.readiness.cache_clear()


@pytest.mark.parametrize("elements", [1, 12_288, 12_289, 1 << 22, 1 << 26, 3 << 30])
@pytest.mark.parametrize("histogram", [False, True])
@pytest.mark.parametrize("group", [0, 1, cuda.GROUP])
def test_programs_share_all_elements(elements: int, histogram: bool, group: int) -> None:
    programs, repeats = cuda.programs_for(elements, histogram, group)
    block, tiles = cuda.run_of(histogram, group)
    share = repeats * block * tiles
    assert 1 <= programs <= cuda.MOST_PROGRAMS
    assert (programs - 1) * share < elements <= programs * share
    assert tiles % 4 == 0, "so many are loaded together"
    assert not histogram or tiles < 16, "they are counted in four bits"
    assert tiles * max(cuda.FOLD, cuda.PACKED_FOLD) <= 2048, "zeros are counted in float16"


def test_groups_of_elements_lie_where_the_strides_say() -> None:
    """The kernel's arithmetic of places, in numpy."""
    groups = set[int]()
    for name, x in tensors(torch.float32, 1_000):
        flat = layout.collapse(x)
        if len(flat.sizes) > cuda.MOST_DIMENSIONS:
            continue
        group, sizes, strides = cuda.grouped(flat)
        groups.add(group)
        index = np.arange(x.numel())
        if group:
            rest = index // group
            place = np.zeros_like(index)
            for size, stride in zip(reversed(sizes), reversed(strides), strict=True):
                place += rest % size * stride
                rest //= size
            index = place * group + index % group
        grid = np.indices(flat.sizes).reshape(len(flat.sizes), -1)
        assert index.tolist() == (np.array(flat.strides) @ grid).tolist(), name
    assert groups == {0, 1, cuda.GROUP}
