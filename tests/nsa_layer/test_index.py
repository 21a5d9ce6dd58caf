"""The index of tokens, and branches that are left out, in PyTorch and by the definition."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
import torch.nn.functional as F
from layer_calls import deterministic

from nsa_layer import ContextParallel, NSAConfig, NSAttention, nsa, nsa_with_kvcache, reference
from nsa_layer.call import CallSpec
from nsa_layer.config import BRANCHES
from nsa_layer.eager import index, list_attention, select_blocks
from nsa_tools.testing.assertions import assert_close_to_reference
from nsa_tools.testing.cases import Case, make_inputs, run

Tensor = torch.Tensor


@dataclass(frozen=True)
class IndexCase:
    """Queries of one sequence, the last T of S tokens."""

    T: int
    config: NSAConfig
    S: int | None = None
    Hs: int = 2
    G: int = 2
    Di: int = 4
    one_key: bool = False

    @property
    def q_offset(self) -> int:
        return (self.S or self.T) - self.T

    def inputs(self, seed: int = 0) -> tuple[Tensor, ...]:
        """q, k, q_index and k_index in fp64, of which the last two have gradients."""
        torch.manual_seed(seed)
        S, heads = self.S or self.T, 1 if self.one_key else self.Hs
        q, k = torch.randn(self.T, self.Hs * self.G, 8).double(), torch.randn(S, self.Hs, 8).double()
        q_index, k_index = torch.randn(self.T, self.Hs, self.Di).double(), torch.randn(S, heads, self.Di).double()
        return q, k, q_index.requires_grad_(), k_index.requires_grad_()


CASES = {
    "forced": IndexCase(200, NSAConfig(block_size=16, block_counts=6), G=3),
    "nothing forced, one key": IndexCase(
        77, NSAConfig(block_size=16, block_counts=4, init_blocks=0, local_blocks=0), Hs=3, one_key=True
    ),
    "first alone": IndexCase(90, NSAConfig(block_size=8, block_counts=4, init_blocks=2, local_blocks=0)),
    "all blocks listed": IndexCase(130, NSAConfig(block_size=32, block_counts=9, local_blocks=1), one_key=True),
    "all listed are forced": IndexCase(64, NSAConfig(block_size=16, block_counts=3), G=1),
    "last queries": IndexCase(37, NSAConfig(block_size=16, block_counts=5), S=150),
    "shorter than a block": IndexCase(5, NSAConfig(block_size=16, block_counts=5)),
}
by_case = pytest.mark.parametrize("case", CASES.values(), ids=CASES)


def by_definition(case: IndexCase, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Lists [T, Hs, n], best tokens of all blocks, LSE [Hq, T], numerator and denominator of the loss."""
    (q, k, q_index, k_index), config, (S, T) = inputs, case.config, (case.S or case.T, case.T)
    static = dict(config=config, softmax_scale=case.Di**-0.5, q_offset=case.q_offset)
    scores, best = reference.index_scores(q_index, k_index, **static)
    chosen = reference.index_selection(q_index, k_index, **static)
    lists = reference.select_blocks(chosen, config=config, width=config.list_width(S))
    visible = reference.selected_mask(lists, T, config=config, causal=True, q_offset=case.q_offset, S=S)
    _, lse = reference.attention(q, k, k, visible, softmax_scale=0.5)
    mass = reference.block_mass(q, k, visible, lse, case.Hs, config=config, softmax_scale=0.5)
    listed = (lists.unsqueeze(-1) == torch.arange(mass.shape[-1])).any(-2)
    return lists, best, lse, *reference.index_loss_sums(scores, mass, listed & ~chosen.forced)


def in_pytorch(case: IndexCase, inputs: tuple[Tensor, ...], lists: Tensor, lse: Tensor) -> tuple[Tensor, ...]:
    """m and best tokens, free blocks, and what the loss is made of, as a batch of one."""
    q, k, q_index, k_index = (x.detach()[None] for x in inputs)
    of_call = dict(spec=CallSpec(case.config, True, 0.5), q_offset=case.q_offset)
    t = torch.arange(case.T) + case.q_offset
    free = index.is_free(lists[None], t[:, None], case.config)
    mass, best = index.free_mass(q, k, q_index, k_index, lists[None], lse.mT[None].contiguous(), free, **of_call)
    return mass, best, free, q_index, k_index


