"""What measuring a tensor costs: scope's statistics against one reduction per statistic, and against a copy.

    python benchmarks/scope_statistics.py                        # CPU: 4.2 M elements
    python benchmarks/scope_statistics.py --inductor             # also the same sums fused by torch.compile
    python benchmarks/scope_statistics.py --cpu-time             # the same on a busy machine, with OMP_NUM_THREADS=1
    python benchmarks/scope_statistics.py --gpu                  # one GPU: share of the bandwidth of a copy

All ways of one table are timed in turn, round by round; the figure is the median over rounds. On a CPU the other ways
are PyTorch's operators: in pieces that stay in the cache (what scope does without a compiler), over the whole tensor
one statistic after the other (what one writes first), and the same with torch.histc. On a GPU the bandwidth is what is
read, over the time by CUDA events of a batch of launches, and a copy's is what is read and written. Prints Markdown
tables.
"""

from __future__ import annotations

import argparse
import platform
import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor

from trimtab.scope.device import cuda, native, tiles
from trimtab.scope.device.eager import measure_eagerly
from trimtab.scope.device.pca import Components
from trimtab.scope.device.statistics import warm_up
from trimtab.scope.device.workspace import Workspace

Way = Callable[[], object]
FIELDS: dict[str, Callable[[Tensor], Tensor]] = {
    "nan": lambda x: x.isnan().sum(),
    "inf": lambda x: x.isinf().sum(),
    "zeros": lambda x: (x == 0).sum(),
    "sum": lambda x: x.float().sum(),
    "sum_abs": lambda x: x.float().abs().sum(),
    "sum2": lambda x: x.float().square().sum(),
    "sum3": lambda x: x.float().pow(3).sum(),
    "sum4": lambda x: x.float().pow(4).sum(),
    "min": lambda x: x.amin(),
    "max": lambda x: x.amax(),
}
"""One reduction for each; not careful about values that are not finite."""


def parse_arguments() -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--gpu", action="store_true")
    parser.add_argument("--inductor", action="store_true")
    parser.add_argument("--cpu-time", action="store_true", help="seconds of CPU, all threads together")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--elements", type=int, nargs="*", help="default: 4.2 M; on a GPU also 67 M and 268 M")
    parser.add_argument(
        "--dtypes", nargs="*", default=["float32", "bfloat16", "float16", "float8_e4m3fn", "float8_e5m2"]
    )
    return parser.parse_args()


def one_by_one(x: Tensor) -> list[Tensor]:
    """A reduction for each field, over the whole tensor."""
    return [reduce(x) for reduce in FIELDS.values()]


def exponents_of(x: Tensor) -> Tensor:
    """The exponent histogram by PyTorch's operators."""
    return torch.bincount((x.float().view(torch.int32) >> 23) & 255, minlength=256)


def fused_sums(x: Tensor) -> list[Tensor]:
    """What torch.compile can fuse into one pass: the vector, without a shift or a histogram."""
    y = x.float()
    finite = y.isfinite()
    z = torch.where(finite, y, 0.0)
    square = z * z
    counts = [y.isnan().sum(), y.isinf().sum(), (y == 0).sum()]
    sums = [z.sum(), z.abs().sum(), square.sum(), (square * z).sum(), (square * square).sum()]
    return [*counts, *sums, torch.where(finite, y, torch.inf).amin(), torch.where(finite, y, -torch.inf).amax()]


def seconds(way: Way) -> float:
    """Of one call on a CPU."""
    begin = time.perf_counter()
    way()
    return time.perf_counter() - begin


def cpu_seconds(way: Way) -> float:
    """Of CPU, all threads together, that one call took."""
    begin = time.process_time()
    way()
    return time.process_time() - begin


def gpu_seconds(way: Way, launches: int = 20) -> float:
    """Of one of a batch of calls on a GPU, between two events."""
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    for _ in range(launches):
        way()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1e3 / launches


def in_turn(ways: dict[str, Way], rounds: int, timer: Callable[[Way], float]) -> dict[str, list[float]]:
    """Seconds of each way in each round; the order moves on from round to round."""
    for way in ways.values():
        way()
        way()
    names = list(ways)
    found: dict[str, list[float]] = {name: [] for name in names}
    for turn in range(rounds):
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            found[name].append(timer(ways[name]))
    return found


def sample(elements: int, dtype: torch.dtype, device: str) -> Tensor:
    """Normal values, some of them zero."""
    x = torch.randn(elements, device=device)
    return torch.where(x.abs() < 0.05, 0.0, x).to(dtype)


def cpu_ways(x: Tensor, kernel: native.Kernel | None, fused: Callable[[Tensor], list[Tensor]] | None) -> dict[str, Way]:
    """All ways to the statistics of ``x``; those ending in ``+`` count exponents, too."""
    ways: dict[str, Way] = {}
    if kernel is not None:
        ways |= {"compiled": lambda: kernel.measure(x, False), "compiled +": lambda: kernel.measure(x, True)}
    ways["operators, in pieces"] = lambda: measure_eagerly(x, False)
    ways["operators, in pieces +"] = lambda: measure_eagerly(x, True)
    if x.element_size() > 1:  # float8 has no such operators
        ways["one reduction each"] = lambda: one_by_one(x)
        ways["one reduction each +"] = lambda: (one_by_one(x), exponents_of(x))
        ways["one reduction each, histc +"] = lambda: (one_by_one(x), x.float().histc(256))
        if fused is not None:
            ways["torch.compile"] = lambda: fused(x)
            ways["torch.compile +"] = lambda: (fused(x), exponents_of(x))
    return ways


