"""The kernels against the reference and the straight implementation on a GPU: forward and every gradient.

Causality, strides, the same bits twice, and memory that nothing has written are properties of
`fuzz/properties/layer.py` and `faults.py`.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from layer_calls import needs_hopper

from nsa_layer import NSAConfig
from nsa_layer.call import Aux, Call
from nsa_layer.config import BRANCHES
from nsa_layer.operators import attend
from nsa_tools.testing.assertions import assert_close_to_reference
from nsa_tools.testing.cases import OWN_KEYS, Case, make_inputs, run
from nsa_tools.testing.covering_calls import covering

pytestmark = pytest.mark.gpu

DTYPES = [torch.bfloat16, torch.float16]


@pytest.fixture
def whole_gpu(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """One test at a time, over all workers: a quadratic reference at thousands of tokens fills the memory."""
    import fcntl

    lock = Path(tmp_path_factory.getbasetemp()).parent / "whole-gpu.lock"
    with lock.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
        torch.cuda.empty_cache()


SIZES = dict(G=(1, 2, 4, 8, 16), T=(1, 63, 64, 65, 127, 128, 129, 300, 1000), D=(64, 128))
SIZES |= dict(dtype=DTYPES, packed=(False, True))
PAIRS = covering([tuple(zip(SIZES, values)) for values in itertools.product(*SIZES.values())], 2)

OF_TOKENS = dict(G=(1, 2, 3, 4, 8, 16), D=(64, 128), dtype=DTYPES, packed=(False, True))
OF_TOKENS |= dict(causal=(True, False), paper=(False, True), gate=("weight", "given", "none"), q_tile=(1, 2, 16, 64))
BY_TOKEN = covering([tuple(zip(OF_TOKENS, values)) for values in itertools.product(*OF_TOKENS.values())], 2)


@pytest.mark.parametrize("sizes", list(map(dict, PAIRS)), ids=str)
def test_kernels(sizes: dict) -> None:
    """Sizes of which every two meet."""
    T, G = sizes["T"], sizes["G"]
    lengths = (T, 0, 70, T // 2 + 1) if sizes["packed"] else None
    static = dict(lengths=lengths, config=by_tile(block_counts=6, window_size=200), compress_weights=T % 2 == 0)
    case = Case(B=2, T=T, Hq=2 * G, Hkv=2, D=sizes["D"], dtype=sizes["dtype"], **static)
    assert_close_to_reference(case, "cute", "cuda")


@pytest.mark.parametrize("sizes", list(map(dict, BY_TOKEN)), ids=str)
def test_kernels_by_token(sizes: dict) -> None:
    """Options of which every two meet, each token or few of them with a list of their own, at every length."""
    G, paper, q_tile = sizes["G"], sizes["paper"], sizes["q_tile"]
    sizes_apart = dict(compress_size=32, compress_stride=16) if paper and q_tile == 1 else {}
    config = NSAConfig(q_tile=q_tile, block_counts=5, window_size=100, **sizes_apart)
    options = {name: sizes[name] for name in ("D", "dtype", "causal", "gate")} | dict(compress_weights=paper)
    for T in SIZES["T"]:
        lengths = (T, 0, 70, T // 2 + 1) if sizes["packed"] else None
        case = Case(B=2, T=T, Hq=2 * G, Hkv=2, lengths=lengths, config=config, **options)
        assert_close_to_reference(case, "cute", "cuda")


@pytest.mark.parametrize("G,D", [(130, 64), (256, 128)])
def test_lists_of_more_heads_than_a_tile_has_rows(G: int, D: int) -> None:
    """Which select no blocks on the kernels, but attend to those that are given."""
    case = Case(T=200, Hq=G, Hkv=1, D=D, dtype=torch.bfloat16, config=NSAConfig(block_counts=2, window_size=100))
    inputs = make_inputs(case, "cuda")
    with pytest.raises(NotImplementedError, match="G above 128 with q_tile 1"):
        run("cute", inputs)
    lists = run("eager", inputs).aux.block_indices

    def listed(call: Call) -> tuple[torch.Tensor, Aux]:
        return attend(call._replace(block_indices=lists, spec=replace(call.spec, listed=True)))

    assert_close_to_reference(case, listed, "cuda")


@pytest.mark.parametrize("sizes", list(map(dict, BY_TOKEN[:12:3])), ids=str)
def test_kernels_by_token_as_blackwell_has_them(sizes: dict, monkeypatch: pytest.MonkeyPatch) -> None:
    """Products warp by warp, and forward's own kernel."""
    needs_hopper()
    from flash_attn.cute.mma import form

    monkeypatch.setattr(form, "FORCED", True)
    test_kernels_by_token(sizes)


