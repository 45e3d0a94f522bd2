"""Cuts of tensors for another tensor parallel degree: which one it is, that they are sent once, and what is refused."""

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from test_fbd_split import places
from torch import nn

from trimtab.fbd.execute import intact
from trimtab.fbd.execute.hooks import Hooks
from trimtab.fbd.execute.intact import changed_tensors, changed_weights, marks, weight_marks
from trimtab.fbd.ranks import Role, VirtualRank
from trimtab.fbd.reshard.cuts import Cut, Degrees, candidates
from trimtab.fbd.reshard.evidence import Seen, decide, tolerance
from trimtab.fbd.reshard.matching import paired
from trimtab.fbd.reshard.packing import Packing
from trimtab.fbd.reshard.plan import Cutter, Plan
from trimtab.fbd.reshard.rehearsal import KeepAll, plan_for, rehearse
from trimtab.fbd.reshard.weights import Divided, Shards, put_shard, weight_divisions
from trimtab.fbd.split.export import laid_out
from trimtab.fbd.split.places import Places
from trimtab.fbd.split.skeleton import view_of
from trimtab.fbd.split.within import Within, ship_within

pytestmark = pytest.mark.timeout(60)
HALVES = Degrees(1, 2, 1)


# cuts

sizes = st.integers(1, 4)


@given(st.lists(sizes, min_size=1, max_size=4), sizes, sizes, st.integers(2, 4), st.data())
def test_parts_are_the_whole(shape, blocks, length, pieces, data):
    dim = data.draw(st.integers(0, len(shape) - 1))
    shape[dim] = blocks * pieces * length
    whole = torch.arange(torch.Size(shape).numel()).view(shape)
    cuts = [Cut(dim, blocks, pieces, one) for one in range(pieces)]
    again = torch.zeros_like(whole)
    for cut in cuts:
        part = cut.of(whole).reshape(cut.shape(tuple(shape)))
        assert cut.fits(tuple(shape), tuple(part.shape))
        assert torch.equal(part, whole.index_select(dim, cut.numbers(shape[dim])))
        assert cut in list(candidates(tuple(shape), tuple(part.shape), Degrees(1, pieces, cut.number)))
        cut.put(again, part)
    assert torch.equal(again, whole)


def test_a_part_is_of_one_forward_rank_or_of_all():
    """The second: backwards alone divide sequences."""
    assert Degrees(2, 4, 3).ways() == ((2, 1), (4, 3))
    assert Degrees(1, 4, 3).ways() == ((4, 3),)
    assert [one.pieces for one in candidates((8, 3), (2, 3), Degrees(2, 4, 3)) if one] == [4, 4]


@pytest.mark.parametrize("part", [(4, 3), (8, 6), (8,), (16, 3), (3, 3)])
def test_what_is_no_part_has_no_candidate(part):
    assert list(candidates((8, 6) if part == (4, 3) else (8, 3), part, HALVES)) in ([], [None])


# evidence


def seen(whole, cut, slot=0, noise=0.0):
    part = whole if cut is None else cut.of(whole).reshape(cut.shape(tuple(whole.shape)))
    return Seen(slot, whole, part + noise * torch.randn_like(part) if noise else part)


@given(st.integers(0, 2), st.sampled_from([1, 2, 3, 6]), st.sampled_from([torch.float32, torch.bfloat16]))
def test_the_cut_that_was_made_is_found(dim, blocks, dtype):
    torch.manual_seed(1)
    shape = [4, 5, 3]
    shape[dim] = 24
    cut = Cut(dim, blocks, 2, 1)
    noise = 1e-5 if dtype is torch.float32 else 1e-2
    assert decide([seen(torch.randn(shape).to(dtype), cut, noise=noise)], HALVES) == {0: cut}


def test_a_mask_of_ones_is_cut_as_the_one_other_of_its_shape():
    torch.manual_seed(2)
    cut = Cut(1, 2, 2, 1)
    mask = torch.ones(3, 8)
    assert decide([seen(torch.randn(3, 8), cut), seen(mask, cut, 1)], HALVES)[1] == cut
    with pytest.raises(ValueError, match=r"shape \(3, 8\) may be divided in 3 ways"):
        decide([seen(mask, cut)], HALVES)
    with pytest.raises(ValueError, match="may be divided in 3 ways"):
        decide([seen(torch.randn(3, 8), cut), seen(torch.randn(3, 8), Cut(1, 1, 2, 1), 1), seen(mask, cut, 2)], HALVES)