@by_case
def test_scores_are_those_of_the_definition(case: IndexCase) -> None:
    _, _, q_index, k_index = (x.detach() for x in case.inputs())
    t = torch.arange(case.T) + case.q_offset
    static = dict(config=case.config, scale=case.Di**-0.5)
    scores = index.score_blocks(q_index.transpose(0, 1)[None], k_index.permute(1, 2, 0)[None], t, **static)
    static = dict(config=case.config, softmax_scale=case.Di**-0.5, q_offset=case.q_offset)
    expected = reference.index_selection(q_index, k_index, **static)
    torch.testing.assert_close(scores[0].transpose(0, 1), expected.values.masked_fill(~expected.candidates, -torch.inf))


@by_case
def test_loss_and_gradients_are_those_of_the_definition(case: IndexCase) -> None:
    inputs = case.inputs()
    lists, best, lse, *sums = by_definition(case, inputs)
    mass, tokens, free, q_index, k_index = in_pytorch(case, inputs, lists, lse)
    of_lists = best.gather(-1, lists.clamp(min=0).long())
    assert tokens[0].where(free[0], 0).equal(of_lists.where(free[0], 0))
    scale = case.Di**-0.5
    torch.testing.assert_close(index.loss_sums(q_index, k_index, mass, tokens, free, scale), tuple(sums))
    d = torch.tensor(0.7).double()
    expected = torch.autograd.grad(sums[0], inputs[2:], d)
    found = index.loss_backward(d, q_index, k_index, mass, tokens, free, scale)
    torch.testing.assert_close(tuple(x[0] for x in found), expected)
    assert bool(free.any()) == bool(sums[1] > 0) == any(bool(x.any()) for x in expected)


def test_gradients_of_the_definition() -> None:
    """By differences, with m a constant, which is what the loss says."""
    case = IndexCase(24, NSAConfig(block_size=4, block_counts=5))
    q, k, q_index, k_index = case.inputs()
    lists, *_ = by_definition(case, (q, k, q_index, k_index))
    listed = (lists.unsqueeze(-1) == torch.arange(6)).any(-2)
    mass = torch.rand(24, 2, 6).double()

    def numerator(q_index: Tensor, k_index: Tensor) -> Tensor:
        scores, _ = reference.index_scores(q_index, k_index, config=case.config, softmax_scale=0.5)
        return reference.index_loss_sums(scores, mass, listed)[0]

    assert torch.autograd.gradcheck(numerator, (q_index, k_index))


def test_a_tie_goes_to_the_first_token_and_the_smaller_block() -> None:
    case = IndexCase(64, NSAConfig(block_size=8, block_counts=3, init_blocks=0, local_blocks=1), one_key=True)
    q, k, q_index, k_index = case.inputs()
    inputs = q, k, torch.ones_like(q_index), torch.ones_like(k_index)
    lists, best, lse, *_ = by_definition(case, inputs)
    assert lists[63, 0].tolist() == [0, 1, 7] and best[63, 0].tolist() == list(range(0, 64, 8))
    mass, tokens, free, *_ = in_pytorch(case, inputs, lists, lse)
    assert tokens[0, 63, 0].tolist() == [0, 8, 56] and free[0, 63, 0].tolist() == [True, True, False]


def test_later_tokens_change_nothing() -> None:
    """No bit of earlier scores, m, or gradients of earlier rows of the loss."""
    case = CASES["forced"]
    inputs = case.inputs()
    later = tuple(torch.cat([x[:100], x[100:] * 7 + 1]).detach().requires_grad_() for x in inputs)
    found = []
    for of in (inputs, later):
        lists, _, lse, *_ = by_definition(case, of)
        mass, tokens, free, q_index, k_index = in_pytorch(case, of, lists, lse)
        early = torch.arange(case.T)[:, None, None] < 100
        mass = mass * early
        dq, dk = index.loss_backward(torch.tensor(1.0).double(), q_index, k_index, mass, tokens, free & early, 0.5)
        assert not dk[:, 100:].any() and not dq[:, 100:].any()
        found.append((lists[:100], mass[:, :100], dq[:, :100], dk[:, :100]))
    assert all(torch.equal(a, b) for a, b in zip(*found))


