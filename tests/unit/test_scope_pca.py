"""Principal components: those of a batch PCA in float64, the same axes from step to step, and shards that merge."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from torch import Tensor

from trimtab.scope.components import Part, Whole, merge
from trimtab.scope.device.measure import MeasureState, measure
from trimtab.scope.device.pca import MOST_ELEMENTS, MOST_TOKENS, Components, spacing
from trimtab.scope.names import Tap
from trimtab.scope.subscription import Subscription

H = 48
CPU = torch.device("cpu")
STDS = (8.0, 5.0, 3.0, 1.0)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Products this small only wait for a second one."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class Source:
    """Hidden states with known axes: normal along each, some noise along all."""

    def __init__(self, seed: int = 0, noise: float = 0.3, features: int = H) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        random = torch.randn(features, features, generator=self.generator, dtype=torch.float64)
        self.axes = torch.linalg.qr(random).Q
        self.mean = torch.randn(features, generator=self.generator, dtype=torch.float64) * 4
        self.noise = noise

    def tokens(self, count: int, stds: tuple[float, ...] = STDS) -> Tensor:
        scale = torch.full((self.axes.shape[0],), self.noise, dtype=torch.float64)
        scale[: len(stds)] = torch.tensor(stds, dtype=torch.float64)
        random = torch.randn(count, self.axes.shape[0], generator=self.generator, dtype=torch.float64)
        return (random * scale) @ self.axes.T + self.mean


def batch(x: Tensor) -> tuple[Tensor, Tensor]:
    """Variances, descending, and axes."""
    values, vectors = torch.linalg.eigh(torch.cov(x.T, correction=0))
    return values.flip(0), vectors.flip(1)


def test_stationary_data_converge_to_the_batch_pca() -> None:
    source, components = Source(), Components(H, 3, CPU)
    blocks = [source.tokens(100) for _ in range(12)]
    for block in blocks:
        components.update(block.float())
    everything = torch.cat(blocks)
    variance, axes = batch(everything)
    overlap = (components.axes[:, :3].double().T @ axes[:, :3]).abs()
    assert torch.allclose(overlap, torch.eye(3, dtype=torch.float64), atol=2e-3)
    found = components.project(blocks[-1].float())
    torch.testing.assert_close(found.variance.double(), variance[:3], rtol=1e-4, atol=0)
    torch.testing.assert_close(found.total.double(), variance.sum().reshape(1), rtol=1e-4, atol=0)
    torch.testing.assert_close(components.mean.double(), everything.mean(0), rtol=0, atol=1e-4)
    signs = (components.axes[:, :3].double().T @ axes[:, :3]).diagonal().sign()
    expected = (blocks[-1] - everything.mean(0)) @ axes[:, :3] * signs
    torch.testing.assert_close(found.coordinates.double(), expected, rtol=0, atol=0.05)
    identity = components.axes.T @ components.axes
    torch.testing.assert_close(identity, torch.eye(components.followed), rtol=0, atol=1e-5)


def test_the_first_block_alone_gives_its_own_pca() -> None:
    block = Source(3).tokens(300)
    components = Components(H, 3, CPU)
    components.update(block.float())
    variance, axes = batch(block)
    torch.testing.assert_close(components.project(block.float()).variance.double(), variance[:3], rtol=1e-4, atol=0)
    overlap = (components.axes[:, :3].double().T @ axes[:, :3]).abs()
    assert torch.allclose(overlap, torch.eye(3, dtype=torch.float64), atol=2e-3)


def test_axes_follow_a_drift_without_flipping_or_swapping() -> None:
    source, components = Source(1), Components(H, 3, CPU, memory=5)
    random = torch.randn(H, H, generator=source.generator, dtype=torch.float64) / H**0.5
    turn, start = torch.linalg.matrix_exp(0.05 * (random - random.T)), source.axes
    for step in range(30):
        before = components.axes[:, :3]
        # The variances of the first two axes cross half way.
        components.update(source.tokens(200, (8 - 0.14 * step, 4 + 0.14 * step, 2.0, 0.5)).float())
        if step:
            moved = (before.T @ components.axes[:, :3]).diagonal()
            assert (moved > 0.9).all(), (step, moved)
        followed, source.axes = source.axes, turn @ source.axes
    # The axes have turned far, by much more than in a step, and the first is still the one that was first.
    assert (start[:, :2] * followed[:, :2]).sum(0).abs().max() < 0.5
    found = (components.axes[:, :2].double() * followed[:, :2]).sum(0).abs()
    assert (found > 0.9).all(), found
    variance = components.project(source.tokens(2).float()).variance
    assert variance[0] < variance[1]


def test_a_spare_axis_that_grows_is_shown() -> None:
    source = Source(2)
    components = Components(H, 2, CPU, memory=6)
    for _ in range(4):
        components.update(source.tokens(200, (6.0, 4.0, 1.0)).float())
    for _ in range(20):
        components.update(source.tokens(200, (6.0, 4.0, 5.0)).float())
    shown = (components.axes[:, :2].double().T @ source.axes[:, [0, 2]]).abs()
    assert torch.allclose(shown, torch.eye(2, dtype=torch.float64), atol=0.05)


def test_tokens_that_are_not_finite_are_passed_over() -> None:
    source = Source(4)
    block = source.tokens(200).float()
    clean, odd = Components(H, 3, CPU), Components(H, 3, CPU)
    clean.update(block)
    spoiled = torch.cat([block, torch.full((1, H), torch.nan), torch.full((1, H), torch.inf)])
    odd.update(spoiled)
    odd.update(torch.full((5, H), torch.nan))
    torch.testing.assert_close(odd.project(block).variance, clean.project(block).variance, rtol=1e-4, atol=0)
    torch.testing.assert_close(odd.mean, clean.mean)
    assert odd.count == 200
    coordinates = odd.project(spoiled).coordinates
    assert coordinates[:200].isfinite().all()
    assert not coordinates[200:].isfinite().any()


@pytest.mark.parametrize(("features", "shown"), [(1, 3), (2, 2), (5, 3), (7, 16)])
def test_few_features_and_no_variance(features: int, shown: int) -> None:
    components = Components(features, shown, CPU)
    for _ in range(3):
        components.update(torch.ones(4, features))
    found = components.project(torch.ones(4, features))
    assert found.coordinates.shape == (4, min(shown, features))
    assert found.coordinates.abs().max() < 1e-5
    assert found.variance.abs().max() < 1e-9


def test_the_job_draws_the_same_random_numbers() -> None:
    before = torch.get_rng_state()
    Components(H, 3, CPU).update(torch.ones(4, H))
    assert torch.equal(before, torch.get_rng_state())


def pca(x: Tensor, state: MeasureState, **parameters: object) -> dict[str, Tensor]:
    return measure(x, Subscription("**", "pca", parameters={"components": 3, **parameters}), state)


def state_of(index: int, count: int) -> MeasureState:
    state = MeasureState()
    state.labels = ("s", "b", "h")
    state.tap = Tap("layers.0.output", "activation", state.labels, shard=(("sp", index, count),) if count > 1 else ())
    return state


def test_what_is_sent_of_the_tokens() -> None:
    x = Source().tokens(12).float().reshape(6, 2, H)
    state = state_of(0, 1)
    found = pca(x, state)
    assert found["coordinates"].shape == (12, 3)
    assert found["index"].tolist() == list(range(12))
    assert "axes" not in found, "nothing to merge"
    state.tap = Tap("layers.0.attention.q", "activation", ("n", "s", "d"), shard=(("tp", 0, 2),), heads=(0, 2, 4))
    assert "axes" in pca(x, state), "the heads of other ranks are other tokens"
    state.tap = Tap("layers.0.mlp.hidden", "activation", state.labels, shard=(("tp", 0, 2),))
    assert "axes" not in pca(x, state), "other ranks have other features"
    chosen = pca(x, state, tokens=[4, 1])
    assert chosen["index"].tolist() == [4, 1]
    assert chosen["coordinates"].shape == (4, 3)
    again = state.components
    assert again is not None
    expected = again.project(x[[4, 1]].reshape(-1, H)).coordinates
    torch.testing.assert_close(chosen["coordinates"], expected)
    many = pca(torch.zeros(MOST_TOKENS + 5, 1, H), state)
    assert many["coordinates"].shape[0] == many["index"].shape[0] <= MOST_TOKENS
    assert many["index"][:2].tolist() == [0, 2]
    assert spacing(torch.zeros(1).expand(4000, MOST_ELEMENTS // 100)) == 40


def followed(source: Source, shards: int, steps: int) -> tuple[Whole, Components, Tensor]:
    """What shards of a sequence merge to, the unsharded components of the same tokens, and the last tokens."""
    states = [state_of(i, shards) for i in range(shards)]
    single = Components(H, 3, CPU)
    merged, x = None, torch.empty(0)
    for _ in range(steps):
        x = source.tokens(64 * shards).float().reshape(-1, 1, H)
        single.update(x[:, 0])
        arrays = [pca(part, state) for part, state in zip(x.chunk(shards), states, strict=True)]
        merged = merge([part_of(a) for a in arrays], 3)
        # Places and signs are those of the first part, which keeps them.
        assert ((merged.axes * arrays[0]["axes"][:, :3].numpy()).sum(0) > 0.9).all()
    assert merged is not None
    return merged, single, x[:, 0]


def part_of(arrays: dict[str, Tensor]) -> Part:
    a = {name: array.numpy() for name, array in arrays.items()}
    return Part(a["coordinates"], a["variance"], a["axes"], a["mean"], float(a["total"][0]), float(a["count"][0]))


def compare(merged: Whole, single: Components, tokens: Tensor) -> tuple[float, float, float]:
    """Largest error of variances, of the total (both relative), and of coordinates (rms, to that of the first)."""
    found = single.project(tokens)
    signs = np.sign((merged.axes * single.axes[:, :3].numpy()).sum(0))
    difference = merged.coordinates * signs - found.coordinates.numpy()
    rms = np.sqrt((difference**2).mean() / (found.coordinates.numpy()[:, 0] ** 2).mean())
    variance = np.abs(merged.variance / found.variance.numpy() - 1).max()
    return float(variance), abs(merged.total / float(found.total) - 1), float(rms)


def test_shards_with_no_more_directions_than_axes_merge_exactly() -> None:
    merged, single, tokens = followed(Source(noise=0.0), shards=4, steps=3)
    variance, total, coordinates = compare(merged, single, tokens)
    assert variance < 1e-4
    assert total < 1e-5
    assert coordinates < 1e-3


def test_shards_with_noise_along_all_directions_merge_to_a_stated_tolerance() -> None:
    merged, single, tokens = followed(Source(noise=0.3), shards=4, steps=5)
    variance, total, coordinates = compare(merged, single, tokens)
    assert variance < 5e-3
    assert total < 1e-5
    assert coordinates < 0.02
    assert merged.coordinates.shape == (256, 3)


def test_means_that_differ_between_shards_are_part_of_the_whole() -> None:
    source = Source(5, noise=0.0)
    blocks = [source.tokens(100), source.tokens(100) + 20 * source.axes[:, 5]]
    parts: list[Part] = []
    for block in blocks:
        components = Components(H, 3, CPU)
        components.update(block.float())
        found = components.project(block.float(), components.followed)
        a = [t.numpy() for t in (found.coordinates, found.variance, components.axes, components.mean)]
        parts.append(Part(*a, float(found.total), float(components.count)))
    merged = merge(parts, 3)
    variance, axes = batch(torch.cat(blocks))
    np.testing.assert_allclose(np.sort(merged.variance)[::-1], variance[:3], rtol=1e-4)
    assert merged.total == pytest.approx(float(variance.sum()), rel=1e-5)
    expected = np.abs(((torch.cat(blocks) - torch.cat(blocks).mean(0)) @ axes[:, 0]).numpy())
    place = int(merged.variance.argmax())
    np.testing.assert_allclose(np.abs(merged.coordinates[:, place]), expected, atol=2e-2)


def test_parts_that_do_not_belong_together_are_refused() -> None:
    def part(features: int, columns: int) -> Part:
        return Part(np.zeros((2, columns)), np.zeros(3), np.zeros((features, 3)), np.zeros(features), 0.0, 1.0)

    with pytest.raises(ValueError, match="nothing to merge"):
        merge([], 3)
    with pytest.raises(ValueError, match="do not belong to one tensor"):
        merge([part(4, 3), part(5, 3)], 3)
    with pytest.raises(ValueError, match="as many coordinates as axes"):
        merge([part(4, 2)], 3)