def test_heads_that_are_nearly_alike_are_told_apart():
    """As attention is, where weights are fresh."""
    torch.manual_seed(3)
    whole = (1 + 0.02 * torch.randn(2, 4, 6, 6)).bfloat16()
    assert decide([seen(whole, Cut(1, 1, 2, 1))], HALVES) == {0: Cut(1, 1, 2, 1)}


def widths(inner, dtype):
    """What a layer as wide as real ones saves: at degree 1, and on rank 1 of 2, which adds up in another order."""
    draw = torch.Generator().manual_seed(inner)
    x, gated = torch.randn(24, inner, generator=draw), torch.randn(32, inner, generator=draw) / inner**0.5
    weights = torch.randn(512, inner, generator=draw) / inner**0.5
    x, gated, weights = x.to(dtype), gated.to(dtype), weights.to(dtype)
    whole = x @ weights.T
    halves = [x.chunk(2, 1)[one] @ weights.chunk(2, 1)[one].T for one in range(2)]
    part = halves[0] + halves[1]
    after = torch.randn(32, 512, generator=draw).to(dtype) / 512**0.5
    gate_and_up = Cut(1, 2, 2, 1)
    rows = gate_and_up.numbers(32)
    return [Seen(0, whole, part), Seen(1, whole @ after.T, part @ after[rows].T)], gate_and_up


@pytest.mark.parametrize("inner", [1024, 16384])
@pytest.mark.parametrize(("dtype", "most"), [(torch.float32, 1e-5), (torch.bfloat16, 0.01)])
def test_sums_in_another_order_are_far_from_the_bound_at_the_widths_of_real_models(inner, dtype, most):
    """So that what is no rounding is told from it. Single elements near 0 differ by more than the bound."""
    seen, gate_and_up = widths(inner, dtype)
    apart = (seen[0].whole - seen[0].part).float().norm() / seen[0].part.float().norm()
    assert 0 < apart < most < tolerance([seen[0].part]) / 9
    assert decide(seen, HALVES) == {0: None, 1: gate_and_up}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "wrong",
    [
        lambda whole, part: part.flip(1),
        lambda whole, part: part[:, [*range(8, 16), *range(8)]],  # what is gated, then the gate
        lambda whole, part: part[:, [1, 0, *range(2, 16)]],
        lambda whole, part: part.roll(1, 1),
        lambda whole, part: part.roll(1, 0),
        lambda whole, part: Cut(1, 2, 2, 0).of(whole).reshape(part.shape),  # of the other rank
        lambda whole, part: whole[:, ::2],
        lambda whole, part: 2 * part,
        lambda whole, part: part.where(torch.arange(24)[:, None] < 18, 0),  # its end has not come
        lambda whole, part: part.where(torch.arange(24)[:, None] < 23, torch.nan),
        lambda whole, part: part.where(torch.arange(24)[:, None] < 23, torch.inf),
    ],
)
def test_no_other_arrangement_passes_for_a_part(wrong, dtype):
    (_, seen), _ = widths(1024, dtype)
    with pytest.raises(ValueError, match="no part of the one has the values of the other"):
        decide([seen._replace(part=wrong(seen.whole, seen.part))], HALVES)


def test_what_is_no_number_on_one_side_alone_is_refused():
    """It is not taken to be 0, however few there are."""
    torch.manual_seed(5)
    whole = torch.randn(100, 100).bfloat16()
    part = whole.clone()
    part[99, 99] = torch.nan
    with pytest.raises(ValueError, match="with 0 and 1 values that are not finite, and their values differ"):
        decide([Seen(0, whole, part)], HALVES)
    masked = whole.clone()
    masked[:, 50:] = -torch.inf
    assert decide([Seen(0, masked, masked.clone())], HALVES) == {0: None}


@pytest.mark.parametrize(
    ("whole", "part", "said"),
    [
        ((4, 4), (2, 2), "that is no division among ranks"),
        ((4, 4), (4, 4), "their values differ by 1"),
        ((4, 4), (2, 4), "no part of the one has the values of the other"),
    ],
)
def test_what_is_no_part_is_refused(whole, part, said):
    torch.manual_seed(4)
    with pytest.raises(ValueError, match=said):
        decide([Seen(0, torch.randn(whole), torch.randn(part))], HALVES)


# packing


