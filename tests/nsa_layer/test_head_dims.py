"""Head dimensions that the kernels are not compiled for are padded to native ones, and nothing else changes."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from layer_calls import CACHED, cached_arguments
from test_kvcache import KEPT, Caches

from nsa_layer import NSAConfig, nsa, nsa_with_kvcache, selected_attention, support
from nsa_layer.call import Call, Saved
from nsa_layer.context_parallel import gather_loop
from nsa_layer.context_parallel.spec import MODES, ContextParallel
from nsa_layer.cute import padding
from nsa_layer.cute.memory_plan import predict
from nsa_layer.eager import backend as eager
from nsa_layer.saved_shapes import saved_shapes
from nsa_tools.measure.call_memory import measurement
from nsa_tools.shape import Shape
from nsa_tools.testing.assertions import assert_close_to_reference
from nsa_tools.testing.cases import OWN_KEYS, Case, make_inputs, run
from nsa_tools.testing.covering_calls import covering

CONFIG = NSAConfig(block_size=16, block_counts=4, window_size=20)
CASE = Case(B=2, T=50, D=24, Dv=16, dtype=torch.float64, config=CONFIG)
EXACT, BACKENDS = dict(rtol=1e-12, atol=1e-12), ("cute", "eager")


def eager_shapes(call: Call, **options: object) -> Saved:
    """The shapes of what plain PyTorch saves, which of an index' loss is more than the kernels save."""
    return saved_shapes(call._replace(spec=replace(call.spec, backend="eager")), **options)


@pytest.fixture
def native(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[int, int]]]:
    """Plain PyTorch stands for the kernels' backend, on the CPU; the head dimensions of the calls that it computes."""
    seen = []

    class OnCpu:
        @staticmethod
        def forward(call, **options):
            seen.append((call.q.shape[-1], call.v.shape[-1]))
            return eager.forward(call, **options)

        backward = staticmethod(eager.backward)

    monkeypatch.setattr(support, "choose_backend", lambda backend, *_: backend)
    monkeypatch.setattr(support, "backend_module", lambda name: OnCpu if name == "cute" else eager)
    monkeypatch.setattr(gather_loop, "saved_shapes", eager_shapes)
    yield seen


CALLS = {
    "batch": CASE,
    "packed, compression weights": replace(CASE, lengths=(50, 0, 3, 20), compress_weights=True),
    "branches' own keys": replace(CASE, own_keys=OWN_KEYS, gate="given"),
    "an index": replace(CASE, config=CONFIG.replace(rule="index"), index_dim=8),
    "the selected branch alone": replace(
        CASE, config=CONFIG.replace(rule="index", branches=("selected",)), index_dim=8, gate="none"
    ),
}


@pytest.mark.parametrize("name", CALLS)
def test_results_are_those_without_padding(native: list, name: str) -> None:
    inputs = make_inputs(CALLS[name])
    got, want = run("cute", inputs), run("eager", inputs)
    assert native == [(64, 64)]
    for each, x in want.tensors().items():
        torch.testing.assert_close(got.tensors()[each], x, **EXACT, msg=lambda m: f"{each}: {m}")
    assert got.aux.block_indices.equal(want.aux.block_indices) and got.o.is_contiguous()


@pytest.mark.parametrize(
    ("dims", "computed"),
    [
        ((64, 64), (64, 64)),
        ((64, 48), (64, 64)),
        ((72, 16), (96, 96)),
        ((104, 104), (128, 128)),
        ((136, 128), (192, 128)),
        ((144, 136), (256, 256)),
    ],
)
def test_dimensions_go_to_the_next_native_ones(native: list, dims: tuple, computed: tuple) -> None:
    D, Dv = dims
    inputs = make_inputs(replace(CASE, D=D, Dv=Dv))
    o = run("cute", inputs).o
    assert native == [computed] and o.shape[-1] == Dv


@pytest.mark.parametrize(("arch", "in_place"), [("sm_90", (24, 16)), ("sm_100", (64, 64))])
def test_lists_of_the_caller(native: list, monkeypatch: pytest.MonkeyPatch, arch: str, in_place: tuple) -> None:
    monkeypatch.setenv("FLASH_ATTENTION_ARCH", arch)
    inputs = make_inputs(CASE)
    lists = torch.randint(0, 4, (2, 50, 2, 3), generator=torch.Generator().manual_seed(0))
    results = []
    for backend in BACKENDS:
        q, k, v = leaves = [x.detach().requires_grad_() for x in (inputs.q, inputs.k, inputs.v)]
        attend = partial(selected_attention, q, k, v, lists, block_size=16, backend=backend, return_lse=True)
        with torch.no_grad():
            without = attend()
        o, lse = attend()
        results.append((*without, o, lse, *torch.autograd.grad(o, leaves, inputs.do)))
    assert native == [in_place, (64, 64)]
    for got, want in zip(*results, strict=True):
        torch.testing.assert_close(got, want, **EXACT)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", ["batch", "branches' own keys", "the selected branch alone"])
