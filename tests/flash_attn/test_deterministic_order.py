"""The order of the adds to dq, dk and dv in dense deterministic backward on SM90.

Key blocks add from the left, and loop queries from the far end; under the compressed-causal mask from the right,
looping over upwards, in shares of the queries. Nobody waits for a CTA that is launched later.
"""

from collections import Counter
from functools import partial
from itertools import product

import pytest
import torch
from fa_cases import Case, backward, compile_case, make_inputs, outputs
from fa_compile import Worker, noted, only_hosts
from fa_cubin import cubins, frames, serialized
from fa_reference import assert_bits_repeat

CASES = [
    Case(D=128, T_q=1000, T_k=1000, causal=True, deterministic=True),
    Case(D=128, T_q=1500, T_k=1500, window=(300, 0), deterministic=True),
    Case(D=64, packed=((300, 300), (5, 70), (0, 40), (700, 650), (90, 0)), causal=True, deterministic=True),
    Case(D=128, packed=((300, 300), (700, 650)), window=(100, 0), deterministic=True, Hkv=1),
]


def launched_from_the_right(case: Case) -> bool:
    """The order that backward tells its tile scheduler."""
    from flash_attn.cute import flash_bwd_sm90

    asked: list[bool] = []
    with only_hosts(), noted(flash_bwd_sm90, "TileSchedulerArguments", lambda *args, **named: named["lpt"], asked):
        compile_case(case)
    (lpt,) = asked
    return lpt


@pytest.mark.parametrize("case", CASES[:3], ids=str)
def test_key_blocks_are_launched_from_the_left(compiler_sm90: Worker, case: Case) -> None:
    assert not compiler_sm90.trace(launched_from_the_right, case)


def adds_apart(case: Case) -> bool:
    """True where warps of their own add dq, dk and dv; otherwise one adds dq, and the warpgroups dk and dv."""
    from flash_attn.cute.flash_bwd_sm90 import FlashAttentionBackwardSm90

    found: list[bool] = []
    with only_hosts(), noted(FlashAttentionBackwardSm90, "_setup_attributes", lambda self: self.adds_apart, found):
        compile_case(case)
    (apart,) = found
    return apart


LISTED = Case(D=128, T_q=700, T_k=700, Hkv=4, causal=True, lists="both", deterministic=True)
PLACED = Case(D=128, T_k=1000, Hkv=4, window=(511, 0), offsets=(0, 611), deterministic=True)


@pytest.mark.parametrize(
    ("case", "apart"), [(CASES[0], True), (CASES[1], True), (LISTED, False), (PLACED, False)], ids=str
)
def test_warps_of_their_own_add_without_lists_and_positions(compiler_sm90: Worker, case: Case, apart: bool) -> None:
    assert compiler_sm90.trace(adds_apart, case) is apart


TILE_M, TILE_N = 4, 8
WINDOW = 17


def ordered_reduction(cases: torch.Tensor, compressed: bool) -> torch.Tensor:
    """turn_of of (seqlen_q, seqlen_k, factor, offset, key tile, query tile), -1 where they do not meet; in a worker."""
    import cutlass.cute as cute
    from cutlass import Int32, const_expr
    from cutlass.cute.runtime import from_dlpack
    from torch._subclasses.fake_tensor import unset_fake_temporarily

    from flash_attn.cute.block_info import BlockInfo
    from flash_attn.cute.bwd_sm90.ordered_reduction import rank_of
    from flash_attn.cute.compressed_causal.mask import CompressArgs, CompressedCausal
    from flash_attn.cute.seqlen_info import SeqlenInfoQK

    @cute.jit
    def all_turns(cases: cute.Tensor, out: cute.Tensor):
        for i in range(cute.size(cases, mode=[0])):
            info, n, m = SeqlenInfoQK.create(0, cases[i, 0], cases[i, 1]), cases[i, 4], cases[i, 5]
            if const_expr(compressed):
                compress = CompressedCausal.create(CompressArgs(cases[i, 2], cases[i, 3]))
                blocks = BlockInfo(TILE_M, TILE_N, True, compress=compress)
            else:
                blocks = BlockInfo(TILE_M, TILE_N, False, True, False, Int32(WINDOW), Int32(0))
            begin, end = blocks.get_m_block_min_max(info, n)
            if begin <= m and m < end:
                out[i] = rank_of(blocks, info, compressed, n, m)

    with unset_fake_temporarily():
        out = torch.full((len(cases),), -1, dtype=torch.int32)
        args = [from_dlpack(t).mark_layout_dynamic() for t in (cases, out)]
        cute.compile(all_turns, *args, options="--enable-tvm-ffi")(cases, out)
        return out


@pytest.mark.parametrize("compressed", [False, True])
def test_turns_are_in_the_order_of_the_launch(compiler_sm90: Worker, compressed: bool) -> None:
    pairs = [(3, -20), (3, 2), (16, 31)] if compressed else [(1, 0)]
    calls = [(*call, *pair) for call in product((1, 5, 33, 64), (1, 8, 33, 70)) for pair in pairs]
    cases = []
    for seqlen_q, seqlen_k, *pair in calls:
        n_blocks = range(-(-seqlen_k // TILE_N))
        for n, m in product(reversed(n_blocks) if compressed else n_blocks, range(-(-seqlen_q // TILE_M))):
            cases.append((seqlen_q, seqlen_k, *pair, n, m))
    found = compiler_sm90.run(ordered_reduction, torch.tensor(cases, dtype=torch.int32), compressed)
    added: Counter[tuple[int, ...]] = Counter()
    for (*call, _, m), rank in zip(cases, found.tolist()):
        if rank >= 0:
            assert rank == added[(*call, m)], (call, m)
            added[(*call, m)] += 1
    assert added


def code_of(case: Case) -> list[tuple[list[int], bool]]:
    """Stack frames of the backward kernel, and whether its products are serialized; in a worker."""
    x = make_inputs(case)
    code = cubins(partial(backward, case, x, *outputs(case, x)))
    return [(frames(cubin), serialized(cubin)) for cubin in code if b"FlashAttentionBackwardSm90" in cubin]


def test_products_overlap_beside_turns(compiler_sm90: Worker) -> None:
    """Turns at dk and dv among the products would have the compiler wait for each of these: 1.25 times as long."""
    case = Case(D=128, T_q=1000, T_k=300, Hq=6, compress=(3, 2), deterministic=True)
    assert compiler_sm90.run(code_of, case) == [([0], False)]


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES, ids=str)
def test_bits_repeat(case: Case) -> None:
    assert_bits_repeat(case, 30)