# 16 heads at 8,193 would take 80 GiB here: `test_check.py` samples them.
LONG = [(4096, G) for G in OF_TOKENS["G"]] + [(8193, G) for G in OF_TOKENS["G"] if G < 16]
SHAPES = list(itertools.product((128, 64), DTYPES))
AT_LENGTH = [(1, T, G, *SHAPES[at % 4]) for at, (T, G) in enumerate(LONG)]
AT_LENGTH += [(128, *LONG[at], *SHAPES[at % 4]) for at in (0, 4, 5, 6, 9)]


@pytest.mark.parametrize("q_tile,T,G,D,dtype", AT_LENGTH)
@pytest.mark.usefixtures("whole_gpu")
def test_kernels_at_length(q_tile: int, T: int, G: int, D: int, dtype: torch.dtype) -> None:
    lengths, config = (T, 300) if G in (4, 16) else None, NSAConfig(q_tile=q_tile)
    case = Case(T=T, Hq=G, Hkv=1, D=D, dtype=dtype, lengths=lengths, config=config)
    assert_close_to_reference(case, "cute", "cuda")


by_tile = partial(NSAConfig, q_tile=128)
by_index = partial(NSAConfig, rule="index", branches=("selected",))
PACK, SIX = (300, 1, 0, 513, 64, 129), by_tile(block_counts=6)
DETERMINISTIC = SIX.replace(deterministic=True)
GATES = ("weight", "given", "none")
OPTIONS = [
    dict(Hq=8, config=by_tile(block_size=16, block_counts=20)),
    dict(config=by_tile(block_size=32, compress_stride=16)),
    dict(config=by_tile(block_size=128, block_counts=4)),
    dict(config=by_tile(block_size=256, block_counts=3)),
    dict(T=890, config=by_tile(block_size=256)),
    dict(T=257, config=by_tile(block_size=512, block_counts=3)),
    dict(config=NSAConfig(q_tile=256, block_counts=8)),
    dict(config=by_tile(window_size=1)),
    dict(config=by_tile(init_blocks=0, local_blocks=0, block_counts=3)),
    dict(config=by_tile(init_blocks=3, local_blocks=3)),
    dict(config=by_tile(init_blocks=2, local_blocks=4, block_counts=3)),
    dict(config=NSAConfig(init_blocks=0, local_blocks=0)),
    dict(config=NSAConfig.paper(init_blocks=0, local_blocks=0, block_counts=4)),
    dict(config=NSAConfig.paper(init_blocks=4, local_blocks=1)),
    dict(config=NSAConfig(init_blocks=3, local_blocks=2, block_counts=4), causal=False),
    *(dict(config=c, gate=g) for c in (by_tile(window_size=0), NSAConfig(window_size=0)) for g in GATES),
    dict(config=NSAConfig(window_size=0), Hkv=4, lengths=(300, 1, 0, 513)),
    dict(config=by_tile(window_size=0), causal=False, lengths=(300, 1, 0, 513)),
    # No compressed key and no window: the selected branch alone.
    *(dict(T=50, config=NSAConfig(window_size=0), Hkv=Hkv) for Hkv in (2, 4)),
    dict(causal=False),
    dict(causal=False, config=by_tile(block_size=256, block_counts=3)),
    dict(causal=False, lengths=(300, 0, 17, 700)),
    dict(gate="given"),
    dict(gate="none"),
    dict(gate="none", lengths=(1, 1, 0, 1), config=by_tile(block_counts=2)),
    dict(Hq=5, Hkv=1, B=3, T=500),
    dict(Hq=6, Hkv=2, T=4000, config=by_tile(block_counts=7)),
    dict(lengths=tuple(range(40))),
    dict(T=40),
    # A bitmap of one word: the kernels need a second to tell its contiguous dimension.
    *(dict(T=T, Hkv=1, config=by_tile(block_counts=6, window_size=200)) for T in (1, 100, 128)),
    dict(Hq=4, Hkv=4, lengths=PACK),
    dict(Hq=8, Hkv=1, T=1500, dtype=torch.float16),
    dict(T=2000, config=SIX.replace(block_size=128)),
    dict(lengths=(1300, 0, 1, 699), config=SIX.replace(block_size=128)),
    dict(T=2000, config=SIX),
]
OF_INDEX = dict(gate="none", compress_weights=False, config=by_index())
OPTIONS += [
    OF_INDEX | dict(T=1500, Hq=32, Hkv=8, index_dim=32),
    OF_INDEX | dict(T=1025, Hq=64, Hkv=4, index_dim=16, one_key=True),
    OF_INDEX | dict(Hq=8, lengths=PACK, config=by_index(block_size=16, init_blocks=0, local_blocks=0), index_dim=64),
    OF_INDEX | dict(T=4500, config=by_index(block_size=32, block_counts=128), index_dim=32),
    OF_INDEX | dict(Hq=8, index_dim=32, gate="weight"),
    OF_INDEX | dict(lengths=PACK, index_dim=16, gate="given", one_key=True),
    OF_INDEX | dict(Hkv=4, config=by_index(branches=BRANCHES[1:]), index_dim=32, gate="weight"),
    OF_INDEX | dict(config=by_index(branches=BRANCHES[1:], window_size=0), index_dim=32, gate="given"),
    OF_INDEX
    | dict(lengths=PACK, config=by_index(branches=BRANCHES), index_dim=32, gate="weight", compress_weights=True),
]
WITHOUT, OWN = dict(gate="none", compress_weights=False), dict(compress_weights=False)
OPTIONS += [
    WITHOUT | dict(lengths=PACK, config=NSAConfig(branches=BRANCHES[:1]), own_keys=OWN_KEYS[:1]),
    WITHOUT | dict(T=40, config=NSAConfig(branches=BRANCHES[:1])),
    OWN | dict(config=NSAConfig(branches=BRANCHES[2:]), gate="given", own_keys=OWN_KEYS[2:]),
    dict(config=NSAConfig(branches=BRANCHES[:2])),
    dict(config=by_tile(branches=BRANCHES[:2])),
    OWN | dict(lengths=PACK, config=NSAConfig(branches=BRANCHES[::2]), own_keys=("k_cmp", "v_cmp", "v_win")),
]
ON_HOPPER = [
    dict(config=DETERMINISTIC),
    dict(config=DETERMINISTIC, lengths=(700, 0, 1, 299)),
    dict(config=DETERMINISTIC, Hkv=4),
    dict(config=DETERMINISTIC.replace(block_size=128), lengths=PACK),
    dict(config=DETERMINISTIC.replace(block_size=256), lengths=(700, 333)),
    OF_INDEX | dict(T=5000, Hq=8, config=by_index(block_size=128, block_counts=32, deterministic=True), index_dim=128),
]