def test_ranks_pad_as_well(native: list, mode: str, name: str) -> None:
    """One rank, which is a group too."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        inputs, cp = make_inputs(CALLS[name]), ContextParallel(dist.group.WORLD, mode=mode)
        got, want = run("cute", inputs, cp=cp), run("eager", inputs)
    finally:
        dist.destroy_process_group()
    assert set(native) == {(64, 64)} and got.aux.block_indices.equal(want.aux.block_indices)
    for each, x in want.tensors().items():
        torch.testing.assert_close(got.tensors()[each], x, **EXACT, msg=lambda m: f"{each}: {m}")


def test_a_graph_pads_as_well(native: list) -> None:
    inputs = make_inputs(CASE)
    tensors = {name: x.requires_grad_() for name, x in inputs.tensors().items()}
    want = nsa(**tensors, config=CONFIG, backend="eager")

    @torch.compile(backend="aot_eager", fullgraph=True)
    def attend(**tensors: torch.Tensor) -> torch.Tensor:
        return nsa(**tensors, config=CONFIG, backend="cute")

    o = attend(**tensors)
    torch.testing.assert_close(o, want, **EXACT)
    for got, expected in zip(*(torch.autograd.grad(x, [*tensors.values()], inputs.do) for x in (o, want))):
        torch.testing.assert_close(got, expected, **EXACT)


ALONE = NSAConfig(branches=("selected",))


@pytest.mark.parametrize(
    ("arch", "options", "read"),
    [
        ("sm_90", {}, (80, 64)),
        ("sm_100", {}, (96, 96)),
        ("sm_90", dict(config=ALONE.replace(q_tile=128, block_size=128)), (80, 64)),
        ("sm_90", dict(config=NSAConfig(), gate="given"), (96, 96)),
        ("sm_90", dict(Hq=6), (96, 96)),
        ("sm_90", dict(Hq=6, lists=(6, 3)), (80, 64)),
        ("sm_90", dict(D=136, Dv=136), (136, 136)),
        ("sm_90", dict(backward=True), (96, 96)),
    ],
)
def test_rows_that_stay_where_they_are(
    monkeypatch: pytest.MonkeyPatch, arch: str, options: dict, read: tuple[int, int]
) -> None:
    """Those of the selected branch alone, without a gradient, if a tile of 128 rows holds whole tokens."""
    monkeypatch.setenv("FLASH_ATTENTION_ARCH", arch)
    sizes = dict(B=1, T=1000, Hq=8, Hkv=2, D=80, Dv=64, dtype=torch.bfloat16, config=ALONE, gate="none", lists=(2, 3))
    shape = Shape(**sizes | dict(backward=False) | options)
    assert support.kernel_dims(shape.call(), needs_grad=shape.backward) == read
    assert (shape.sizes().unpadded is None) == (read == (shape.D, shape.Dv))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
@pytest.mark.parametrize("first", [0, 1, 4])
def test_copies_of_rows_wherever_they_lie(first: int, dtype: torch.dtype) -> None:
    for whole in (torch.randn(2, 3, 40), torch.randn(2, 3, 41), torch.randn(40, 2, 3).permute(1, 2, 0)):
        x = whole.to(dtype)[..., first : first + 24]
        assert padding.widened(x, 64).equal(F.pad(x, (0, 40))) and padding.cut(x, 16).equal(x[..., :16])
        assert padding.widened(x, 64, square=True).equal(F.pad(x, (0, 40, 0, 61)))
        assert padding.cut(x, 16).is_contiguous()


def test_plans_count_the_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = dict(B=1, T=1000, Hq=8, Hkv=2, dtype=torch.bfloat16, config=CONFIG)
    whole, copied = Shape(**sizes, D=128, Dv=128), Shape(**sizes, D=112, Dv=80)
    parts, more = (predict(shape.sizes(), 2, (True,) * 3) for shape in (whole, copied))
    rows, of_keys = 2 * 8 * 1000, 2 * 2 * 1000  # bytes of a column of q, and of k
    assert more["saved"] - parts["saved"] == 128 * (rows + 2 * of_keys)
    assert more["outputs"] - parts["outputs"] == 80 * rows
    assert more["gradients"] - parts["gradients"] == (112 + 80) * (rows + of_keys)
    assert {more[name] - parts[name] for name in ("forward", "backward")} == {0}
    parts, more = (predict(replace(shape, backward=False).sizes(), 2, (False,) * 3) for shape in (whole, copied))
    assert more["forward"] - parts["forward"] == 128 * (rows + 2 * of_keys)
    assert copied.signature().tensors == whole.signature().tensors
    monkeypatch.setenv("FLASH_ATTENTION_ARCH", "sm_90")
    alone = dict(config=ALONE, gate="none", lists=(2, 3), backward=False)
    parts, more = (predict(replace(shape, **alone).sizes(), 2, (False,) * 3) for shape in (whole, copied))
    assert more["forward"] - parts["forward"] == 2 * 128 * of_keys


# On a GPU: options of which every two meet.
DIMS = ((192, 128), (96, 96), (256, 256), (80, 64), (16, 16), (120, 104), (136, 104))
LISTS = [dict(zip(("dims", "G", "by_head"), each)) for each in itertools.product(DIMS[3:], (4, 3, 16), (True, False))]
OPTIONS = dict(dims=DIMS, q_tile=(1, 16, 128))
OPTIONS |= dict(dtype=(torch.bfloat16, torch.float16), lengths=((300, 0, 3, 70), None), gate=("weight", "given"))
OPTIONS |= dict(deterministic=(True, False), compress_weights=(True, False), G=(4, 1, 16))
EVERY = [tuple(zip(OPTIONS, values)) for values in itertools.product(*OPTIONS.values())]


def gpu_case(dims: tuple[int, int], q_tile: int, deterministic: bool, G: int, **options: object) -> Case:
    """A case of these options at 300 tokens."""
    config = NSAConfig(block_counts=4, window_size=100, q_tile=q_tile, deterministic=deterministic)
    return Case(B=2, T=300, Hq=2 * G, Hkv=2, D=dims[0], Dv=dims[1], config=config, **options)


@pytest.mark.gpu
@pytest.mark.parametrize("options", list(map(dict, covering(EVERY, 2))), ids=str)
def test_kernels(options: dict) -> None:
    assert_close_to_reference(gpu_case(**options), "cute", "cuda")


@pytest.mark.gpu
@pytest.mark.sweep
@pytest.mark.parametrize("D", range(16, 257, 8))
def test_kernels_of_every_size(D: int) -> None:
    for Dv in {D, *range(16, D + 1, 40)}:
        for q_tile in (1, 128):
            options = dict(q_tile=q_tile, deterministic=False, G=4, dtype=torch.bfloat16)
            assert_close_to_reference(gpu_case((D, Dv), **options), "cute", "cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("options", LISTS, ids=str)
def test_kernels_over_lists_of_the_caller(options: dict) -> None:
    (D, Dv), G, by_head = options.values()
    inputs = make_inputs(Case(B=2, T=300, Hq=2 * G, Hkv=2, D=D, Dv=Dv, gate="none", dtype=torch.bfloat16), "cuda")
    lists = torch.randint(0, 5, (2, 300, 2 * G if by_head else 2, 3), device="cuda")
    results = []
    for backend, dtype in (("cute", torch.bfloat16), ("eager", torch.float64)):
        q, k, v = (x.detach().to(dtype).requires_grad_() for x in (inputs.q, inputs.k, inputs.v))
        attend = partial(selected_attention, q, k, v, lists, block_size=64, backend=backend)
        with torch.no_grad():
            o = attend()
        results.append((o, *torch.autograd.grad(attend(), (q, k, v), inputs.do.to(dtype))))
    for got, want in zip(*results, strict=True):
        assert (got - want).abs().max() <= 0.02 * want.abs().max()


@pytest.mark.gpu
def test_kernels_of_an_index() -> None:
    config = NSAConfig(rule="index", branches=("selected",), block_counts=4)
    for D, Dv in ((80, 64), (192, 128)):
        case = Case(B=2, T=300, D=D, Dv=Dv, config=config, index_dim=32, gate="none", dtype=torch.bfloat16)
        assert_close_to_reference(case, "cute", "cuda")


@pytest.mark.gpu
@pytest.mark.parametrize(
    "dims, fp8", [((80, 48), False), ((96, 96), False), ((192, 128), False), ((40, 24), True), ((192, 128), True)]
)
@pytest.mark.parametrize("kept", KEPT)
def test_caches(kept: str, dims: tuple[int, int], fp8: bool) -> None:
    """Few queries and many, on contiguous caches and pages, with compressed caches and without."""
    config = NSAConfig(block_size=16, block_counts=4, window_size=20)
    case = Case(lengths=(100, 0, 3, 57), D=dims[0], Dv=dims[1], Hq=8, config=config, dtype=torch.bfloat16)
    caches = Caches(make_inputs(case, "cuda"), *KEPT[kept], fp8=fp8)
    caches.finish([(1, 9, 50, 90), (), (1, 2), (24, 25, 26)], "cute", rtol=0.03 if fp8 else 0.02, atol=0.02)


@pytest.mark.gpu
def test_a_step_on_caches_changes_nothing_else() -> None:
    """NaN beside the caches' rows stays there."""
    case = replace(CACHED, Hq=8, D=40, Dv=24, dtype=torch.bfloat16, config=NSAConfig(block_size=16, block_counts=4))
    given = cached_arguments(case, S=64, device="cuda", beside=8)
    o = nsa_with_kvcache(**given)
    want = nsa(**{name: given[name] for name in ("q", "k", "v")}, config=case.config)
    torch.testing.assert_close(o, want, rtol=0.02, atol=0.02)
    assert given["k_cache"]._base[..., :8].isnan().all()


@pytest.mark.gpu
def test_memory_keeps_to_the_plan() -> None:
    shape = Shape(B=1, T=16384, Hq=16, Hkv=4, D=112, Dv=80, dtype=torch.bfloat16, config=NSAConfig())
    result = measurement(shape, "cute")
    assert result["peak"] <= 1.1 * result["predicted"]["peak"]
