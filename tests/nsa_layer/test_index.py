"""The index of tokens, and branches that are left out, in PyTorch and by the definition."""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from layer_calls import Noted, deterministic

from fuzz.properties.layer import assert_forward_causal
from nsa_layer import NSAConfig, nsa, reference
from nsa_layer.call import Aux, Call, loss_of_sums
from nsa_layer.config import BRANCHES
from nsa_layer.eager.backward import backward
from nsa_layer.eager.forward import forward
from nsa_layer.operators import attend
from nsa_tools.testing.assertions import assert_close_to_reference
from nsa_tools.testing.cases import Case, make_inputs, run

Tensor = torch.Tensor
INDEX = NSAConfig(rule="index", branches=("selected",), block_size=16, block_counts=5, window_size=24)
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
    "all listed are forced": Case(T=64, config=INDEX.replace(block_counts=3), index_dim=4),
    "the first alone are forced": Case(T=90, config=INDEX.replace(init_blocks=2, local_blocks=0), index_dim=4),
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


def test_the_last_queries_of_longer_keys() -> None:
    """They choose, and sum the loss, as the definition's do."""
    inputs = make_inputs(OPERATOR["selected, gates"])
    last = {name: getattr(inputs, name)[:, 93:] for name in ("q", "gates", "q_index")}
    leaves = {name: x.clone().requires_grad_() for name, x in (inputs.tensors() | last).items()}
    call = Call(**leaves, q_offset=torch.tensor([93]), spec=inputs.case.spec).with_scores(True)
    o, aux, sums = reference.attend(call)
    do, d = inputs.do[:, 93:], torch.tensor([1.0, 0.0]).double()
    want = (
        o,
        aux.block_indices,
        aux.index_scores,
        *sums,
        *torch.autograd.grad([o, sums], list(leaves.values()), [do, d]),
    )
    with torch.no_grad():
        o, saved = forward(call)
        grads = [x for x in backward(call, saved, do, d_sums=d) if x is not None]
    torch.testing.assert_close((o, saved.block_indices, saved.index_scores, *saved.index_sums, *grads), want)


def test_gradients_of_the_definition() -> None:
    """By differences; the loss takes the selected branch's probabilities for constants."""
    inputs = make_inputs(Case(T=20, config=INDEX.replace(block_size=4), index_dim=2, dtype=torch.float64))
    given = inputs.tensors() | dict(block_indices=run("reference", inputs).aux.block_indices)

    def loss(q_index: Tensor, k_index: Tensor) -> Tensor:
        call = Call(**given | dict(q_index=q_index, k_index=k_index), spec=inputs.case.spec)
        return loss_of_sums(reference.attend(call)[2])

    assert torch.autograd.gradcheck(loss, [given[name].requires_grad_() for name in ("q_index", "k_index")])


def test_a_tie_goes_to_the_first_token_and_the_smaller_block() -> None:
    config = INDEX.replace(block_size=8, block_counts=3, init_blocks=0, local_blocks=1)
    inputs = make_inputs(Case(T=64, config=config, gate="none", index_dim=4))
    alike = {name: torch.ones_like(getattr(inputs, name)) for name in ("q_index", "k_index")}
    call = Call(**inputs.tensors() | alike, spec=inputs.case.spec)
    saved, of_definition = forward(call)[1], reference.attend(call)[1].block_indices
    assert saved.block_indices[0, 63, 0].tolist() == of_definition[0, 63, 0].tolist() == [0, 1, 7]
    _, best = reference.index_scores(*(x[0] for x in alike.values()), config=config, softmax_scale=0.5)
    assert saved.index_tokens[0, 63, 0].tolist() == [0, 8, 56] == best[63, 0, [0, 1, 7]].tolist()


@pytest.mark.parametrize("backend", ["eager", "reference"])
@pytest.mark.parametrize("t", [16, 77, 96])
def test_later_tokens_change_no_bit_of_the_loss_and_have_none_of_its_gradients(t: int, backend: str) -> None:
    """Output, lists, scores, sums of the loss, and m of each block, of the first t queries among all keys."""
    case = OPERATOR["all branches"]
    assert_forward_causal(case, backend, t)
    results, keys = [], ("k", "v", "k_index")
    for last in (make_inputs(case), make_inputs(replace(case, seed=1))):
        tensors = make_inputs(case).tensors()
        later = {name: torch.cat([tensors[name][:, :t], 8 * getattr(last, name)[:, t:]], 1) for name in keys}
        leaves = {name: x.clone().requires_grad_() for name, x in (tensors | later).items()}
        first = leaves | {name: leaves[name][:, :t] for name in ("q", "q_index")}
        call = Call(**first, q_offset=torch.zeros(1).int(), spec=replace(case.spec, backend=backend))
        o, aux, sums = attend(call)
        grads = torch.autograd.grad([o, sums], [leaves[name] for name in keys], [o.detach(), torch.tensor([1.0, 0.0])])
        assert all(d[:, :t].any() and not d[:, t:].any() for d in grads[: 2 + (t > 64)])
        results.append([o, aux.block_indices, aux.index_scores, sums, *(d[:, :t] for d in grads)])
        if backend == "eager":
            saved = forward(call.map(torch.detach))[1]
            results[-1] += saved.index_dz, saved.index_tokens
    assert all(map(torch.equal, *results))


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
    _, aux, again = nsa(**call, return_aux=True, return_index_loss=True)  # in this order
    assert isinstance(aux, Aux) and torch.equal(again, loss)


