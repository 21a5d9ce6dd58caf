"""Block lists of every shape that sparse attention needs: a list per key/value head, and blocks of 64 to 256."""

from __future__ import annotations

import pytest
from fa_cases import Case, backward, compile_case, forward, make_inputs, outputs
from fa_compile import Worker, WorkerError, only_hosts


def list_layouts(case: Case) -> dict[str, set[tuple]]:
    """Shapes of the counts that forward and backward kernels index, static numbers as they are and None for others."""
    from flash_attn.cute.lists import rows as list_rows

    seen: dict[str, set[tuple]] = {}
    original = list_rows.lists_by_query_head

    def static(extent):
        return tuple(map(static, extent)) if isinstance(extent, tuple) else extent if isinstance(extent, int) else None

    def looked_at(where):
        def by_query_head(tensors, group):
            lists = original(tensors, group)
            counts = lists.mask_block_cnt
            seen.setdefault(where, set()).add((static(counts.shape), static(counts.stride)))
            return lists

        return by_query_head

    with pytest.MonkeyPatch.context() as patch, only_hosts():
        for name in ("flash_fwd_sm90", "flash_fwd_sm100", "flash_bwd_sm90", "flash_bwd_sm100"):
            patch.setattr(f"flash_attn.cute.{name}.lists_by_query_head", looked_at(name[6:9]))
        compile_case(case)
    return seen


@pytest.mark.parametrize("pack_gqa", [False, True])
def test_heads_of_a_group_find_their_list_without_copies(compiler: Worker, pack_gqa: bool) -> None:
    case = Case(D=128, Hq=6, T_q=700, T_k=700, lists="both", list_heads=2, pack_gqa=pack_gqa)
    shared = {((None, (3, None), None), (None, (0, None), 1))}
    plain = {((None, None, None), (None, None, 1))}
    assert compiler.trace(list_layouts, case) == {"fwd": plain if pack_gqa else shared, "bwd": shared}


def one_direction(case: Case, direction: str) -> None:
    x = make_inputs(case)
    with only_hosts():
        forward(case, x) if direction == "forward" else backward(case, x, *outputs(case, x))


@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize("queries", [64, 192])
def test_tiles_of_128_queries_refuse_halves_of_them(compiler_sm100: Worker, queries: int, direction: str) -> None:
    case = Case(D=128, T_q=700, T_k=700, lists="both", block=(queries, 128))
    with pytest.raises(WorkerError, match="list blocks of a multiple of 128 queries") as error:
        compiler_sm100.trace(one_direction, case, direction)
    assert error.value.kind == "NotImplementedError"
