"""SM90 forward over unions of the tokens' own lists, with a bit for each token: forms, refusals, kernels, numbers."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from fa_compile import Worker, WorkerError, built_kernels
from fa_cubin import cubins, exponentials_under_products, frames, serialized, stacks
from fa_tokens import PACK, ROWS, TOKENS, TokenCase, both_ways, by_length, listed_blocks, reference, union_lists
from torch._subclasses.fake_tensor import unset_fake_temporarily

from flash_attn.cute.block_sparsity import BlockSparseTensorsTorch
from flash_attn.cute.fwd_sm90.persistence import has_short_rows
from flash_attn.cute.lists import formats, query_bits
from flash_attn.cute.lists.rows import ListHeads
from flash_attn.cute.multiply import form as multiply
from fuzz.attention import Inputs, make_inputs, options, outputs
from fuzz.attention_lists import on_gpu
from fuzz.canary import Guarded
from fuzz.oracle import assert_close


def attend(case: TokenCase, x: Inputs, lists: Any, **more: Any) -> tuple[torch.Tensor, ...]:
    from flash_attn.cute.interface import _flash_attn_fwd

    given = options(case.plain, x) | dict(block_sparse_tensors=lists, return_lse=True)
    o, lse, *_ = _flash_attn_fwd(x.q, x.k, x.v, **given | more)
    return o, lse


def by_union_kernel(case: TokenCase, x: Inputs, lists: Any) -> tuple[torch.Tensor, ...]:
    """As `attend`, by the kernel for SM100."""
    from flash_attn.cute.fwd_unions.interface import forward_unions

    names = ("causal", "cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q")
    given = {name: value for name, value in options(case.plain, x).items() if name in names}
    return forward_unions(x.q, x.k, x.v, lists, **given)


def fake_lists(case: TokenCase) -> BlockSparseTensorsTorch:
    """Lists without values, on the GPU there is not."""
    with unset_fake_temporarily():
        lists = union_lists(case, listed_blocks(case, "cpu"))
    return on_gpu(lists)


def compiled(case: TokenCase, more: dict[str, Any]) -> None:
    attend(case, make_inputs(case.plain), fake_lists(case), **more)


def kernels_of(case: TokenCase) -> list[tuple[int, int, int, bool]]:
    with built_kernels("FlashAttentionForwardSm90") as kernels:
        compiled(case, {})
    return [(kernel.tile_m, kernel.list_parts, kernel.list_words, kernel.pack_gqa) for kernel in kernels]


@pytest.mark.parametrize("G, words, form", [(4, 1, None), (2, 2, None), (1, 4, "ragged"), (160, 1, "padded")])
def test_a_tile_has_128_rows_and_a_bit_for_each_token(
    compiler_sm90: Worker, G: int, words: int, form: str | None
) -> None:
    case = TokenCase(G=G, D=64 if form else 128, form=form)
    assert compiler_sm90.trace(kernels_of, case) == [(128, 1, words, G > 1)]


def stack_and_softmaxes(case: TokenCase) -> list[tuple[list[int], bool, list[int]]]:
    code = cubins(partial(compiled, case, {}))
    return [(frames(cubin), serialized(cubin), exponentials_under_products(cubin)) for cubin in code]


def stack_by_warp(case: TokenCase) -> list[list[int]]:
    return stacks(partial(by_union_kernel, case, make_inputs(case.plain), fake_lists(case)))


def test_registers_suffice_by_warp(compiler_sm100: Worker) -> None:
    assert compiler_sm100.run(stack_by_warp, TokenCase()) == [[0]]


def kernels_of_layer() -> set[tuple[str, bool | None]]:
    """The kernels of the selected branch and of the choice by token that a call of the layer asks for; in a worker."""
    from nsa_layer import NSAConfig
    from nsa_layer.warm_up.lookup import make_call
    from nsa_tools.shape import Shape

    static = dict(dtype=torch.bfloat16, config=NSAConfig(q_tile=1))
    with built_kernels("") as kernels:
        make_call(Shape(B=1, T=300, Hq=4, Hkv=2, D=64, Dv=64, **static).signature())
    return {(type(kernel).__name__, getattr(getattr(kernel, "spec", None), "by_warp", None)) for kernel in kernels}


def test_the_layer_asks_for_kernels_by_warp(compiler_sm100: Worker) -> None:
    passes = ("ForwardUnions", "BackwardDqSm90", "BackwardDkdvSm90")
    expected = {("TokenTopK", True), *((f"FlashAttention{name}", True) for name in passes)}
    assert expected <= compiler_sm100.trace(kernels_of_layer)


def test_heads_with_lists_of_their_own_are_not_packed(compiler_sm90: Worker) -> None:
    assert compiler_sm90.trace(kernels_of, TokenCase(G=4, by_head=True)) == [(128, 1, 4, False)]


@pytest.mark.parametrize("case", [TokenCase(), TokenCase(PACK, G=3, D=96, form="stacked", causal=False)], ids=str)
def test_kernels_compile(compiler_sm90: Worker, case: TokenCase) -> None:
    """Heads that divide a tile come by TMA, others by cp.async. Registers suffice, and softmaxes run under products.

    Those are three: of both blocks of a step, and of a step of one.
    """
    ((stack, waits_for_each, exponentials),) = compiler_sm90.run(stack_and_softmaxes, case)
    assert stack == [0] and not waits_for_each and sum(n >= 32 for n in exponentials) == 3


def test_words_hold_all_tokens_of_a_tile() -> None:
    for G in range(1, 300):
        most = max((128 * i + 127) // G - 128 * i // G + 1 for i in range(G))
        words = query_bits.words_for(G)
        assert words in (1, 2, 4) and most <= 32 * words and (words == 1 or most > 16 * words)


def test_ctas_stay_where_unions_have_little_room() -> None:
    """Twice that of lists without bits: 16 blocks for each of 8 tokens."""
    for width, stay in ((128, True), (129, False)):
        idx = torch.empty(1, 2, 5, width)
        lists = BlockSparseTensorsTorch(idx[..., 0], idx, mask_block_bits=idx[..., None])
        assert has_short_rows(lists) is stay
        assert not has_short_rows(lists._replace(mask_block_bits=None))


@pytest.mark.parametrize("form", ["compact", "stacked", "ragged"])
@pytest.mark.parametrize("shared", [False, True])
def test_ragged_lists_keep_the_bits_beside_their_entries(form: str, shared: bool) -> None:
    """shared: one list for both heads, so that entries of heads are 0 apart."""
    case = TokenCase(((70, 70), (130, 200), (1, 1)), G=3, form=form, Hkv=1 if shared else 2)
    lists = union_lists(case, listed_blocks(case, "cpu"))
    cu = tuple(torch.tensor(starts, dtype=torch.int32) for starts in case.starts)
    packing = formats.packing(*cu, None, None, 130, 200)
    fitted = formats.fit(
        lists, formats.FORWARD, packing, batch=3, heads=2, block_size=(128, 64), across=200, on_gpu=False
    )
    plain = union_lists(TokenCase(case.lengths, G=3, form="compact", Hkv=case.Hkv), listed_blocks(case, "cpu"))
    for head in range(2):
        of = 0 if shared else head
        for row, count in enumerate(fitted.mask_block_cnt[head].tolist()):
            assert count == plain.mask_block_cnt[of, row]
            entries = slice(start := int(fitted.cu_block_idx_offsets[head, row]), start + count)
            assert fitted.mask_block_idx[entries].equal(plain.mask_block_idx[of, row, :count])
            assert fitted.mask_block_bits[entries].equal(plain.mask_block_bits[of, row, :count])


@pytest.fixture
def lists() -> BlockSparseTensorsTorch:
    return union_lists(TokenCase(), listed_blocks(TokenCase(), "cpu"))


@pytest.mark.parametrize(
    "change, pack_gqa, said",
    [
        (lambda x: dict(block_size=(128, 128)), True, r"block_size is \(128, 128\)"),
        (lambda x: dict(full_block_cnt=x.mask_block_cnt, full_block_idx=x.mask_block_idx), True, "have to be None"),
        (lambda x: {}, False, "pack_gqa is False"),
        (lambda x: dict(mask_block_bits=x.mask_block_bits[..., 0]), True, "int32 of mask_block_idx's shape"),
        (lambda x: dict(mask_block_bits=x.mask_block_bits.long()), True, "is torch.int64"),
        (lambda x: dict(mask_block_bits=x.mask_block_bits.expand(-1, -1, -1, -1, 3)), True, "1, 2 or 4 words"),
    ],
)
def test_lists_that_do_not_fit_are_refused(
    lists: BlockSparseTensorsTorch, change: Callable[[Any], dict[str, Any]], pack_gqa: bool, said: str
) -> None:
    with pytest.raises(ValueError, match=said):
        query_bits.of_rows(lists._replace(**change(lists)), ListHeads.of(lists, 32, 2), 16, pack_gqa)


def test_lists_without_room_for_all_tokens_are_refused(lists: BlockSparseTensorsTorch) -> None:
    with pytest.raises(ValueError, match="1 words an entry, but 128 rows of 2 packed heads need 2"):
        query_bits.of_rows(lists, ListHeads.of(lists, 4, 2), 2, True)
    with pytest.raises(ValueError, match="1 words an entry, but 128 rows of 1 packed heads need 4"):
        query_bits.of_rows(lists, ListHeads.of(lists, 2, 1), 2, True)


def backward(case: TokenCase, forward: bool) -> None:
    from flash_attn.cute.interface import _flash_attn_bwd

    x, lists = make_inputs(case.plain), fake_lists(case)
    given = dict(block_sparse_tensors_fwd=lists) if forward else dict(block_sparse_tensors=lists)
    o, lse = outputs(case.plain, x)
    _flash_attn_bwd(x.q, x.k, x.v, o, x.do, lse, **given)


def test_calls_that_read_no_bits_are_refused(compiler: Worker) -> None:
    refused = {
        "sm_90": [
            (compiled, TokenCase(), dict(softcap=20.0)),
            (compiled, TokenCase(D=192), {}),
            (backward, TokenCase(), False),
            (backward, TokenCase(), True),
        ],
        "sm_100": [(compiled, TokenCase(), {})],
    }
    for call in refused[compiler.arch]:
        with pytest.raises(WorkerError, match="mask_block_bits") as caught:
            compiler.trace(*call)
        assert caught.value.kind == "NotImplementedError"


def test_autograd_and_list_tools_refuse_bits(launched: None, lists: BlockSparseTensorsTorch) -> None:
    from flash_attn.cute.block_lists import transpose_lists
    from flash_attn.cute.interface import flash_attn_func

    q, k = torch.zeros(1, 300, 32, 128, requires_grad=True), torch.zeros(1, 300, 2, 128)
    with pytest.raises(NotImplementedError, match="mask_block_bits.*backward"):
        flash_attn_func(q, k, k, block_sparse_tensors=lists)
    with torch.no_grad():
        assert flash_attn_func(q, k, k, block_sparse_tensors=lists) == "launched"
        with pytest.raises(NotImplementedError, match="mask_block_bits"):
            flash_attn_func(q, k, k, block_sparse_tensors=lists, validate=True)
    with pytest.raises(NotImplementedError, match="mask_block_bits"):
        transpose_lists(lists, 5)


def assert_right(case: TokenCase, tables: list[torch.Tensor] | None = None) -> None:
    """Forward on the GPU, within twice the error of plain PyTorch in the same dtype."""
    x, tables = make_inputs(case.plain), tables or listed_blocks(case)
    with Guarded("cuda") as guard:
        o, lse = (by_union_kernel if multiply.FORCED else attend)(case, x, union_lists(case, tables))
        torch.cuda.synchronize()
    guard.check()
    exact, rough = (reference(case, x, tables, dtype) for dtype in (torch.float64, x.q.dtype))
    assert_close(f"o of {case!r}", o, exact["o"], rough["o"])
    some = ~exact["lse"].isneginf()
    assert lse.isneginf().equal(~some), f"{case!r}: lse is -inf in the wrong rows"
    torch.testing.assert_close(lse[some].double(), exact["lse"][some], rtol=1e-3, atol=2e-3)


@pytest.mark.gpu
@both_ways([TokenCase(G=G) for G in (1, 2, 3, 4, 8, 16, 160)])
def test_tokens_attend_to_their_own_lists(by_warp: bool, case: TokenCase) -> None:
    for T in TOKENS[case.G % 3 :: 3] if by_warp else TOKENS if case.G < 100 else TOKENS[:-2]:
        assert_right(by_length(case.G, T))


@pytest.mark.gpu
@both_ways(
    [
        TokenCase(((300, 700),) * 2, D=64, causal=False, dtype="float16"),
        TokenCase(((1000, 1000),), block=16),
        TokenCase(((1000, 1000),), G=12, D=96, causal=False),
        TokenCase(PACK, G=4, form="padded"),
        TokenCase(PACK, G=3, form="compact"),
        TokenCase(PACK, G=1, form="stacked", D=64),
        TokenCase(PACK, G=16, form="ragged", causal=False),
        TokenCase(((300, 700),) * 2, G=4, by_head=True),
        TokenCase(PACK, G=2, form="padded", block=32, D=64),
        TokenCase(PACK, G=3, form="compact", by_head=True, D=64),
    ]
)
def test_packed_and_other_calls(by_warp: bool, case: TokenCase) -> None:
    assert_right(case)


@pytest.mark.gpu
@pytest.mark.parametrize("G", [3, 16])
@pytest.mark.parametrize("gap", [4, 5, 6, 7, 40])
def test_warpgroups_that_list_apart(G: int, gap: int) -> None:
    """In turn so many blocks are listed by the first half of a tile's tokens alone and by the second half alone."""
    case = TokenCase(((300, 4096),), G=G, causal=False)
    token, block = torch.arange(300)[:, None], torch.arange(64)
    half = token * G % ROWS >= ROWS // 2
    table = (block // gap % 2 == half) & (block != 63)
    assert_right(case, [table.expand(2, -1, -1).to("cuda")])


@pytest.mark.gpu
@both_ways(
    [
        TokenCase(((1000, 1000),)),
        TokenCase(((1000, 1000),), G=3, D=64, n=8),
        TokenCase(((1000, 1000),), G=1, n=8),
        TokenCase(((1000, 1000),), G=4, dtype="float16"),
    ]
)
def test_later_tokens_change_no_bit(by_warp: bool, case: TokenCase) -> None:
    """They decide which of a token's blocks share a step with each other."""
    call = by_union_kernel if by_warp else attend
    x, other = (make_inputs(replace(case.plain, seed=seed)) for seed in (0, 1))
    (table,), (redrawn,) = (listed_blocks(replace(case, seed=seed)) for seed in (0, 1))
    o, lse = call(case, x, union_lists(case, [table]))
    for t in (100, 517, 700, 998):
        later = {n: torch.cat([getattr(x, n)[:, : t + 1], 8 * getattr(other, n)[:, t + 1 :]], 1) for n in "qkv"}
        lists = union_lists(case, [torch.cat([table[:, : t + 1], redrawn[:, t + 1 :]], 1)])
        again, lse_again = call(case, replace(x, **later), lists)
        differ = (o[:, : t + 1] != again[:, : t + 1]).sum(), (lse[..., : t + 1] != lse_again[..., : t + 1]).sum()
        assert not any(differ), f"{differ} values of o and lse depend on tokens after {t}"