@pytest.mark.parametrize("with_loss", [False, True])
@pytest.mark.parametrize("backend", ["eager", "cute"])
def test_an_output_has_no_gradient_in_an_index_by_the_operator_either(backend: str, with_loss: bool) -> None:
    """Nor where its loss is there and backward does not begin at it."""
    pytest.importorskip("cutlass")
    from stub_kernels import stubbed_layer

    config = INDEX.replace(block_size=64)
    inputs = make_inputs(Case(T=130, D=64, config=config, gate="none", index_dim=16, dtype=torch.bfloat16))
    tensors = {name: x.requires_grad_() for name, x in inputs.tensors().items()}
    with stubbed_layer(), Noted() as noted:
        results = nsa(**tensors, config=config, backend=backend, return_index_loss=with_loss)
        o = results[0] if with_loss else results
        grads = torch.autograd.grad(o, list(tensors.values()), inputs.do, allow_unused=True)
    assert noted.names == ["attend", "attend_backward"]
    assert [x is None for x in grads] == [False] * 3 + [True] * 2


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


@pytest.mark.parametrize("gate", ["none", "weight"])
@pytest.mark.parametrize("branches", [of for n in (1, 2, 3) for of in itertools.combinations(BRANCHES, n)], ids=str)
def test_a_branch_that_is_not_there_launches_nothing(branches: tuple[str, ...], gate: str) -> None:
    """Of the kernels, forward and backward."""
    pytest.importorskip("cutlass")
    from stub_kernels import LAUNCHED, stubbed_layer

    by_index = "selected" in branches
    with_loss = by_index and gate == "weight"
    sizes = dict(T=300, D=64, dtype=torch.bfloat16, gate=gate, index_dim=32 * by_index, index_loss=with_loss)
    config = NSAConfig(branches=branches, rule="index" if by_index else "nsa", block_counts=4)
    with stubbed_layer():
        LAUNCHED.clear()
        result = run("cute", make_inputs(Case(config=config, **sizes)))
    names = Counter(at[0] for at, _ in LAUNCHED)
    dense = len(branches) - by_index  # those that add to accumulators
    assert names["_flash_attn_fwd"] == len(branches) and names["_flash_attn_bwd"] == dense
    assert names["_bwd_postprocess_convert"] == (dense > 0) + 2 * dense  # dq once, and dk and dv of each
    assert names["index_topk"] == by_index and names["union_lists"] == 2 * by_index
    assert names["index_scores"] == by_index  # of the scores that `Aux` has
    assert all(names[of] == with_loss for of in ("index_loss", "index_dq", "index_dk"))
    assert names["mean_pool"] == names["mean_pool_backward"] == ("compressed" in branches)
    assert names["gated_sum"] == names["gated_sum_backward"] == (branches != ("selected",) or gate != "none")
    assert result.aux.gates.shape[-1] == len(branches) and (result.aux.index_scores is None) != by_index


class Whole(torch.nn.Module):
    """The call of a case with its loss, as a module."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.config = case.config

    def forward(self, tensors: dict[str, Tensor], cu_seqlens: Tensor | None) -> tuple[Tensor, Tensor]:
        return nsa(**tensors, cu_seqlens=cu_seqlens, config=self.config, return_index_loss=True)


@pytest.mark.parametrize("name, strict", [("selected", True), ("selected", False), ("packed", False)])
def test_an_export_takes_any_length(name: str, strict: bool) -> None:
    case = OPERATOR[name]
    inputs = make_inputs(case)
    dim = {1 if case.lengths is None else 0: torch.export.Dim("T", min=32, max=4096)}
    given = inputs.tensors(), inputs.cu_seqlens
    shapes = {name: None if name == "gate_weight" else dim for name in given[0]}, None
    program = torch.export.export(Whole(case), given, dynamic_shapes=shapes, strict=strict).module()
    other = make_inputs(replace(case, T=217, lengths=case.lengths and (99, 0, 40, 3)))
    given = other.tensors(), other.cu_seqlens
    assert all(map(torch.equal, program(*given), Whole(case)(*given)))


def test_the_same_bits_twice() -> None:
    with deterministic():
        first, second = (run("eager", make_inputs(OPERATOR["packed, one key"])).tensors() for _ in range(2))
    assert all(torch.equal(x, second[name]) for name, x in first.items())


def test_branches_have_one_order() -> None:
    config = NSAConfig(rule="index", branches=["window", "selected"])
    assert config.branches == ("selected", "window") and hash(config) == hash(config.replace())


@pytest.mark.parametrize("compiled", [False, True])
def test_an_index_has_gradients_of_its_loss_alone(compiled: bool) -> None:
    """None without it, in graphs too, where a backward returns what its fake does."""
    given = {name: x.requires_grad_() for name, x in make_inputs(OPERATOR["selected"]).tensors().items()}
    attend = torch.compile(nsa, fullgraph=True, backend="aot_eager") if compiled else nsa
    for with_loss in (False, not compiled):  # a graph has zeros for the gradient of an output that nobody uses
        o, *_ = attend(**given, config=INDEX, return_index_loss=with_loss, return_aux=True)
        grads = torch.autograd.grad(o.sum(), list(given.values()), allow_unused=True)
        assert [name for name, d in zip(given, grads) if d is None] == ["q_index", "k_index"]


def test_a_second_derivative_is_refused() -> None:
    given = make_inputs(OPERATOR["selected"]).tensors() | dict(config=INDEX)
    with pytest.raises(RuntimeError, match="second derivative"):
        q_index = given["q_index"].requires_grad_()
        loss = nsa(**given | dict(q_index=q_index), return_index_loss=True)[1]
        torch.autograd.grad(torch.autograd.grad(loss, q_index, create_graph=True)[0].sum(), q_index)