def packed(tensors, cuts):
    """What comes out on the other side, and how many bytes were sent."""
    sent, _, slots = laid_out(Places(()), tensors)
    packing = Packing(slots, cuts)
    came = [one.clone() for one in packing.of(sent)]
    assert [one.numel() for one in came] == [one.bytes for one in packing.storages]
    return [view_of(slot, came, (), ()) for slot in packing.slots], sum(one.numel() for one in came)


@given(st.permutations(range(4)), st.integers(0, 3), st.sampled_from([1, 2]), st.booleans(), st.data())
def test_packed_parts_are_what_was_cut(order, dim, blocks, expanded, data):
    shape = [4, 8, 1, 4]
    memory = torch.randn([shape[one] for one in order]).permute([order.index(one) for one in range(4)])
    whole = memory.expand(4, 8, 3, 4) if expanded else memory
    if whole.shape[dim] % (2 * blocks):
        return
    cut = Cut(dim, blocks, 2, data.draw(st.integers(0, 1)))
    begin = data.draw(st.integers(0, 3))
    within = memory[begin:, :, :, 1:]  # begins somewhere, and has gaps
    (found, other), sent = packed([whole, within], [cut, None])
    assert torch.equal(found, cut.of(whole).reshape(found.shape))
    assert torch.equal(other, within)
    assert sent <= found.nbytes + memory.nbytes


def test_views_of_the_same_elements_are_sent_once():
    """Attention's probabilities are (batch, heads, s, s) in one node and (batch x heads, s, s) in the next."""
    whole = torch.randn(2, 4, 3, 5)
    (one, two), sent = packed([whole, whole.view(8, 3, 5)], [Cut(1, 1, 2, 1), Cut(0, 2, 2, 1)])
    assert sent == one.nbytes
    assert torch.equal(one, whole[:, 2:])
    assert torch.equal(two, whole[:, 2:].reshape(4, 3, 5))
    (one, two), sent = packed([whole, whole.view(8, 15)], [None, None])
    assert sent == whole.nbytes
    assert torch.equal(two, one.view(8, 15))


def test_memory_in_no_order_of_dimensions_is_sent_all_the_same():
    overlapping = torch.arange(12.0).as_strided((4, 4), (2, 1))
    (found,), _ = packed([overlapping], [Cut(0, 2, 2, 1)])
    assert torch.equal(found, overlapping[[1, 3]])
    crossed = (
        torch.randn(2, 3, 2, 5).permute(0, 2, 1, 3).reshape(2, 2, 3, 5).transpose(1, 2).as_strided((4, 15), (15, 1))
    )
    (found,), _ = packed([crossed], [Cut(0, 2, 2, 0)])
    assert torch.equal(found, crossed[[0, 2]])


# weights


def gated(width=4):
    module = nn.Module()
    module.linear_fc1, module.linear_fc2 = nn.Linear(width, 8), nn.Linear(4, width)
    module.config = SimpleNamespace(gated_linear_unit=True)
    for parameter, dim in ((module.linear_fc1.weight, 0), (module.linear_fc1.bias, 0), (module.linear_fc2.weight, 1)):
        parameter.tensor_model_parallel, parameter.partition_dim, parameter.partition_stride = True, dim, 1
    return module


def test_weights_are_put_together_as_megatron_divides_them():
    assert weight_divisions(gated()) == [Divided(0, 2), Divided(0, 2), Divided(1, 1), None]
    module, whole = gated(), torch.randn(8, 4)
    shards = Shards(module, 2)
    gate, up = whole.chunk(2)
    with torch.no_grad():
        for part in range(2):
            shards.put(module.linear_fc1.weight, torch.cat([gate.chunk(2)[part], up.chunk(2)[part]]), part)
            shards.put(module.linear_fc2.bias, torch.full((4,), float(part)), part)
    assert torch.equal(module.linear_fc1.weight, whole)
    assert not module.linear_fc2.bias.any()  # the first rank's, as all have it
    for part, one in enumerate(shards.parts(module.linear_fc1.weight)):
        assert torch.equal(one.reshape(4, 4), torch.cat([gate.chunk(2)[part], up.chunk(2)[part]]))


