"""The operators of attention: PyTorch's own checks, whole graphs, and what a graph breaks at.

But for tests on a GPU the kernels' place is taken by attention in plain PyTorch.
"""

from collections.abc import Callable
from inspect import signature
from typing import Any

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch.library import opcheck

from flash_attn.cute import flash_attn_func, flash_attn_varlen_func
from flash_attn.cute.block_lists import lists_from_blocks
from flash_attn.cute.lists.validate_calls import ALWAYS
from flash_attn.cute.operators import attention as operators
from fuzz.attention import arguments, both_lists, make_inputs
from fuzz.case import Attention as Case

Tensor = torch.Tensor
STARTS = torch.tensor([0, 100, 100, 300], dtype=torch.int32)


@pytest.fixture(autouse=True)
def calls(plain_kernels: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The arguments of the kernels, call by call."""
    torch._dynamo.reset()
    return plain_kernels


def lists() -> Any:
    return lists_from_blocks(torch.ones(3, 3, dtype=torch.bool), block_size=(128, 128))


CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "every option": dict(
        causal=True, softmax_scale=0.3, window_size=(70, 0), softcap=5.0, num_splits=2, pack_gqa=False,
        deterministic=True, learnable_sink=torch.ones(4), return_lse=True,
    ),
    "lists": dict(
        block_sparse_tensors=lists(),
        block_sparse_tensors_bwd=lists()._replace(spt=True, plan_per_group=False, passes=1),
    ),
    "lists of one direction": dict(block_sparse_tensors=lists(), causal=True, return_lse=True),
    "compressed": dict(causal=True, compress_factor=16, compress_offset=15),
    "packed": dict(cu_seqlens_q=STARTS, cu_seqlens_k=STARTS, max_seqlen_q=200, max_seqlen_k=200),
    "packed, all": dict(
        cu_seqlens_q=STARTS, cu_seqlens_k=STARTS, seqused_q=STARTS.diff(), seqused_k=STARTS.diff(), min_seqlen_k=1,
        block_sparse_tensors=lists(), block_sparse_tensors_bwd=lists(), seqlen_k_per_split=128, return_lse=True,
        disable_scheduler_metadata=True, deterministic=True, validate=False,
    ),
}  # fmt: skip


def leaves(packed: bool, heads_first: bool = False) -> list[Tensor]:
    torch.manual_seed(0)
    made = []
    for heads in (4, 2, 2):
        x = torch.randn(*([] if packed else [2]), heads, 300, 16, dtype=torch.bfloat16).transpose(-2, -3)
        made.append((x if heads_first else x.contiguous()).requires_grad_())
    return made


def call(tensors: list[Tensor], given: dict[str, Any]) -> tuple[Tensor, Tensor | None]:
    function = flash_attn_varlen_func if "cu_seqlens_q" in given else flash_attn_func
    return function(*tensors, **given)


def gradients(made: tuple[Tensor, Tensor | None], of: list[Tensor]) -> tuple[Tensor, ...]:
    out, lse = made
    loss = out.float().square().sum() + (0 if lse is None else lse.sum())
    return torch.autograd.grad(loss, of)


def plain(given: dict[str, Any]) -> dict[str, Any]:
    """Arguments of a kernel that can be compared."""

    def of(x: Any) -> Any:
        if isinstance(x, Tensor):
            return x.detach().float().tolist()
        return tuple(map(of, x)) if isinstance(x, tuple) else x

    absent = dict(softcap=0.0, num_splits=1, compress_factor=1, disable_scheduler_metadata=False)
    return {name: of(x) for name, x in given.items() if x is not None and x is not False and x != absent.get(name, ())}


@pytest.mark.parametrize("case", CASES)
def test_a_graph_is_whole_and_the_kernels_get_the_same(case: str, calls: list[dict[str, Any]]) -> None:
    given = CASES[case]
    tensors = leaves("cu_seqlens_q" in given, heads_first=True)
    sink = given.get("learnable_sink")
    of = tensors if sink is None else [*tensors, sink.requires_grad_()]
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    found = []
    for function in (call, compiled):
        made = function(tensors, given)
        found.append((made[0], made[1], *gradients(made, of)))
    for eager, graph in zip(*found, strict=True):
        torch.testing.assert_close(eager, graph, rtol=0, atol=0)
    assert len(calls) == 4
    for eager, graph in zip(calls[:2], calls[2:]):
        assert plain(eager) == plain(graph)


def by_operator(tensors: list[Tensor], given: dict[str, Any]) -> tuple[Tensor, Tensor | None]:
    """The call as a graph has it, without one."""
    public = flash_attn_varlen_func if "cu_seqlens_q" in given else flash_attn_func
    bound = signature(public).bind(*tensors, **given)
    bound.apply_defaults()
    validate = bound.arguments.pop("validate")
    return operators._in_graph(bound.arguments, validate)


@pytest.mark.parametrize("case", ["every option", "lists", "packed, all"])
def test_pytorch_finds_nothing_wrong(case: str, asked: list[tuple]) -> None:
    given = CASES[case]
    tensors = leaves("cu_seqlens_q" in given, heads_first=True)
    check(tensors, given, tensors, asked)


def check(tensors: list[Tensor], given: dict[str, Any], of: list[Tensor], asked: list[tuple], **options: Any) -> None:
    """The operators of a call and, where it is wanted, of its gradient of some tensors."""
    made = by_operator(tensors, given)
    if of:
        gradients(made, of)
    assert len(asked) == 1 + bool(of)
    for op, args, static in [*asked]:  # checks ask too
        detached = [x.detach() if isinstance(x, Tensor) and op._opname.endswith("backward") else x for x in args]
        opcheck(op, tuple(detached), static, **options)


def test_what_cannot_be_had_is_refused() -> None:
    q, *rest = leaves(packed=False)

    def of(q: Tensor) -> Tensor:
        return by_operator([q, *rest], {})[0].float()

    with pytest.raises(NotImplementedError, match="forward mode"):
        torch.func.jvp(of, (q.detach(),), (q.detach(),))
    with pytest.raises(NotImplementedError, match="vmap"):
        torch.func.vmap(of)(torch.stack([q.detach()] * 2))
    (dq,) = torch.autograd.grad(of(q).sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match="second derivative"):
        dq.sum().backward()
    with pytest.raises(RuntimeError, match="second derivative"):
        torch.func.grad(lambda q: torch.func.grad(lambda q: of(q).sum())(q).sum())(q.detach())
    # A transform around another one: what the inner one only passes on has the outer one's derivative, or an error.
    torch.testing.assert_close(torch.func.grad(value_within(of))(q.detach()), dq.detach(), rtol=0, atol=0)
    with pytest.raises(NotImplementedError, match="forward mode"):
        torch.func.jvp(value_within(of), (q.detach(),), (q.detach(),))


def value_within(function: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """The sum of what a function gives, computed beside its gradient."""
    return lambda x: torch.func.grad_and_value(lambda y: function(y).sum())(x)[1]


def test_one_graph_for_any_length(calls: list[dict[str, Any]]) -> None:
    counter = CompileCounterWithBackend("aot_eager")

    @torch.compile(fullgraph=True, backend=counter)
    def packed(q: Tensor, k: Tensor, v: Tensor, starts: Tensor, longest: int) -> Tensor:
        options = dict(causal=True, max_seqlen_q=longest, max_seqlen_k=longest)
        return flash_attn_varlen_func(q, k, v, cu_seqlens_q=starts, cu_seqlens_k=starts, **options)[0]

    for length in (300, 200, 150):
        starts, tensors = STARTS.clamp(max=length), [x[:length] for x in leaves(packed=True)]
        torch._dynamo.mark_dynamic(starts, 0)
        for x in tensors:
            torch._dynamo.mark_dynamic(x, 0)
        packed(*tensors, starts, length - 100).sum().backward()
    assert [at["max_seqlen_q"] for at in calls[::2]] == [200, 100, 50]
    assert counter.frame_count <= 2  # a number that changes is an input of the second one


def test_functions_break_graphs_and_say_so(calls: list[dict[str, Any]]) -> None:
    def mask(*_: Any) -> bool:
        return True

    starts = dict(cu_seqlens_q=STARTS, cu_seqlens_k=STARTS, max_seqlen_q=torch.tensor(200))
    for packed, options in ((False, dict(mask_mod=mask)), (True, starts)):
        function = flash_attn_varlen_func if packed else flash_attn_func
        tensors = leaves(packed)
        want = torch.autograd.grad(function(tensors[0] * 2, *tensors[1:], **options)[0].sum(), tensors)

        def attend(*tensors: Tensor) -> Tensor:
            return function(tensors[0] * 2, *tensors[1:], **options)[0] + 0

        got = torch.autograd.grad(torch.compile(attend, backend="aot_eager")(*tensors).sum(), tensors)
        torch.testing.assert_close(got, want, rtol=0, atol=0)
        assert [plain(at) for at in calls[:2]] == [plain(at) for at in calls[2:]]
        calls.clear()
        torch._dynamo.reset()
        with pytest.raises(torch._dynamo.exc.Unsupported, match="which are Python functions"):
            torch.compile(attend, fullgraph=True, backend="aot_eager")(*tensors)


def test_lists_are_looked_at_when_a_graph_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = lists()
    wrong.mask_block_cnt.fill_(7)
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    for given in (dict(validate=True), {}):
        with pytest.raises(ValueError, match="mask_block_cnt"):
            compiled(leaves(packed=False), dict(block_sparse_tensors=wrong, block_sparse_tensors_bwd=lists(), **given))
        monkeypatch.setenv(ALWAYS, "1")


STRIDED = dict(T_q=384, T_k=384, layout="heads first", causal=True)
ON_A_GPU = {
    "causal": Case(deterministic=True, **STRIDED),
    "packed": Case(packed=((100, 100), (0, 0), (668, 668)), deterministic=True, **STRIDED),
    "lists": Case(lists="both", block=(128, 128), deterministic=True, **STRIDED),
    "MLA, not absorbed": Case(D=192, Dv=128, Hkv=4, **STRIDED),
}


def on_a_gpu(name: str) -> tuple[list[Tensor], dict[str, Any]]:
    """q, k and v, whose strides are not those of contiguous tensors, and the other arguments."""
    case = ON_A_GPU[name]
    x = make_inputs(case)
    return [t.requires_grad_() for t in (x.q, x.k, x.v)], arguments(case, x, **both_lists(case))


@pytest.mark.gpu
@pytest.mark.parametrize("case", ON_A_GPU)
def test_the_kernels_too(case: str) -> None:
    """Through inductor."""
    tensors, given = on_a_gpu(case)
    found = []
    for function in (call, torch.compile(call, fullgraph=True)):
        made = function(tensors, given)
        found.append((*made, *gradients(made, tensors)))
    for eager, graph in zip(*found, strict=True):
        assert eager.isfinite().all()
        if given["deterministic"]:
            assert torch.equal(eager, graph)
        else:
            torch.testing.assert_close(eager, graph)


@pytest.mark.gpu
@pytest.mark.parametrize("case", [*ON_A_GPU][:3])
def test_pytorch_finds_nothing_wrong_with_the_kernels(case: str, asked: list[tuple]) -> None:
    tensors, given = on_a_gpu(case)
    check(tensors, given, tensors, asked)


@pytest.mark.gpu
@pytest.mark.parametrize("mod", ["mask", "score"])
def test_functions_break_graphs_of_the_kernels(mod: str) -> None:
    """The result is that of the options that say the same."""
    from fuzz.mask_mods import double, double_bwd, halves

    tensors, _ = on_a_gpu("causal")
    options = dict(mask_mod=halves) if mod == "mask" else dict(score_mod=double, score_mod_bwd=double_bwd)
    same = dict(causal=True, compress_factor=2, compress_offset=1) if mod == "mask" else dict(softmax_scale=2 / 8)

    def attend(options: dict[str, Any], *tensors: Tensor) -> Tensor:
        return flash_attn_func(*(x * 1 for x in tensors), **options)[0] + 0

    got, want = torch.compile(attend)(options, *tensors), attend(same, *tensors)
    found = [[o, *torch.autograd.grad(o.float().square().sum(), tensors)] for o in (got, want)]
    for x, y in zip(*found, strict=True):
        assert (x.float() - y.float()).norm() < 0.02 * y.float().norm()
