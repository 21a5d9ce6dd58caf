"""Queries that are a shard of a longer context: together, shards give what the whole sequence gives."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from functools import partial

import pytest
import torch
from layer_calls import needs_hopper
from rank_cases import INDEX, OVERLAPPING, SMALL
from stub_kernels import LAUNCHED, stubbed_layer

from fuzz.query_shards import Attend, attend, in_shards
from nsa_layer import NSAConfig, reference
from nsa_layer.call import Call
from nsa_layer.config import BRANCHES
from nsa_tools.measure.timing import capture
from nsa_tools.testing.assertions import assert_close_to_reference
from nsa_tools.testing.cases import OWN_KEYS, Case, make_inputs, run

KERNELS_ATTEND = partial(attend, backend="cute")
ATTEND = {"eager": partial(attend, backend="eager"), "reference": reference.attend}

# Of two sequences of 70 tokens: a middle shard among them, single queries, and offsets that differ.
EVEN = [[(0, 21), (49, 70)], [(21, 22), (48, 49)], [(22, 70), (0, 48)]]
# Of sequences of 40, 0, 3 and 57 tokens; one has no query in one of the shards.
RAGGED = [[(0, 17), (0, 0), (0, 3), (56, 57)], [(17, 40), (0, 0), (3, 3), (0, 56)]]

CASES = {
    "batch": (Case(B=2, T=70, config=SMALL), EVEN),
    "packed": (Case(lengths=(40, 0, 3, 57), config=SMALL), RAGGED),
    "overlapping": (Case(B=2, T=70, config=OVERLAPPING, compress_weights=True), EVEN),
    "overlapping, packed": (Case(lengths=(40, 0, 3, 57), config=OVERLAPPING, gate="given"), RAGGED),
    "not causal": (Case(B=2, T=70, config=SMALL, causal=False), EVEN),
    "not causal, packed": (Case(lengths=(40, 0, 3, 57), config=OVERLAPPING, causal=False), RAGGED),
    "own keys": (Case(B=2, T=70, config=SMALL, own_keys=OWN_KEYS), EVEN),
    "own keys, packed": (Case(lengths=(40, 0, 3, 57), config=SMALL, own_keys=OWN_KEYS), RAGGED),
    "index": (Case(B=2, T=70, config=INDEX, gate="none", index_dim=4), EVEN),
    "index, all branches, packed": (
        Case(lengths=(40, 0, 3, 57), config=INDEX.replace(branches=BRANCHES), index_dim=4, one_key=True),
        RAGGED,
    ),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("attend", ATTEND.values(), ids=list(ATTEND))
def test_shards_are_the_whole(attend: Attend, name: str) -> None:
    """Outputs, lists, and the gradients' sums, of all keys."""
    case, shards = CASES[name]
    assert_close_to_reference(replace(case, D=8, Dv=6, dtype=torch.float64), in_shards(attend, shards))