@pytest.mark.parametrize("width", [4, 3])
@pytest.mark.parametrize("degree", [1, 2])
def test_weights_that_came_are_known_by_their_marks(width, degree, monkeypatch):
    monkeypatch.setattr(intact, "_AT_ONCE", 5)
    program = SimpleNamespace(layout=SimpleNamespace(forward_tp=1, backward_tp=degree), hooks=Hooks())
    module, there, cpu = gated(width), gated(width), torch.device("cpu")
    parts = [[one.reshape(-1) for one in Shards(module, degree).parts(held)] for held in module.parameters()]
    with torch.no_grad():
        for one, other in zip(there.parameters(), module.parameters(), strict=True):
            one.copy_(other)
    found = weight_marks(program, there, cpu)
    assert found == [marks(one, cpu) for one in parts]
    if degree == 1:
        rank = VirtualRank(Role.BACKWARD, 0, 0, 0)
        assert changed_weights(program, rank, module, cpu, found) == ""
        assert "has 4" in changed_weights(program, rank, module, cpu, found[1:])
        with torch.no_grad():
            there.linear_fc2.weight[-1, [0, -1]] = there.linear_fc2.weight[-1, [-1, 0]]
        why = changed_weights(program, rank, module, cpu, weight_marks(program, there, cpu))
        assert why.startswith(
            "1 of 4 weights are not on the forward's side what they are here (the first is linear_fc2.w"
        )


def test_tensors_of_a_rehearsal_that_did_not_come_whole_are_counted():
    sent = [torch.randn(100), torch.randn(3, 4).bfloat16(), torch.empty(0)]
    there = marks(sent, torch.device("cpu"))
    assert changed_tensors(sent, torch.device("cpu"), there) == ""
    came = [sent[0], sent[1].clone(), sent[2]]
    came[1][2, 3] = 0
    assert changed_tensors(came, torch.device("cpu"), there).startswith(
        "1 of 3 tensors of the rehearsal did not come as"
    )


@pytest.mark.parametrize(
    ("shard", "division", "said"),
    [
        (torch.zeros(3, 4), Divided(0, 1), "build both sides with the same sizes"),
        (torch.zeros(4, 4), None, "nothing says that it is divided"),
        (torch.zeros(4, 4, dtype=torch.float64), Divided(0, 1), "float32 on the forward's side and torch.float64"),
    ],
)
def test_weights_that_do_not_fit_are_refused(shard, division, said):
    with pytest.raises(ValueError, match=said):
        put_shard("words", torch.zeros(8, 4), shard, division, 0, 2)


# plans: degree 2 is played by a module of half the width


def plan_between(forward, backward, x, degrees=HALVES):
    shipment = rehearse([forward], lambda: (forward(x),), places(forward))
    within = Within([backward], places(backward))
    plan = plan_for(within, lambda: (backward(x),), shipment.manifest, shipment.tensors, degrees)
    return shipment, within, plan


def simple(rows=slice(None)):
    generator = torch.Generator().manual_seed(6)
    model = nn.Linear(6, 8, bias=False)
    model.weight = nn.Parameter(torch.randn(8, 6, generator=generator)[rows].clone())
    return nn.Sequential(model, nn.Sigmoid(), nn.Dropout(0.5))


def test_a_rehearsal_says_what_is_sent_of_every_microbatch():
    torch.manual_seed(7)
    forward, backward = simple(), simple(slice(4, 8))
    x = torch.randn(3, 6)
    leaf = x.clone().requires_grad_()
    state = torch.get_rng_state()
    shipment, within, plan = plan_between(forward, backward, leaf)
    assert torch.equal(torch.get_rng_state(), state)
    plan = Plan.from_json(json.loads(json.dumps(plan.to_json())))
    cutter = Cutter(shipment.manifest, {7: plan})
    ordinary = forward(leaf)
    ordinary[:, 4:].sum().backward()
    torch.set_rng_state(state)
    _, whole = ship_within([forward], lambda: (forward(leaf),), places(forward))
    part = cutter.cut(whole, 7)
    assert part.manifest.bytes < whole.manifest.bytes
    assert part.manifest.bytes <= plan.received(shipment.manifest) < shipment.manifest.bytes
    there = torch.full((3, 6), torch.nan, requires_grad=True)
    (found,) = within.backward(
        lambda: (backward(there),), [there], part.manifest, [one.clone() for one in part.tensors], [torch.ones(3, 4)]
    )
    torch.testing.assert_close(found, leaf.grad)
    torch.testing.assert_close(backward[0].weight.grad, forward[0].weight.grad[4:])


