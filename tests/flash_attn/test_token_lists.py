"""A block list for each token: forward, the dq pass and the dk, dv pass; forms, pages, registers, refusals, numbers."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from fa_compile import Worker, built_kernels, kernel_fields, refused, swept
from fa_cubin import cubins, machine_code
from fa_dq import call as dq_pass
from fa_dq import compile_pass, rounded_sums, row_sums
from fa_reference import in_pages
from fa_tokens import (
    BLOCK,
    PACK,
    ROWS,
    TOKENS,
    TokenCase,
    both_ways,
    by_length,
    key_pairs,
    listed_blocks,
    reference,
    tokens,
    union_lists,
)
from torch._subclasses.fake_tensor import unset_fake_temporarily

from flash_attn.cute.block_sparsity import BlockSparseTensorsTorch
from flash_attn.cute.lists import formats, query_bits
from flash_attn.cute.lists.rows import ListHeads
from flash_attn.cute.mma import form as mma
from fuzz.attention import Inputs, Tensors, make_inputs, options, outputs
from fuzz.attention_lists import on_device, on_gpu
from fuzz.canary import Guarded
from fuzz.oracle import assert_close
from fuzz.wrong_calls import changed

GROUPS = (16, 3, 4, 8, 1, 2)
NEAR = dict(near=True, Hkv=1)
PAIRS = ((300, 700),) * 2
PACKED = dict(near=True, form="compact")
PAPER = dict(D=192, Dv=128)
CASES = [
    tokens(*PAIRS, D=64, causal=False, dtype="float16"),
    tokens((1000, 1000), keys=16, add=True),
    tokens((1000, 1000), G=12, D=96, causal=False),
    tokens(*((500, 500),) * 2, G=3, add=True),
    tokens(*PACK, G=4, form="padded"),
    tokens(*PACK, G=3, form="compact", start=128, add=True),
    tokens(*PACK, G=1, form="stacked", D=64, start=128),
    tokens(*PACK, G=16, form="ragged", causal=False),
    tokens(*PAIRS, G=4, by_head=True),
    tokens(*PACK, G=2, form="padded", keys=32, D=64),
    tokens(*PACK, G=3, form="compact", by_head=True, D=64),
    *(tokens((T, T), G=G, **NEAR) for T, G in zip(TOKENS, GROUPS * 2)),
    *(tokens(*((1000, 1000),) * 2, G=G, near=True, n=6, cap=100, D=64 if G in (2, 8) else 128) for G in GROUPS),
    tokens((700, 700), G=160, n=3, **NEAR),
    tokens((300, 300), G=67, cap=64, **NEAR),
    tokens((900, 900), G=4, causal=False, cap=200, **NEAR),
    tokens((1000, 1000), keys=128, cap=150, near=True),
    tokens((1000, 1000), G=8, keys=192, add=True, **NEAR),
    tokens((1000, 1000), G=4, cap=100, add=True, D=64, **NEAR),
    tokens((1000, 1000), dtype="float16", **NEAR),
    tokens((2000, 2000), n=16, **NEAR),
    tokens(*((300, 377),) * 2, G=4, cap=100, **NEAR),
    tokens((1, 1000), near=True),
    tokens((200, 330), G=8, causal=False, **NEAR),
    tokens((1000, 1077), G=4, near=True, by_head=True, cap=100),
    tokens(*((300, 300),) * 2, G=3, by_head=True, D=64, causal=False, dtype="float16", **NEAR),
    tokens(*((300, 300),) * 2, G=4, near=True, keys=16, n=8, cap=30),
    tokens((100, 100), (0, 0), (600, 600), (1, 1), (65, 65), G=4, **PACKED),
    tokens((100, 100), (129, 129), (600, 600), (1, 1), (64, 64), Hkv=1, cap=50, start=128, **PACKED),
    tokens((257, 257), (1, 1), (600, 600), G=3, Hkv=1, keys=128, add=True, D=64, **PACKED),
    tokens((100, 100), (300, 300), G=2, causal=False, Hkv=3, **PACKED),
    tokens((100, 200), (1, 101), (300, 400), G=3, keys=128, D=64, **PACKED),
    tokens((100, 200), (1, 101), (300, 400), Hkv=1, by_head=True, add=True, **PACKED),
    tokens((100, 120), (1, 21), (300, 320), G=8, Hkv=1, keys=32, add=True, **PACKED),
    tokens((1000, 1077), D=96, near=True, cap=100, add=True),
    tokens(*((300, 377),) * 2, G=1, D=96, cap=100, add=True, **NEAR),
    tokens((100, 100), (0, 0), (600, 600), (1, 1), (65, 65), G=3, D=96, keys=32, **PACKED),
    tokens(*PAIRS, G=4, by_head=True, D=96),
    tokens((1000, 1077), **PAPER, near=True, cap=100, add=True),
    tokens((100, 100), (0, 0), (600, 600), (1, 1), (65, 65), G=3, **PAPER, **PACKED),
    tokens(*PAIRS, G=4, by_head=True, **PAPER),
    tokens((1000, 1000), G=4, keys=16, causal=False, **PAPER, **NEAR),
    tokens(*((500, 500),) * 2, D=256, G=8, n=9, cap=100, **NEAR),
    tokens((100, 200), (1, 101), (300, 400), D=256, G=3, keys=128, add=True, **PACKED),
    tokens(*PACK, D=256, G=2, form="padded", dtype="float16"),
]
SHORT_ROWS = [  # than tiles have
    tokens((1000, 1000), D=80, near=True, cap=100),
    tokens(*PAIRS, G=4, by_head=True, D=80),
    tokens((100, 100), (0, 0), (600, 600), (1, 1), (65, 65), G=8, D=136, Dv=104, keys=32, **PACKED),
    tokens((100, 200), (1, 101), (300, 400), D=40, Dv=24, **PACKED),
    tokens(*((300, 300),) * 2, D=224, G=2, dtype="float16", **NEAR),
    tokens(*((300, 377),) * 2, D=112, Dv=16, G=1, causal=False, **NEAR),
]
SUMS = [
    CASES[2],
    tokens(*((500, 500),) * 2),
    tokens(*((500, 500),) * 2, G=160),
    tokens(*((500, 500),) * 2, **PAPER),
    *(CASES[i] for i in (7, 8, 10)),
]
BATCH = tokens(*((300, 768),) * 2, G=4)
BEHIND = tokens((300, 768), (1, 768), (77, 768), G=4, form="compact")


def attend(case: TokenCase, x: Inputs, lists: Any, **more: Any) -> tuple[torch.Tensor, ...]:
    from flash_attn.cute.interface import _flash_attn_fwd

    given = options(case, x) | dict(block_sparse_tensors=lists, return_lse=True)
    o, lse, *_ = _flash_attn_fwd(x.q, x.k, x.v, **given | more)
    return o, lse


def by_union_kernel(case: TokenCase, x: Inputs, lists: Any) -> tuple[torch.Tensor, ...]:
    """As `attend`, by the kernel for SM100."""
    from flash_attn.cute.fwd_unions.interface import forward_unions

    names = ("causal", "cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q")
    given = {name: value for name, value in options(case, x).items() if name in names}
    return forward_unions(x.q, x.k, x.v, lists, **given)


def on_pages(case: TokenCase, page: int, device: str = "cuda") -> dict[str, torch.Tensor | None]:
    """A table of the sequences' pages in any order, and the position of their first queries."""
    table = torch.randperm(len(case.lengths) * 768 // page, device="cpu").int().view(len(case.lengths), -1)
    offset = torch.tensor([S - T for T, S in case.lengths], device="cpu").int()
    found = dict(page_table=table.to(device), q_offset=offset.to(device))
    return found | dict(cu_seqlens_k=None) if case.packed else found


# What is compiled: calls on tensors without memory, in a worker.


def fake_lists(case: TokenCase) -> BlockSparseTensorsTorch:
    """Lists without values, on the GPU there is not."""
    with unset_fake_temporarily():
        lists = union_lists(case, listed_blocks(case, "cpu"))
    return on_gpu(lists)


def compile_forward(case: TokenCase, **more: Any) -> None:
    attend(case, make_inputs(case), fake_lists(case), **more)


def compile_unions(case: TokenCase) -> None:
    by_union_kernel(case, make_inputs(case), fake_lists(case))


def compile_pages(case: TokenCase, page: int = 64) -> None:
    with unset_fake_temporarily():
        given = on_pages(case, page, "cpu")
    given = {name: None if t is None else on_device(t) for name, t in given.items()}
    x = make_inputs(case)
    k, v = (in_pages(t, given["page_table"], page) for t in (x.k, x.v))
    attend(case, replace(x, k=k, v=v), fake_lists(case), **given)


def compile_dq(case: TokenCase, output: str = "dq") -> None:
    compile_pass(case, output, fake_lists(case))


def compile_dkdv(case: TokenCase) -> None:
    from flash_attn.cute.bwd_dkdv.interface import backward_dkdv
    from flash_attn.cute.bwd_dkdv.spec import KeyPairs

    def empty(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=torch.int32, device="cuda")

    x = make_inputs(case)
    rows = x.q.new_empty(*x.q.shape[:-3], case.Hq, 1024, dtype=torch.float32)
    cu = empty(2) if case.packed else None
    pairs = KeyPairs(empty(9), empty(9, 4), empty(17), 1, case.keys, cu, case.by_head)
    given = dict(causal=case.causal, add=case.add, cu_seqlens_q=cu, cu_seqlens_k=cu)
    backward_dkdv(x.q, x.k, x.v, x.do, rows, rows, pairs, dk=x.k, dv=x.v, **given)


def code_of(case: TokenCase) -> list[bytes]:
    """The cubins of forward's kernels; in a worker."""
    return cubins(lambda: compile_forward(case))


def compile_backward(case: TokenCase, argument: str) -> None:
    from flash_attn.cute.interface import _flash_attn_bwd

    x = make_inputs(case)
    o, lse = outputs(case, x)
    _flash_attn_bwd(x.q, x.k, x.v, o, x.do, lse, **{argument: fake_lists(case)})


@pytest.mark.parametrize(
    ("case", "words"),
    [
        (tokens(G=4), 1),
        (tokens(G=2), 2),
        (tokens(G=1, D=64, form="ragged"), 4),
        (tokens(G=160, D=64, form="padded"), 1),
        (tokens(G=4, by_head=True), 4),
    ],
)
def test_a_tile_has_128_rows_and_a_bit_for_each_token(compiler_sm90: Worker, case: TokenCase, words: int) -> None:
    """Heads with lists of their own are not packed."""
    found = compiler_sm90.trace(kernel_fields, "tile_m list_parts list_words pack_gqa", compile_forward, case)
    assert found == [(128, 1, words, case.rows > 1)]


@pytest.mark.parametrize(
    "both", swept([(dict(D=80), dict(D=96)), (dict(D=136, Dv=104), PAPER), (dict(D=200, Dv=16), dict(D=256))]), ids=str
)
def test_rows_shorter_than_tiles_have_the_tiles_kernel(compiler_sm90: Worker, both: tuple[dict, dict]) -> None:
    code, of_tiles = (compiler_sm90.run(code_of, tokens((1000, 1000), **dims)) for dims in both)
    assert code == of_tiles


@pytest.mark.parametrize("case", [BATCH, BEHIND], ids=["batch", "pack"])
def test_the_kernel_of_pages_is_that_of_keys_that_lie_together(compiler_sm90: Worker, case: TokenCase) -> None:
    names = "list_parts list_words use_tma_KV overlap_tiles"
    found = compiler_sm90.trace(kernel_fields, names, compile_pages, case, 192, traced=True)
    assert found == [(1, 1, True, case is BATCH)]


@pytest.mark.parametrize(
    "case", swept([tokens(), tokens(*PACK, G=3, D=96, form="stacked", causal=False), tokens(**PAPER)]), ids=str
)
def test_softmaxes_run_under_products(compiler_sm90: Worker, case: TokenCase) -> None:
    """Heads that divide a tile come by TMA, others by cp.async. Registers suffice.

    Three softmaxes: of both blocks of a step, and of a step of one.
    """
    (code,) = compiler_sm90.run(machine_code, compile_forward, case)
    assert code.stack == [0] and code.serialized is False and sum(n >= 32 for n in code.exponentials) == 3


# With rows of q and do that TMA loads, and with those that the warpgroups do.
DQ = [
    (compile_dq, tokens(), "dq"),
    (compile_dq, tokens(*PACK, G=3, D=64, form="ragged", causal=False), "add"),
    (compile_dq, tokens(G=4, by_head=True), "sums"),
    (compile_dq, tokens(G=4, keys=16), "dq"),
    (compile_dq, tokens(**PAPER), "sums"),
    (compile_dq, tokens(D=256), "add"),
]
LONG = tokens((1000, 1000), **NEAR)
DKDV = [
    LONG,
    tokens((1000, 1000), G=4, add=True, causal=False, **NEAR),
    tokens((1000, 1000), G=3, form="compact", keys=128, **NEAR),
    tokens((1000, 1000), G=1, D=64, **NEAR),
    tokens((1000, 1000), G=160, dtype="float16", **NEAR),
    tokens((1000, 1000), G=4, form="compact", by_head=True, **NEAR),
    tokens((1000, 1000), G=4, keys=16, **NEAR),
    tokens((1000, 1000), D=256, **NEAR),
    tokens((1000, 1000), D=96, **NEAR),
    tokens((1000, 1000), G=4, add=True, **PAPER, **NEAR),
]
PAGES = [pytest.param((compile_pages, case), marks=pytest.mark.sweep) for case in (BATCH, BEHIND)]


def named(call: tuple[Any, ...]) -> str:
    return f"{call[0].__name__}-{call[1]}"


@pytest.mark.parametrize("call", [*swept(DQ, 4), *PAGES, *swept([(compile_dkdv, case) for case in DKDV], 6)], ids=named)
def test_registers_suffice(compiler_sm90: Worker, call: tuple[Any, ...]) -> None:
    found = compiler_sm90.run(machine_code, *call)
    assert sum((code.stack for code in found), []) == [0] * (2 if call[0] is compile_dkdv else 1)
    assert call[0] is not compile_dq or found[0].serialized is False


SPILLED = 32  # bytes of the stack: a few addresses that are the same in all steps
BY_WARP = [(compile_unions, tokens(), [0]), (compile_dq, tokens(), [0])]
BY_WARP += [
    pytest.param(compile_dkdv, case, [SPILLED, 0], marks=pytest.mark.sweep)
    for case in (LONG, tokens((1000, 1000), G=3, **NEAR))
]


@pytest.mark.parametrize(("compile_", "case", "most"), BY_WARP)
def test_registers_by_warp(compiler_sm100: Worker, compile_: Callable, case: TokenCase, most: list[int]) -> None:
    found = sum((code.stack for code in compiler_sm100.run(machine_code, compile_, case)), [])
    assert len(found) == len(most) and all(size <= limit for size, limit in zip(found, most))


def test_registers_are_there_to_take() -> None:
    """A warpgroup that asks for more than others gave back waits forever."""
    from flash_attn.cute.bwd_dkdv import kernel

    at_launch = 65536 // (3 * 128) // 8 * 8
    assert kernel.WARPGROUPS * kernel.CONSUMER_REGISTERS + kernel.PRODUCER_REGISTERS <= 3 * at_launch


def kernels_of_layer() -> set[tuple[str, bool | None]]:
    """The kernels of the selected branch and of the choice by token that a call of the layer asks for; in a worker."""
    from nsa_layer import NSAConfig
    from nsa_layer.warm_up.lookup import make_call
    from nsa_tools.shape import Shape

    static = dict(dtype=torch.bfloat16, config=NSAConfig(q_tile=1))
    with built_kernels("") as kernels:
        make_call(Shape(B=1, T=300, Hq=4, Hkv=2, D=64, Dv=64, **static).signature())
    return {(type(kernel).__name__, getattr(getattr(kernel, "spec", None), "use_mma_sync", None)) for kernel in kernels}


def test_the_layer_asks_for_kernels_by_warp(compiler_sm100: Worker) -> None:
    passes = ("ForwardUnions", "BackwardDqSm90", "BackwardDkdvSm90")
    expected = {("TokenTopK", True), *((f"FlashAttention{name}", True) for name in passes)}
    assert expected <= compiler_sm100.trace(kernels_of_layer)


# What is refused, and the host's rules.

REFUSED = [
    ("mask_block_bits", compile_forward, tokens(), dict(softcap=20.0)),
    ("mask_block_bits", compile_forward, tokens(D=80, G=3), {}),
    ("mask_block_bits", compile_backward, tokens(), dict(argument="block_sparse_tensors")),
    ("mask_block_bits", compile_backward, tokens(), dict(argument="block_sparse_tensors_fwd")),
    ("accum with mask_block_bits", compile_dq, tokens(), dict(output="accum")),
    ("pages of a multiple of 64 keys, got 96", compile_pages, BATCH, dict(page=96)),
    ("dimensions 192 and 192", compile_dkdv, tokens((1000, 1000), D=192, **NEAR), {}),
    ("dimensions 192 and 192", compile_dq, tokens(D=192), {}),
    ("blocks of 48 keys", compile_dkdv, tokens((1000, 1000), keys=48, **NEAR), {}),
    ("float32", compile_dkdv, tokens((1000, 1000), dtype="float32", **NEAR), {}),
]


@pytest.mark.parametrize(("said", "compile_", "case", "more"), REFUSED)
def test_calls_are_refused_by_name(
    compiler_sm90: Worker, said: str, compile_: Callable[..., None], case: TokenCase, more: dict[str, Any]
) -> None:
    with refused(said):
        compiler_sm90.trace(compile_, case, **more)


def test_forward_of_sm100_reads_no_bits(compiler_sm100: Worker) -> None:
    with refused("mask_block_bits"):
        compiler_sm100.trace(compile_forward, tokens())


def test_words_hold_all_tokens_of_a_tile() -> None:
    for G in range(1, 300):
        most = max((128 * i + 127) // G - 128 * i // G + 1 for i in range(G))
        words = query_bits.words_for(G)
        assert words in (1, 2, 4) and most <= 32 * words and (words == 1 or most > 16 * words)


@pytest.mark.parametrize("form", ["compact", "stacked", "ragged"])
@pytest.mark.parametrize("shared", [False, True])
def test_ragged_lists_keep_the_bits_beside_their_entries(form: str, shared: bool) -> None:
    """shared: one list for both heads, so that entries of heads are 0 apart."""
    case = tokens((70, 70), (130, 200), (1, 1), G=3, form=form, Hkv=1 if shared else 2)
    lists = union_lists(case, listed_blocks(case, "cpu"))
    cu = tuple(torch.tensor(starts, dtype=torch.int32) for starts in case.starts)
    packing = formats.packing(*cu, None, None, 130, 200)
    fitted = formats.fit(
        lists, formats.FORWARD, packing, batch=3, heads=2, block_size=(128, 64), across=200, on_gpu=False
    )
    plain = union_lists(tokens(*case.lengths, G=3, form="compact", Hkv=case.Hkv), listed_blocks(case, "cpu"))
    for head in range(2):
        of = 0 if shared else head
        for row, count in enumerate(fitted.mask_block_cnt[head].tolist()):
            assert count == plain.mask_block_cnt[of, row]
            entries = slice(start := int(fitted.cu_block_idx_offsets[head, row]), start + count)
            assert fitted.mask_block_idx[entries].equal(plain.mask_block_idx[of, row, :count])
            assert fitted.mask_block_bits[entries].equal(plain.mask_block_bits[of, row, :count])


@pytest.fixture
def lists() -> BlockSparseTensorsTorch:
    return union_lists(tokens(), listed_blocks(tokens(), "cpu"))


@pytest.mark.parametrize(
    ("change", "heads", "said"),
    [
        (dict(block_size=(128, 128)), (32, 2), r"block_size is \(128, 128\)"),
        (dict(full_block_cnt=torch.ones(1), full_block_idx=torch.ones(1)), (32, 2), "must be None"),
        ({}, (32, 2), "pack_gqa is False"),
        (dict(mask_block_bits=lambda x: x[..., 0]), (32, 2), "int32 of mask_block_idx's shape"),
        (dict(mask_block_bits=torch.Tensor.long), (32, 2), "is torch.int64"),
        (dict(mask_block_bits=lambda x: x.expand(-1, -1, -1, -1, 3)), (32, 2), "1, 2 or 4 words"),
        ({}, (4, 2), "1 words an entry, but 128 rows of 2 packed heads need 2"),
        ({}, (2, 1), "1 words an entry, but 128 rows of 1 packed heads need 4"),
    ],
)
def test_lists_that_do_not_fit_are_refused(
    lists: BlockSparseTensorsTorch, change: dict[str, Any], heads: tuple[int, int], said: str
) -> None:
    group = 16 if heads[0] == 32 else 2
    with pytest.raises(ValueError, match=said):
        query_bits.of_rows(changed(**change)(lists), ListHeads.of(lists, *heads), group, "pack_gqa" not in said)


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


# The numbers.


def assert_forward(case: TokenCase, x: Inputs, lists: Any, exact: Tensors, rough: Tensors) -> None:
    with Guarded("cuda"):
        o, lse = (by_union_kernel if mma.FORCED else attend)(case, x, lists)
    assert_close(f"o of {case!r}", o, exact["o"], rough["o"])
    some = ~exact["lse"].isneginf()
    assert lse.isneginf().equal(~some), f"{case!r}: lse is -inf in the wrong rows"
    torch.testing.assert_close(lse[some].double(), exact["lse"][some], rtol=1e-3, atol=2e-3)


def assert_dq(case: TokenCase, x: Inputs, lists: Any, exact: Tensors, rough: Tensors, sums: bool = False) -> None:
    """The same bits twice; sums: the pass computes the row sums."""
    before = torch.randn_like(x.q) if case.add else torch.zeros_like(x.q)
    rows, given = row_sums(case, x, case.start, exact), dict(start=case.start, add=case.add)
    if sums:
        of = dict(o=exact["o"].to(x.q.dtype), lse=exact["lse"].float().contiguous())
        expected, known = (row_sums(case, x, case.start, of, fills) for fills in ((0.0, math.inf), (math.nan,) * 2))
        given |= dict(out=of["o"], lse=of["lse"])
        rows = tuple(torch.full_like(t, torch.nan) for t in rows)
    found = []
    for _ in range(2):
        found.append(before.clone() if case.add else torch.full_like(x.q, torch.nan))
        with Guarded("cuda"):
            dq_pass(case, x, rows, lists, dq=found[-1], **given)
    dqs = (of["dq"] + before for of in (exact, rough))
    assert_close(f"dq of {case!r}", found[0], *dqs, rounded_sums(case, x))
    assert found[0].equal(found[1]), f"other bits: {case!r}"
    for got, want in zip(rows, expected, strict=True) if sums else ():
        own = torch.isfinite(known[0])
        torch.testing.assert_close(got[own], want[own], atol=1e-4, rtol=1e-5)


def assert_dk_and_dv(case: TokenCase, x: Inputs, pairs: Any, exact: Tensors, rough: Tensors) -> None:
    """The same bits twice."""
    from flash_attn.cute.bwd_dkdv.interface import backward_dkdv

    rows = row_sums(case, x, case.start, exact)
    before = [torch.randn_like(t) if case.add else torch.full_like(t, torch.nan) for t in (x.k, x.v)]
    found = [[t.clone() for t in before] for _ in range(2)]
    given: dict[str, Any] = dict(causal=case.causal, add=case.add, start=case.start)
    if case.packed:
        given |= dict(zip(("cu_seqlens_q", "cu_seqlens_k"), x.cu_seqlens))
    if any(T != S for T, S in case.lengths):
        given["q_offset"] = torch.tensor([S - T for T, S in case.lengths], dtype=torch.int32, device="cuda")
    for dk, dv in found:
        backward_dkdv(x.q, x.k, x.v, x.do, *rows, pairs, dk=dk, dv=dv, **given)
    for name, got, again, held in zip(("dk", "dv"), *found, before, strict=True):
        added, rounding = held.double() if case.add else 0.0, rounded_sums(case, x, "dk")
        sums = exact[name] + added, (rough[name] + added).to(got.dtype)
        assert_close(f"{name} of {case!r}", got, *sums, rounding, floor=1e-6)
        assert got.equal(again), f"other bits of {name}: {case!r}"


def assert_right(case: TokenCase, tables: list[torch.Tensor] | None = None) -> None:
    """All kernels that take the case: dk and dv where tokens list their own blocks, as the layer's do."""
    x, tables = make_inputs(case), tables or listed_blocks(case)
    exact, rough = (reference(case, x, tables, dtype) for dtype in (torch.float64, x.q.dtype))
    if case.keys <= BLOCK:
        lists = union_lists(case, tables)
        assert_forward(case, x, lists, exact, rough)
        assert_dq(case, x, lists, exact, rough)
    if case.near:
        assert_dk_and_dv(case, x, key_pairs(case, tables), exact, rough)


@pytest.mark.gpu
@both_ways([tokens(G=G) for G in (1, 2, 3, 4, 8, 16, 128, 160)])
def test_tokens_attend_to_their_own_lists(use_mma_sync: bool, case: TokenCase) -> None:
    for T in TOKENS[case.rows % 3 :: 3] if use_mma_sync else TOKENS if case.rows < 100 else TOKENS[:-2]:
        assert_right(by_length(case.rows, T))


@pytest.mark.gpu
@both_ways(CASES)
def test_packed_and_other_calls(use_mma_sync: bool, case: TokenCase) -> None:
    assert_right(case)


@pytest.mark.gpu
@both_ways(SUMS)
def test_row_sums(use_mma_sync: bool, case: TokenCase) -> None:
    x, tables = make_inputs(case), listed_blocks(case)
    exact, rough = (reference(case, x, tables, dtype) for dtype in (torch.float64, x.q.dtype))
    assert_dq(case, x, union_lists(case, tables), exact, rough, sums=True)


@pytest.mark.gpu
@pytest.mark.parametrize("case", SHORT_ROWS, ids=str)
def test_rows_shorter_than_tiles(case: TokenCase) -> None:
    x, tables = make_inputs(case), listed_blocks(case)
    exact, rough = (reference(case, x, tables, dtype) for dtype in (torch.float64, x.q.dtype))
    assert_forward(case, x, union_lists(case, tables), exact, rough)


@pytest.mark.gpu
@pytest.mark.parametrize("G", [3, 16])
@pytest.mark.parametrize("gap", [4, 5, 6, 7, 40])
def test_warpgroups_that_list_apart(G: int, gap: int) -> None:
    """In turn so many blocks are listed by the first half of a tile's tokens alone and by the second half alone."""
    case = tokens((300, 4096), G=G, causal=False)
    token, block = torch.arange(300)[:, None], torch.arange(64)
    half = token * G % ROWS >= ROWS // 2
    table = (block // gap % 2 == half) & (block != 63)
    assert_right(case, [table.expand(2, -1, -1).to("cuda")])


@pytest.mark.gpu
@both_ways(
    [
        tokens((1000, 1000)),
        tokens((1000, 1000), G=3, D=64, n=8),
        tokens((1000, 1000), G=1, n=8),
        tokens((1000, 1000), G=4, dtype="float16"),
    ]
)
def test_later_tokens_change_no_bit(use_mma_sync: bool, case: TokenCase) -> None:
    """They decide which of a token's blocks share a step with each other."""
    call = by_union_kernel if use_mma_sync else attend
    x, other = (make_inputs(replace(case, seed=seed)) for seed in (0, 1))
    (table,), (redrawn,) = (listed_blocks(replace(case, seed=seed)) for seed in (0, 1))
    o, lse = call(case, x, union_lists(case, [table]))
    for t in (100, 517, 700, 998):
        later = {n: torch.cat([getattr(x, n)[:, : t + 1], 8 * getattr(other, n)[:, t + 1 :]], 1) for n in "qkv"}
        lists = union_lists(case, [torch.cat([table[:, : t + 1], redrawn[:, t + 1 :]], 1)])
        again, lse_again = call(case, replace(x, **later), lists)
        differ = (o[:, : t + 1] != again[:, : t + 1]).sum(), (lse[..., : t + 1] != lse_again[..., : t + 1]).sum()
        assert not any(differ), f"{differ} values of o and lse depend on tokens after {t}"


@pytest.mark.gpu
@pytest.mark.parametrize("page", [64, 192])
@pytest.mark.parametrize("case", [BATCH, BEHIND], ids=["batch", "pack"])
def test_bits_are_those_of_keys_that_lie_together(case: TokenCase, page: int) -> None:
    x = make_inputs(case)
    lists, given = union_lists(case, listed_blocks(case)), on_pages(case, page)
    want = attend(case, x, lists, q_offset=given["q_offset"])
    k, v = (in_pages(t, given["page_table"], page) for t in (x.k, x.v))
    got = attend(case, replace(x, k=k, v=v), lists, **given)
    assert all(torch.equal(x, y) for x, y in zip(got, want))