@pytest.mark.parametrize("attend", ATTEND.values(), ids=list(ATTEND))
@pytest.mark.parametrize("causal", [True, False])
def test_lists_that_are_given_may_be_of_tiles(causal: bool, attend: Attend) -> None:
    """Tiles count from a shard's first query."""
    case = Case(T=70, D=8, dtype=torch.float64, config=SMALL.replace(q_tile=16), causal=causal)
    inputs, shards = make_inputs(case), [[(0, 16)], [(16, 48)], [(48, 70)]]
    lists = run("reference", inputs).aux.block_indices
    whole, parts = (run(f, inputs, lists) for f in (reference.attend, in_shards(attend, shards)))
    for name, x in whole.tensors().items():
        torch.testing.assert_close(parts.tensors()[name], x, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("attend", ATTEND.values(), ids=list(ATTEND))
def test_tiles_choose_for_whole_sequences_alone(attend: Attend) -> None:
    case = Case(B=2, T=70, D=8, config=SMALL.replace(q_tile=16))
    with pytest.raises(NotImplementedError, match="q_offset with q_tile=16"):
        run(in_shards(attend, EVEN), make_inputs(case))


KERNELS = dict(Hq=8, Hkv=2, D=64, dtype=torch.bfloat16, config=NSAConfig(q_tile=1, block_counts=5, window_size=100))
PAPER = KERNELS | dict(Hq=2, D=128, config=NSAConfig.paper(block_counts=5, window_size=100, deterministic=True))
BY_INDEX = KERNELS | dict(config=INDEX.replace(block_size=64), index_dim=32)
LONG = [[(0, 90), (410, 500)], [(90, 91), (409, 410)], [(91, 500), (0, 409)]]
PACK = dict(lengths=(500, 0, 3, 261))
PARTS = [[(0, 130), (0, 0), (0, 3), (260, 261)], [(130, 500), (0, 0), (3, 3), (0, 260)]]
ON_GPU = {
    "batch": (Case(B=2, T=500, **KERNELS), LONG),
    "paper, packed, own keys, deterministic": (Case(**PACK, **PAPER, own_keys=OWN_KEYS), PARTS),
    "not causal": (Case(B=2, T=500, **KERNELS | dict(Hq=32, causal=False, dtype=torch.float16)), LONG),
    "packed, weights": (Case(**PACK, **KERNELS | dict(D=128), compress_weights=True), PARTS),
    "index": (Case(B=2, T=500, **BY_INDEX, gate="none"), LONG),
    "index, window, packed, one key": (
        Case(**PACK, **BY_INDEX | dict(config=INDEX.replace(block_size=64, branches=BRANCHES[1:])), one_key=True),
        PARTS,
    ),
}


@pytest.mark.gpu
@pytest.mark.parametrize("name", ON_GPU)
def test_shards_are_the_whole_on_the_kernels(name: str) -> None:
    needs_hopper()
    case, shards = ON_GPU[name]
    got = assert_close_to_reference(case, in_shards(KERNELS_ATTEND, shards), "cuda")
    whole = run("cute", make_inputs(case, "cuda"))
    differ = (got.aux.block_indices != whole.aux.block_indices).any(-1)
    assert not differ.any(), f"{int(differ.sum())} lists differ from those of the whole: {case!r}"


STUBBED = {name: ON_GPU[name] for name in ("batch", "not causal", "packed, weights", "index")}


@pytest.mark.parametrize("name", STUBBED)
def test_kernels_get_positions_and_keys_of_their_own(name: str) -> None:
    """Every launch that is told where queries are among keys; no launch reads q_offset on the host."""
    case, shards = STUBBED[name]
    case = replace(case, D=64)
    with stubbed_layer():
        LAUNCHED.clear()
        got = run(in_shards(KERNELS_ATTEND, shards), make_inputs(case))
    offsets = {tuple(first for first, _ in shard) for shard in shards}

    def told(args: object) -> bool:
        if isinstance(args, torch.Tensor):
            return args.dtype == torch.int32 and args.dim() == 1 and tuple(args.tolist()) in offsets
        return isinstance(args, (tuple, list)) and any(map(told, args))

    launched = Counter(at[0] for at, args in LAUNCHED if told(args))
    # The window and the choice; if causal the compressed branch, unions and the selected branch too.
    each = {"_flash_attn_fwd": 3, "token_topk": 1, "union_lists": 2, "_flash_attn_bwd": 2}
    each = each if case.causal else {"_flash_attn_fwd": 1, "token_topk": 1, "_flash_attn_bwd": 1, "union_lists": 0}
    if case.index_dim:
        each = dict.fromkeys(("_flash_attn_fwd", "index_topk", "index_loss", "index_dk"), 1)
        each |= {"union_lists": 2, "_flash_attn_bwd": 0}
    assert {kernel: launched[kernel] for kernel in each} == {kernel: n * len(shards) for kernel, n in each.items()}
    assert got.grads["k"].shape == got.grads["v"].shape == make_inputs(case).k.shape


@pytest.mark.gpu
def test_a_graph_reads_positions_when_it_is_replayed() -> None:
    needs_hopper()
    case, _ = ON_GPU["batch"]
    inputs = make_inputs(case, "cuda")
    q, q_offset = inputs.q[:, :64].clone(), torch.zeros(case.B, dtype=torch.int32, device="cuda")
    call = Call(q, inputs.k, inputs.v, inputs.gate_weight, q_offset=q_offset, spec=case.spec)

    def attend() -> torch.Tensor:
        return KERNELS_ATTEND(call)[0]

    with torch.no_grad():
        graph, o = capture(attend, warm_ups=3)
        for offsets in ((0, 436), (99, 7)):
            q.copy_(torch.stack([x[at : at + 64] for x, at in zip(inputs.q, offsets)]))
            q_offset.copy_(torch.tensor(offsets))
            graph.replay()
            assert torch.equal(o, attend()), f"{offsets}: {case!r}"