def test_a_part_of_what_begins_within_its_storage_is_the_right_one():
    """Of a storage, what is saved is sent: of attention's, keys without the queries before them."""

    class Offset(nn.Module):
        def __init__(self, rows):
            super().__init__()
            self.linear = simple(rows)[0]

        def forward(self, x):
            y = self.linear(x)
            memory = torch.cat([torch.zeros_like(y.detach())[None].expand(5, -1, -1), y[None]])
            return memory[5].sin()

    torch.manual_seed(8)
    forward, backward, x = Offset(slice(None)), Offset(slice(4, 8)), torch.randn(3, 6, requires_grad=True)
    shipment, within, plan = plan_between(forward, backward, x)
    _, whole = ship_within([forward], lambda: (forward(x),), places(forward))
    assert any(tensor.storage_offset() for tensor in whole.tensors)
    part = Cutter(shipment.manifest, {0: plan}).cut(whole, 0)
    views = within.skeleton.views(part.manifest, part.tensors)
    expected = backward.linear(x)
    assert any(view.shape == expected.shape and torch.allclose(view, expected) for view in views)


def test_a_microbatch_that_was_not_rehearsed_is_refused():
    x = torch.randn(3, 6, requires_grad=True)
    forward = simple()
    shipment, _, plan = plan_between(forward, simple(slice(4, 8)), x)
    other = torch.randn(5, 6, requires_grad=True)
    _, whole = ship_within([forward], lambda: (forward(other),), places(forward))
    with pytest.raises(ValueError, match="not as it was rehearsed: saved tensor 1"):
        Cutter(shipment.manifest, {0: plan}).cut(whole, 0)


def test_other_weights_are_seen_in_the_rehearsal():
    x = torch.randn(3, 6, requires_grad=True)
    with pytest.raises(ValueError, match="do both sides have the same weights"):
        plan_between(simple(), simple(slice(0, 4)), x)  # rank 0's on rank 1


@pytest.mark.parametrize(
    ("other", "said"),
    [
        (nn.Sequential(simple(slice(4, 8))[0], nn.Tanh(), nn.Dropout(0.5)), "SigmoidBackward0 in the forward and Tanh"),
        (nn.Sequential(simple(slice(4, 8))[0], nn.Sigmoid()), "the graphs differ between the degrees"),
    ],
)
def test_another_forward_is_refused(other, said):
    with pytest.raises(ValueError, match=said):
        plan_between(simple(), other, torch.randn(3, 6, requires_grad=True))


def test_sizes_in_plain_values_may_be_divided_and_others_not():
    x = torch.randn(3, 6, requires_grad=True)
    model = simple()
    forward = rehearse([model], lambda: (model(x),), places(model)).manifest
    nodes = [replace(one, values=(*one.values, ("alpha", "4"))) for one in forward.nodes]
    other = [replace(one, values=(*one.values, ("alpha", "2"))) for one in forward.nodes]
    with pytest.raises(ValueError, match="keeps alpha 4 in the forward and 2 here"):
        paired(replace(forward, nodes=tuple(nodes)), replace(forward, nodes=tuple(other)), (2,))
    nodes = [replace(one, values=(*one.values, ("sizes", "(4, 6)"))) for one in forward.nodes]
    other = [replace(one, values=(*one.values, ("sizes", "(2, 6)"))) for one in forward.nodes]
    assert paired(replace(forward, nodes=tuple(nodes)), replace(forward, nodes=tuple(other)), (2,)).slots


def test_dropout_within_a_checkpoint_would_be_drawn_again_and_is_refused():
    class Again(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = simple()

        def forward(self, x):
            return torch.utils.checkpoint.checkpoint(self.inner, x, use_reentrant=True)

    model, x = Again(), torch.randn(3, 6, requires_grad=True)
    with pytest.raises(ValueError, match="checkpointing draws random numbers"):
        rehearse([model], lambda: (model(x),), places(model))


def test_a_rehearsal_drops_nothing():
    with KeepAll():
        kept = nn.functional.dropout(torch.ones(50), 0.5)
        native, mask = torch.native_dropout(torch.ones(50), 0.5, True)
    assert kept.eq(2).all()
    assert native.eq(2).all()
    assert mask.all()


@pytest.mark.parametrize("said", [{}, {"manifest": {}, "sources": [], "cuts": []}, {"cuts": [[1, 2]]}])
def test_a_plan_that_is_none_is_refused(said):
    with pytest.raises(ValueError, match=r"makes no sense|says no cut"):
        Plan.from_json(said)