@pytest.mark.parametrize("options", OPTIONS + ON_HOPPER, ids=str)
@pytest.mark.parametrize("D", [64, 128])
def test_options(D: int, options: dict) -> None:
    sizes = dict(T=1000, Hq=4, Hkv=2, D=D, dtype=torch.bfloat16, config=by_tile(), compress_weights=True)
    case = Case(**(sizes | options))
    if case.config.deterministic:
        needs_hopper()
    assert_close_to_reference(case, "cute", "cuda")


@pytest.mark.parametrize(("block_size", "D"), [(64, 128), (128, 64)])
def test_a_block_that_is_not_chosen_changes_nothing(block_size: int, D: int) -> None:
    """Its keys and values are made huge: a tile of the kernels holds it too, yet everything keeps its bits."""
    # The selected branch alone reads k and v.
    config, sizes = by_tile(block_size=block_size, block_counts=4), dict(T=2048, Hq=4, Hkv=2, D=D)
    inputs = make_inputs(Case(**sizes, dtype=torch.bfloat16, config=config, own_keys=OWN_KEYS), "cuda")
    listed = {*run("cute", inputs).aux.block_indices[0, 10].flatten().tolist()}
    beside = [j for j in range(10 * 128 // block_size) if j not in listed and {j - 1, j + 1} & listed]
    tokens, rows = slice(beside[0] * block_size, (beside[0] + 1) * block_size), slice(1280, 1408)
    outcomes = []
    for scale in (1.0, 1e4):
        k, v, do = inputs.k.clone(), inputs.v.clone(), torch.zeros_like(inputs.do)
        k[:, tokens] *= scale
        v[:, tokens] *= scale
        do[:, rows] = inputs.do[:, rows]
        got = run("cute", replace(inputs, k=k, v=v, do=do))
        for name in "kv":
            assert got.grads[name][:, tokens].eq(0).all(), "a block that is not chosen has a gradient"
        assert got.grads["q"][:, rows].isfinite().all()
        outcomes.append((got.o[:, rows], got.aux.lse_slc[..., rows], got.aux.block_indices))
    assert all(map(torch.equal, *outcomes))