INDEX = NSAConfig(rule="index", branches=("selected",), block_size=16, block_counts=5, window_size=24)
SELECTED = ("selected",)
UNFORCED = INDEX.replace(init_blocks=0, local_blocks=0, branches=("selected", "window"))
OPERATOR = {
    "selected": Case(B=2, T=130, config=INDEX, gate="none", index_dim=8),
    "selected, gates": Case(T=130, config=INDEX, gate="given", index_dim=8, one_key=True, dtype=torch.float64),
    "all branches": Case(T=130, config=INDEX.replace(branches=BRANCHES), index_dim=4, compress_weights=True),
    "packed": Case(lengths=(40, 0, 1, 129), Hq=6, config=UNFORCED, index_dim=16, dtype=torch.bfloat16),
    "packed, one key": Case(lengths=(16, 75), Hkv=4, config=UNFORCED, gate="none", index_dim=4, one_key=True),
    "integers": Case(T=150, config=UNFORCED, gate="given", index_dim=4, integers=True),
    "all blocks": Case(T=100, config=INDEX.replace(block_counts=128), gate="none", index_dim=4, dtype=torch.float16),
    "a token": Case(B=3, T=1, config=INDEX, index_dim=2),
    **{
        " and ".join(branches): Case(lengths=(7, 90), config=NSAConfig(block_size=16, window_size=9, branches=branches))
        for branches in (("compressed",), ("window",), ("compressed", "selected"), ("compressed", "window"))
    },
    "no window to leave out": Case(config=NSAConfig(block_size=16, window_size=0, branches=("compressed", "window"))),
}  # fmt: skip


@pytest.mark.parametrize("name", OPERATOR)
def test_the_operator_is_that_of_the_definition(name: str) -> None:
    """Its output, loss and gradients; those of the loss are the index' alone."""
    case = OPERATOR[name]
    result = assert_close_to_reference(case, "eager")
    assert result.aux.gates.shape[-1] == len(case.config.branches)
    assert (result.aux.block_indices is None) == ("selected" not in case.config.branches)
    if case.index_dim:
        assert result.aux.index_scores.shape == result.aux.block_indices.shape
        assert result.aux.index_scores.isneginf().equal(result.aux.block_indices < 0)


def test_chunks_of_one_query(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(select_blocks, "CPU_SCORE_BUDGET", 1)
    monkeypatch.setattr(list_attention, "CPU_PAIRS", 1)
    monkeypatch.setattr(list_attention, "TILE", 3)
    assert_close_to_reference(OPERATOR["packed"], "eager")


def test_it_is_dense_attention_where_all_blocks_are_listed() -> None:
    inputs = make_inputs(replace(OPERATOR["all blocks"], dtype=torch.float64))
    q, k, v = (x.transpose(1, 2) for x in (inputs.q, inputs.k, inputs.v))
    dense = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2)
    torch.testing.assert_close(run("eager", inputs).o, dense)


def test_the_loss_is_the_index_alone_and_the_output_is_not() -> None:
    inputs = make_inputs(OPERATOR["all branches"])
    tensors = {name: x.requires_grad_() for name, x in inputs.tensors().items()}
    of_index = [tensors.pop(name) for name in ("q_index", "k_index")]
    call = dict(tensors, q_index=of_index[0], k_index=of_index[1], config=inputs.case.config)
    o, loss = nsa(**call, return_index_loss=True)
    assert loss.dtype == torch.float32 and loss.dim() == 0 and loss > 0
    grads = torch.autograd.grad(loss, [*of_index, *tensors.values()], retain_graph=True, materialize_grads=True)
    assert all(d.any() for d in grads[:2]) and not any(d.any() for d in grads[2:])
    assert not any(d.any() for d in torch.autograd.grad(o.sum(), of_index, materialize_grads=True))
    assert torch.equal(nsa(**call), o)


@pytest.mark.parametrize("name", ["selected", "packed"])
def test_it_is_compiled_whole(name: str) -> None:
    case = OPERATOR[name]
    whole = torch.compile(nsa, fullgraph=True, backend="aot_eager")
    inputs = make_inputs(case)
    given = {name: x.detach().requires_grad_() for name, x in inputs.tensors().items()}
    results = []
    for call in (nsa, whole):
        static = dict(config=case.config, cu_seqlens=inputs.cu_seqlens, return_index_loss=True)
        o, loss = call(**given, **static)
        results.append((o, loss, *torch.autograd.grad([o, loss], list(given.values()), [inputs.do, torch.tensor(2.0)])))
    assert all(torch.equal(a, b) for a, b in zip(*results))