def cpu_table(elements: int, names: list[str], rounds: int, inductor: bool, timer: Callable[[Way], float]) -> None:
    """Statistics on a CPU."""
    warm_up(torch.device("cpu"), torch.float32, True)
    kernel = native.load()
    fused = torch.compile(fused_sums, dynamic=False) if inductor else None
    print(f"\n{elements / 1e6:.1f} M elements, median ms (fastest) of {rounds} rounds\n")
    print("| dtype | way | vector | vector and histogram |\n|---|---|---|---|")
    for name in names:
        found = in_turn(cpu_ways(sample(elements, getattr(torch, name), "cpu"), kernel, fused), rounds, timer)
        texts = {way: f"{statistics.median(each) * 1e3:.2f} ({min(each) * 1e3:.2f})" for way, each in found.items()}
        for way in dict.fromkeys(way.removesuffix(" +") for way in texts):
            print(f"| {name} | {way} | {texts.get(way, '-')} | {texts.get(f'{way} +', '-')} |")


def other_table(rounds: int, device: str, timer: Callable[[Way], float]) -> None:
    """Tiles and principal components."""
    x = torch.randn(4096, 4096, device=device).to(torch.bfloat16)
    matrix = tiles.matrix(x)
    cut = tiles.extent(matrix.shape, (64, 64))
    components = Components(4096, 3, x.device)
    components.update(x[:2048])
    ways: dict[str, Way] = {
        f"tiles, 64 x 64, {reduction}": lambda reduction=reduction: tiles.tile(matrix, cut, reduction)
        for reduction in tiles.REDUCTIONS
    }
    ways["PCA, 2,048 tokens, 3 axes"] = lambda: (components.update(x[:2048]), components.project(x[:2048]))
    found = in_turn(ways, rounds, timer)
    print("\n4,096 x 4,096 bfloat16\n\n| what | median ms | fastest |\n|---|---|---|")
    for name, times in found.items():
        print(f"| {name} | {statistics.median(times) * 1e3:.2f} | {min(times) * 1e3:.2f} |")


def gpu_ways(x: Tensor) -> dict[str, Way]:
    """A copy, the kernel without and with a histogram, and a reduction for each statistic."""
    workspace, other = Workspace(x.device), torch.empty_like(x)
    for histogram in (False, True):
        warm_up(x.device, x.dtype, histogram)
    ways: dict[str, Way] = {
        "copy": lambda: other.copy_(x),
        "vector": lambda: cuda.measure(x, False, workspace),
        "histogram": lambda: cuda.measure(x, True, workspace),
    }
    return ways if x.element_size() == 1 else ways | {"each": lambda: one_by_one(x)}


def gpu_table(elements: int, names: list[str], rounds: int) -> None:
    """Statistics on a GPU, and what a copy takes."""
    print(f"\n{elements / 1e6:.1f} M elements, median of {rounds} rounds\n")
    print("| dtype | copy GB/s | vector us | GB/s | of the copy | with histogram us | GB/s | of the copy | each us |")
    print("|---|---|---|---|---|---|---|---|---|")
    for name in names:
        x = sample(elements, getattr(torch, name), "cuda")
        times = in_turn(gpu_ways(x), rounds, gpu_seconds)
        found = {way: statistics.median(each) for way, each in times.items()}
        size = elements * x.element_size() / 1e9
        copy = 2 * size / found["copy"]
        cells = [name, f"{copy:.0f}"]
        for way in ("vector", "histogram"):
            rate = size / found[way]
            cells += [f"{found[way] * 1e6:.1f}", f"{rate:.0f}", f"{rate / copy:.0%}"]
        cells.append(f"{found['each'] * 1e6:.1f}" if "each" in found else "-")
        print(f"| {' | '.join(cells)} |")


def main() -> None:
    """Say where, then measure."""
    arguments = parse_arguments()
    torch.manual_seed(0)
    timer = gpu_seconds if arguments.gpu else cpu_seconds if arguments.cpu_time else seconds
    where = torch.cuda.get_device_name() if arguments.gpu else f"{torch.get_num_threads()} threads, no GPU"
    print(f"{where}; Python {platform.python_version()}, torch {torch.__version__}")
    for elements in arguments.elements or ([1 << 22, 1 << 26, 1 << 28] if arguments.gpu else [1 << 22]):
        if arguments.gpu:
            gpu_table(elements, arguments.dtypes, arguments.rounds)
        else:
            cpu_table(elements, arguments.dtypes, arguments.rounds, arguments.inductor, timer)
    other_table(arguments.rounds, "cuda" if arguments.gpu else "cpu", timer)


if __name__ == "__main__":
    main()