def test_the_same_bits_twice() -> None:
    with deterministic():
        first, second = (run("eager", make_inputs(OPERATOR["packed, one key"])).tensors() for _ in range(2))
    assert all(torch.equal(x, second[name]) for name, x in first.items())


def arguments(**changes: object) -> dict[str, object]:
    inputs = make_inputs(OPERATOR["selected"])
    return inputs.tensors() | dict(config=INDEX) | changes


PUBLISHED = NSAConfig(block_size=16, window_size=24)
WRONG = {
    "needs q_index and k_index": dict(q_index=None),
    "k_index must have 2 heads, as k has, or 1, got 3": dict(k_index=torch.zeros(2, 130, 3, 8)),
    "k_index must have shape": dict(k_index=torch.zeros(2, 130, 2, 4)),
    "needs causal=True": dict(causal=False),
    "block_indices must be None": dict(block_indices=torch.zeros(2, 130, 2, 1, dtype=torch.int32)),
    "index_scale must be positive": dict(index_scale=0.0),
    "q_index is for rule='index'": dict(config=PUBLISHED),
    "return_index_loss is for rule='index'": dict(config=PUBLISHED, q_index=None, k_index=None, return_index_loss=True),
    "k_win is of the window branch": dict(k_win=torch.zeros(2, 130, 2, 16)),
    "compress_k_weight is of the compressed branch": dict(compress_k_weight=torch.zeros(2, 16, 16)),
    r"gates must have shape \(2, 130, 4, 1\)": dict(gates=torch.zeros(2, 130, 4, 3)),
    "chooses blocks by the compressed branch": dict(
        config=PUBLISHED.replace(branches=("selected",)), q_index=None, k_index=None
    ),
}


@pytest.mark.parametrize("message", WRONG)
def test_wrong_calls_are_named(message: str) -> None:
    with pytest.raises(ValueError, match=message):
        nsa(**arguments(**WRONG[message]))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (dict(rule="index", q_tile=2), "rule='index' needs q_tile=1, got 2"),
        (dict(rule="index", branches=("window",)), "rule='index' chooses blocks of the selected branch"),
        (dict(branches=()), "branches must be some of"),
        (dict(branches=("window",), window_size=0), "needs a window, got window_size=0"),
        (dict(branches=("selected", "selected")), "branches must be some of"),
        (dict(branches=("dense",)), "branches must be some of"),
        (dict(rule="seed", branches=("selected",)), "rule='seed' needs all branches"),
    ],
)
def test_wrong_configurations_are_named(fields: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        NSAConfig.from_dict(fields)
    with pytest.raises(TypeError, match="branches must be a tuple of str"):
        NSAConfig(branches="selected")


def test_branches_have_one_order() -> None:
    config = NSAConfig(rule="index", branches=["window", "selected"])
    assert config.branches == ("selected", "window") and hash(config) == hash(config.replace())


def test_what_it_does_not_do_yet_is_refused() -> None:
    given = arguments()
    with pytest.raises(NotImplementedError, match="cp with rule='index'"):
        nsa(**given, cp=object.__new__(ContextParallel))
    with pytest.raises(NotImplementedError, match="NSAttention with rule='index'"):
        NSAttention(16, num_heads=4, num_kv_heads=2, config=INDEX)
    caches = dict.fromkeys(("k_cache", "v_cache"), torch.zeros(2, 8, 2, 16))
    with pytest.raises(NotImplementedError, match="nsa_with_kvcache with rule='index'"):
        nsa_with_kvcache(given["q"][:, :1], **caches, cache_seqlens=torch.zeros(2, dtype=torch.int32), config=INDEX)
    with pytest.raises(RuntimeError, match="second derivative"):
        q_index = given["q_index"].requires_grad_()
        loss = nsa(**given | dict(q_index=q_index), return_index_loss=True)[1]
        torch.autograd.grad(torch.autograd.grad(loss, q_index, create_graph=True)[0].sum(), q_index)
