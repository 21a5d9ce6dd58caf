"""Kernels of a decode step are built everywhere, without spills, and on a GPU do what plain PyTorch does.

Those of other calls on caches are built too; `test_kvcache` has their numbers.
"""

# What runs in a worker is imported there, so nothing up here may ask for the kernels.
from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
from fa_compile import Worker, swept
from kernel_cases import faked

from nsa_layer import NSAConfig
from nsa_layer.call import COMPRESSED_CACHES, FP8, TOKEN_CACHES, Call, CallSpec, KVCache
from nsa_layer.checks import starts_of_lengths
from nsa_layer.config import BRANCHES
from nsa_layer.eager.pooling import compress
from nsa_layer.kvcache.eager import attend_cached as attend_in_pytorch
from nsa_layer.kvcache.eager import slots_of
from nsa_layer.kvcache.fp8 import dequantise, in_cache_dtype

Tensor = torch.Tensor
DEFAULT = NSAConfig()
SMALL = NSAConfig(block_size=16, block_counts=5, window_size=40)
INDEX = NSAConfig(rule="index", branches=("selected",))
Splits = tuple[int, int, int]


@dataclass(frozen=True)
class Case:
    """A step of sequences that have `lengths` tokens with it; everything else is drawn from the seed.

    Attributes:
        queries: of each sequence, packed; None: T of each.
        page: tokens of a page; 0: contiguous.
        win: those of the window's own.
        given: the caller gives compressed keys and values.
        new: keys and values of the queries are written by the call.
        fp8: caches are in FP8. Scales of keys are powers of two, with which bf16 has what is read exactly.
        index: heads and dimension of the index' keys, for ``rule="index"``.
    """

    lengths: tuple[int, ...] = (300, 65, 1000)
    T: int = 1
    queries: tuple[int, ...] | None = None
    Hkv: int = 2
    G: int = 4
    D: int = 128
    Dv: int | None = None  # None: D
    dtype: torch.dtype = torch.bfloat16
    config: NSAConfig = DEFAULT
    page: int = 0
    gate: str = "weight"
    win: tuple[str, ...] = ()
    given: bool = False
    projected: bool = False
    new: bool = True
    fp8: bool = False
    index: tuple[int, int] = (0, 0)
    num_splits: int = 0
    capacity: int = 1088
    seed: int = 0

    @property
    def T_of(self) -> tuple[int, ...]:
        return self.queries or (self.T,) * len(self.lengths)

    @property
    def of_v(self) -> int:
        return self.Dv or self.D

    @property
    def spec(self) -> CallSpec:
        index_scale = 1.0 if any(self.index) else None
        return CallSpec(self.config, True, self.D**-0.5, self.queries or None, index_scale=index_scale)

    def call(self, device: str = "cuda") -> Call:
        """The step; slots behind it are NaN."""
        generator = torch.Generator(device).manual_seed(self.seed)

        def draw(*size: int) -> Tensor:
            return torch.randn(*size, generator=generator, device=device).to(self.dtype)

        config, B, (Hkv, G, D) = self.config, len(self.lengths), (self.Hkv, self.G, self.D)
        names = ["k", "v", *self.win, *["k_index"] * any(self.index)]
        compressed = COMPRESSED_CACHES if config.computes("compressed") else ()
        rows = (sum(self.queries),) if self.queries else (B, self.T)
        made: dict[str, Any] = dict(q=draw(*rows, Hkv * G, D), num_splits=self.num_splits)
        memory, tables, at = {}, {}, torch.arange(B)
        if any(self.index):
            made["q_index"] = draw(*rows, Hkv, self.index[1])

        def row(name: str) -> tuple[int, int]:
            return self.index if name == "k_index" else (Hkv, self.of_v if name[0] == "v" else D)

        for name in (*names, *compressed):
            stride = config.stride if "cmp" in name else 1
            capacity = config.compressed_length(self.capacity) if "cmp" in name else self.capacity
            lead = (B + 2, capacity)
            if self.page:
                lead = (B * (self.capacity // self.page) + 3, max(1, self.page // stride))
            stored = FP8 if self.fp8 else self.dtype
            memory[name] = torch.full((*lead, *row(name)), torch.nan, dtype=stored, device=device)
            if self.fp8:
                scale = torch.rand(row(name)[0], generator=generator, device=device) + 1
                scale = 2.0 ** torch.arange(-8, row(name)[0] - 8, device=device) if name[0] == "k" else scale / 150
                made[f"{name}_scale"] = scale
        if self.page:
            for table, name in (("page_table", "k"), ("cmp_page_table", "k_cmp"))[: 1 + (compressed != ())]:
                count = len(memory[name])
                shuffled = torch.randperm(count, generator=generator, device=device)[: count - 3]
                tables[table] = shuffled.view(B, -1).int()
        else:
            at = torch.randperm(B + 2, generator=generator, device=device)[:B]
            made["cache_batch_idx"] = at.int()
        if self.projected:
            made |= {f"compress_{x}_weight": draw(Hkv, d, d) * d**-0.5 for x, d in (("k", D), ("v", self.of_v))}
        parts: dict[str, list[Tensor]] = {name: [] for name in (*names, *compressed)}
        for b, (S, T) in enumerate(zip(self.lengths, self.T_of)):
            for name in names:
                tokens, first = draw(S, *row(name)), S - T if self.new else S
                pages = tables["page_table"][b].tolist() if self.page else [int(at[b])]
                scale, of_cmp = made.get(f"{name}_scale"), made.get(f"{name}_cmp_scale")
                stored = in_cache_dtype(tokens, scale, memory[name].dtype)
                memory[name][slots_of(memory[name], pages, 0, first)] = stored[:first]
                parts[name].append(tokens[first:])
                tokens = dequantise(stored, scale, torch.float32)
                key = f"{name}_cmp"
                if key in parts:
                    weight = made.get(f"compress_{name}_weight")
                    keys = compress(tokens.float()[None], weight, config=config)[0].to(self.dtype)
                    pages = tables["cmp_page_table"][b].tolist() if self.page else [int(at[b])]
                    have = config.compressed_length(first)
                    cache = memory[key]
                    cache[slots_of(cache, pages, 0, have)] = in_cache_dtype(keys[:have], of_cmp, cache.dtype)
                    capacity = -(-T // config.stride)
                    parts[key].append(torch.cat([keys[have:], draw(capacity, *row(name)) * torch.nan])[:capacity])
        join = torch.cat if self.queries else torch.stack
        if self.new:
            made |= {name: join(parts[name]) for name in names}
        if self.given:
            made |= {name: join(parts[name]) for name in COMPRESSED_CACHES}
        if self.queries:
            made["cu_seqlens"] = starts_of_lengths(self.queries, device)
        before = [S - T if self.new else S for S, T in zip(self.lengths, self.T_of)]
        made["cache_seqlens"] = torch.tensor(before, dtype=torch.int32, device=device)
        if self.gate == "weight":
            made["gate_weight"] = draw(Hkv * G, len(config.branches), D) * D**-0.5
        if self.gate == "given":
            made["gates"] = torch.rand(*rows, Hkv * G, len(config.branches), generator=generator, device=device)
        caches = {f"{name}_cache": x for name, x in memory.items()}
        return Call.of(made | tables | caches)._replace(spec=self.spec)


SHORT, UNFORCED = (1, 40, 1088), dict(init_blocks=0, local_blocks=0)
CASES = {
    "default": Case(),
    "pages": Case(page=64, projected=True),
    "draft": Case(T=5, G=3, page=128, config=NSAConfig.paper(), gate="given"),
    "narrow": Case(D=64, G=16, T=2, win=("k_win", "v_win"), gate="none", dtype=torch.float16),
    "one head": Case(G=1, Hkv=3, given=True, T=8, config=SMALL, lengths=(9, 129, 700)),
    "wide group": Case(G=20, config=DEFAULT.replace(**UNFORCED), lengths=(640, 64, 1087), num_splits=7),
    "few blocks": Case(config=SMALL.replace(block_counts=2, compress_size=32, compress_stride=8), lengths=SHORT),
    "first and local": Case(config=SMALL.replace(init_blocks=2, local_blocks=3, block_counts=8), T=3),
    "first alone": Case(config=SMALL.replace(init_blocks=3, local_blocks=0), lengths=SHORT),
    "local alone": Case(config=SMALL.replace(init_blocks=0, local_blocks=3), lengths=(16, 33, 1000), G=20),
    "too many forced": Case(config=SMALL.replace(init_blocks=4, local_blocks=3), lengths=SHORT, T=1),
    "unforced": Case(config=NSAConfig.paper(**UNFORCED), lengths=(1, 63, 1000), G=16),
    "no window": Case(config=DEFAULT.replace(window_size=0), T=2),
    "packed": Case(queries=(3, 0, 1, 8), lengths=(600, 5, 64, 8), page=64, config=SMALL, num_splits=3),
    "there": Case(new=False, T=2, lengths=(128, 2, 1000), win=("v_win",)),
    "long": Case(lengths=(70_001, 33_000), capacity=70_016, G=8, page=64, config=NSAConfig.paper(), Hkv=1),
    "index": Case(config=INDEX, gate="none", index=(2, 32)),
    "index, one key": Case(config=INDEX.replace(**UNFORCED, branches=BRANCHES[1:]), page=64, index=(1, 16), T=5, Hkv=3),
    "index of 128": Case(config=INDEX.replace(local_blocks=0, block_size=128), index=(2, 128), G=20, gate="given"),
    "index, packed": Case(
        queries=(3, 0, 1, 8), lengths=(600, 5, 64, 8), config=INDEX.replace(block_size=16), index=(2, 64)
    ),
    "index, there": Case(config=INDEX.replace(block_counts=5), new=False, T=2, lengths=(128, 2, 1000), index=(1, 64)),
    "FP8": Case(page=64, projected=True, fp8=True),
    "FP8, draft": Case(T=5, G=3, page=128, config=NSAConfig.paper(), gate="given", fp8=True),
    "FP8, narrow": Case(D=64, G=16, T=2, win=("k_win", "v_win"), dtype=torch.float16, fp8=True, given=True),
    "FP8, packed": Case(queries=(3, 0, 1, 8), lengths=(600, 5, 64, 8), config=SMALL, fp8=True, win=("v_win",), D=64),
    "FP8, there": Case(new=False, T=2, lengths=(128, 2, 1000), fp8=True),
    "FP8, long": Case(lengths=(70_001, 33_000), capacity=70_016, G=8, page=64, Hkv=1, fp8=True),
    "FP8, index": Case(
        config=INDEX, lengths=(70_001, 33_000), capacity=70_016, T=2, index=(2, 32), gate="none", fp8=True
    ),
    "FP8, index of 16": Case(
        config=INDEX.replace(**UNFORCED, branches=BRANCHES[1:]), page=64, index=(1, 16), T=5, Hkv=3, D=64, fp8=True
    ),
    "small pages": Case(page=16, projected=True, T=2),
    "FP8, small pages": Case(page=32, fp8=True, lengths=(70, 33, 1000)),
    "index, small pages": Case(config=INDEX, page=16, index=(2, 32), T=2, gate="none"),
    "FP8, index, small pages": Case(config=INDEX, page=32, index=(1, 64), gate="none", fp8=True),
    "long index": Case(config=INDEX, lengths=(70_001, 33_000), capacity=70_016, page=64, G=8, Hkv=8, index=(8, 32)),
    "128 and 72": Case(D=128, Dv=72, G=16, config=NSAConfig.paper(), projected=True, page=64),
    "128, 64 and FP8": Case(D=128, Dv=64, T=3, fp8=True, projected=True, win=("k_win",)),
    "112 and an index": Case(D=112, config=INDEX.replace(branches=BRANCHES[1:]), index=(1, 32), G=20),
    "96": Case(D=96, T=2, page=64, config=SMALL, lengths=(2, 40, 1088)),
    "80 and 48": Case(D=80, Dv=48, config=SMALL, queries=(3, 0, 1, 8), lengths=(600, 5, 64, 8), projected=True),
    "80 and FP8": Case(D=80, G=20, config=SMALL, fp8=True, T=2, given=True),
    "120 and 104": Case(D=120, Dv=104, dtype=torch.float16, gate="given", win=("v_win",)),
    "40 and 24": Case(D=40, Dv=24, G=16, new=False, T=2, lengths=(128, 2, 1000)),
    "16": Case(D=16, Hkv=3, config=NSAConfig.paper(), lengths=(70_001, 33_000), capacity=70_016),
    "48, FP8 and an index": Case(D=48, Dv=32, config=INDEX, index=(2, 32), fp8=True, gate="none", T=3),
    "very long": Case(lengths=(400_001,), capacity=400_064, G=16, Hkv=1),
}


FORCED = [(name, (0, 2, 8)) for name in ("first and local", "first alone", "too many forced", "unforced")]
FORCED += [("no window", (0, 2, 8)), ("no window", (2, 3, 8))]
DIMS = [("128 and 72", (0, 2, 8)), ("128, 64 and FP8", (2, 3, 8)), ("80 and 48", (2, 2, 8)), ("16", (0, 1, 4))]
DIMS += [("112 and an index", (0, 8, 4)), ("80 and FP8", (2, 2, 8)), ("120 and 104", (0, 2, 4))]
DIMS += [("40 and 24", (2, 3, 8)), ("48, FP8 and an index", (0, 2, 4))]
IN_FP8 = [("FP8, draft", (0, 2, 8)), ("FP8, narrow", (2, 3, 8)), ("FP8, packed", (2, 2, 8))]
IN_FP8 += [("FP8, index of 16", (0, 2, 4))]
BY_INDEX = [(name, (0, 2, 4)) for name in CASES if name.startswith("index")]


def decode(call: Call, case: Case) -> tuple[Tensor, tuple[Tensor, ...], Tensor]:
    """o, log-sum-exps, and lists [B, T, Hkv, n]."""
    from nsa_layer.kernels.decode.step import decode_step, supports

    T_of = case.T_of
    assert supports(call)
    n = max(case.config.block_counts, 3)
    lists = torch.full((call.B, max(T_of), case.Hkv, n), -2, dtype=torch.int32, device=call.q.device)
    return *decode_step(call, lists=lists), lists


def copied(call: Call, dtype: torch.dtype | None = None) -> Call:
    def copy(x: object) -> object:
        if not isinstance(x, Tensor):
            return x
        return x.clone() if dtype is None or x.dtype not in (torch.float16, torch.bfloat16) else x.to(dtype)

    return Call(*map(copy, call[:-1]), KVCache(*map(copy, call.cache)))


def eager(call: Call, case: Case) -> tuple[Tensor, tuple[Tensor, ...], list[Tensor | None]]:
    o, lses, auxes = attend_in_pytorch(call._replace(spec=replace(call.spec, backend="eager")), validate=False)
    return o, lses, [None if aux is None else aux.block_indices[0] for aux in auxes]


def fake_step(name: str, splits: Splits) -> torch.Size:
    with pytest.MonkeyPatch.context() as patch:
        divide(patch, splits)
        return decode(faked(partial(CASES[name].call, "cpu")), CASES[name])[0].shape


def divide(patch: pytest.MonkeyPatch, splits: Splits) -> None:
    """Steps divide keys so. The first of `splits` is 0 where compressed keys have no launch of their own; CTAs
    of 4 warps, the last, are many."""
    from nsa_layer.kernels.decode import step

    patch.setattr(step, "_splits", lambda call, T: splits)
    patch.setattr(step, "_token_units", lambda call: (1 << 20) * (splits[2] == 4))


def stack(name: str, splits: Splits) -> list[list[int]]:
    """Bytes of stack of the functions of each of the step's kernels."""
    from fa_cubin import machine_code

    return [code.stack for code in machine_code(fake_step, name, splits)]


@pytest.mark.parametrize(
    "step", [("pages", (0, 2, 8)), ("narrow", (2, 3, 8)), *swept([*FORCED, *BY_INDEX, *DIMS]), *IN_FP8], ids=str
)
def test_builds_everywhere(compiler: Worker, step: tuple[str, Splits]) -> None:
    name, splits = step
    case = CASES[name]
    lead = (sum(case.queries),) if case.queries else (len(case.lengths), case.T)
    assert compiler.trace(fake_step, name, splits) == (*lead, case.Hkv * case.G, case.of_v)


@pytest.mark.sweep
@pytest.mark.parametrize(
    "name, splits",
    [
        *product(["draft", "narrow", "long"], [(0, 8, 8), (2, 8, 8)]),
        *product(["index, one key", "long index"], [(0, 8, 4)]),
        *product(["FP8", "FP8, draft"], [(0, 8, 8), (2, 8, 8), (2, 8, 4)]),
        *product(["128 and 72", "128, 64 and FP8"], [(0, 8, 8), (2, 8, 8), (2, 8, 4)]),
        ("112 and an index", (0, 8, 4)),
        ("80 and FP8", (2, 8, 8)),
    ],
)
def test_registers_suffice(compiler: Worker, name: str, splits: Splits) -> None:
    """A step is one launch, or the compressed branch, or an index, has one before it."""
    sizes = compiler.run(stack, name, splits)
    assert len(sizes) == 1 + (splits[0] > 0 or "index" in name) and not any(map(any, sizes)), sizes


def cache_rows(moves: bool, fp8: bool) -> tuple[int, ...]:
    """In a worker: slots and what is invalid, or rows moved to caches and back."""
    from nsa_layer.kernels.cache_rows.complete import complete_blocks
    from nsa_layer.kernels.cache_rows.invalidate import invalidate_rows
    from nsa_layer.kernels.cache_rows.locate import CacheSlots, locate
    from nsa_layer.kernels.cache_rows.move import append, clear, gather

    def make(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="cuda")

    seqlens, starts, pages = (make(*shape, dtype=torch.int32) for shape in ((3,), (4,), (3, 4)))
    caches, x = ((make(*lead, 2, 128), make(*lead, 2, 64)) for lead in ((3, 256), (21,)))
    scales = (make(2, dtype=torch.float32),) * 2 if fp8 else (None, None)
    caches = tuple(cache.to(FP8) for cache in caches) if fp8 else caches
    given = dict(cache=caches[0], table=pages, cmp_cache=caches[0], cmp_table=pages, adds=True)
    given |= dict(span=32, stride=16, window=64)
    slots = make(len(CacheSlots), 3, dtype=torch.int32)
    if not moves:
        slots = locate(seqlens, T=7, cu_seqlens=starts, **given)
        invalidate_rows(x[0], [make(2, 21, dtype=torch.float32)] * 3, slots, starts)
        return tuple(slots.shape)
    blocks = make(3, 16, 2, 128, dtype=caches[0].dtype), None
    more, none = dict(scales=(*scales, None, None, *scales)), [None] * 4
    append((*x, *none), (*caches, None, None, *blocks), (pages, pages), slots, (starts, None), **more)
    gather(caches, x, pages, slots, (CacheSlots.START, CacheSlots.END), starts, scales)
    sizes = dict(block_size=32, stride=16, most=3, scales=scales, compressed_scales=scales[::-1])
    complete_blocks(caches, blocks, (pages, pages), slots, **sizes)
    if fp8:
        beside = (make(3, 256, 2, 65, dtype=FP8).narrow(-1, 1, 64), None), (x[1].float(), None)
        gather(*beside, pages, slots, (CacheSlots.START, CacheSlots.END), starts)
        append((*none, *beside[1]), (*none, *beside[0]), (None, None), slots, (None, starts), **more)
        return tuple(slots.shape)
    beside = None, None, make(3, 256, 2, 65).narrow(-1, 1, 64)
    new = None, None, make(3, 7, 2, 64)
    append((*new, *[None] * 3), (*beside, None, *blocks), (None, None), slots, behind="rows")
    append((*new, *[None] * 3), (*beside, *[None] * 3), (pages, None), slots, behind="block")
    clear(x, slots, CacheSlots.END, starts)
    clear(caches, slots, CacheSlots.END)
    return tuple(slots.shape)


@pytest.mark.parametrize("moves, fp8", [(False, False), (True, False), (True, True)])
def test_kernels_of_cache_rows_are_traced(compiler: Worker, moves: bool, fp8: bool) -> None:
    from nsa_layer.kernels.cache_rows.locate import CacheSlots

    assert compiler.trace(cache_rows, moves, fp8) == (len(CacheSlots), 3)


def apart(x: torch.Tensor) -> torch.Tensor:
    """x of 8 bits, its rows 8 bytes apart."""
    return torch.nn.functional.pad(x.view(torch.uint8), (0, 8)).view(x.dtype)[..., :-8]


def test_what_the_kernels_take() -> None:
    """Calls that they do not take go as those of many queries do."""
    from nsa_layer.kernels.decode.step import supports

    def taken(case: Case = Case(), **changes: object) -> bool:
        call = case.call("cpu")
        return supports(Call.of(call._asdict() | call.cache._asdict() | changes)._replace(spec=call.spec))

    assert taken() and taken(CASES["packed"]) and taken(CASES["narrow"]) and taken(Case(T=8))
    assert taken(CASES["index"]) and taken(CASES["index, one key"]) and not taken(replace(CASES["index"], T=9))
    assert not taken(replace(CASES["index, one key"], T=8, Hkv=9))
    assert not taken(replace(CASES["index"], config=INDEX.replace(branches=BRANCHES)))
    assert not taken(Case(T=9)) and not taken(Case(D=136, Dv=128)) and not taken(Case(dtype=torch.float32))
    assert taken(Case(D=104, Dv=40)) and not taken(Case(D=104, fp8=True)) and taken(Case(D=112, Dv=16, fp8=True))
    caches = {name: x for name, x in Case(D=104, fp8=True).call("cpu").cache._asdict().items() if name[-6:] == "_cache"}
    assert not taken(Case(D=104, fp8=True), **{name: x if x is None else apart(x) for name, x in caches.items()})
    assert not taken(k_cmp_cache=None) and not taken(block_indices=torch.zeros(3, 1, 2, 4, dtype=torch.int32))
    assert not taken(Case(config=DEFAULT.replace(block_size=8))) and not taken(Case(config=DEFAULT.replace(q_tile=2)))
    assert not taken(v_cache=torch.empty(5, 1088, 2, 132, dtype=torch.bfloat16)[..., 4:])


def assert_step(case: Case) -> None:
    """The step on the kernels and in plain PyTorch: outputs, lists, and the caches that it leaves."""
    ours = case.call()
    theirs, exact = copied(ours), copied(ours, torch.float64)
    o, lses, lists = decode(ours, case)
    o_eager, lses_eager, lists_eager = eager(theirs, case)
    o_exact, lses_exact, _ = eager(exact, case)
    error, error_eager = ((x.double() - o_exact).abs().max().item() for x in (o, o_eager))
    rounding = torch.finfo(case.dtype).eps * o_exact.abs().max().item()
    for b, (T, want) in enumerate(zip(case.T_of, lists_eager)):
        for t, h in product(range(T), range(case.Hkv)) if want is not None else ():
            got, wanted = ([x for x in own[t, h].tolist() if x >= 0] for own in (lists[b], want))
            assert got == wanted, f"{case}: list of sequence {b}, head {h}, token {t}: {got}, not {wanted}"
    for part, got, want in zip(("cmp", "slc", "swa"), lses, lses_exact):
        assert torch.equal(got.isneginf(), want.isneginf()), f"{case}: lse_{part}"
        torch.testing.assert_close(got.double(), want, rtol=1e-2, atol=1e-2, msg=lambda m: f"{case} {part}: {m}")
    assert error <= 2 * error_eager + rounding, f"{case}: {error} against {error_eager}"
    for key in TOKEN_CACHES + COMPRESSED_CACHES:
        cache, want = (getattr(call.cache, f"{key}_cache") for call in (ours, theirs))
        if cache is not None and key in TOKEN_CACHES:
            assert torch.equal(cache.view(torch.uint8), want.view(torch.uint8)), f"{case}: {key}_cache"
        elif cache is not None:
            close = dict(rtol=1 / 7, atol=2**-9) if case.fp8 else {}  # a neighbour, where the mean lies between two
            cache, want = (x.float() if case.fp8 else x for x in (cache, want))
            torch.testing.assert_close(cache, want, equal_nan=True, **close, msg=lambda m: f"{case} {key}_cache: {m}")


@pytest.mark.parametrize(
    ("Hq", "Hkv", "B", "T", "S", "splits"),
    [
        (32, 8, 1, 1, 65_536, (16, 8, 4)),  # the CTAs of both launches fit the GPU
        (64, 4, 16, 1, 65_536, (0, 2, 8)),
        (64, 4, 1, 1, 1 << 20, (43, 8, 8)),  # more compressed keys than a cluster is for
        (32, 8, 64, 1, 65_536, (0, 1, 4)),
        (32, 8, 8, 4, 65_536, (4, 1, 4)),  # queries share compressed keys
        (32, 1, 128, 1, 65_536, (1, 1, 4)),  # two clusters have a group's heads, and the choice needs all
    ],
)
def test_splits(Hq: int, Hkv: int, B: int, T: int, S: int, splits: Splits, monkeypatch: pytest.MonkeyPatch) -> None:
    from nsa_layer.kernels.decode import step

    monkeypatch.setenv("FLASH_ATTENTION_NUM_SMS", "132")
    q, cache = torch.empty(B, T, Hq, 128, device="meta"), torch.empty(B, S, Hkv, 128, device="meta")
    call = Call(q, None, None, spec=CallSpec(DEFAULT, True, 1.0), cache=KVCache(cache, cache, cache))
    assert step._splits(call, T) == splits


@pytest.mark.parametrize(
    ("dtype", "B", "T", "config", "keys"),
    [
        (FP8, 64, 1, DEFAULT, 32),
        (FP8, 1, 1, DEFAULT, 16),
        (FP8, 64, 2, DEFAULT, 16),
        (FP8, 64, 1, SMALL, 16),
        (torch.bfloat16, 64, 1, DEFAULT, 16),
    ],
)
def test_keys_of_a_step(
    dtype: torch.dtype, B: int, T: int, config: NSAConfig, keys: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    from nsa_layer.kernels.decode import step

    monkeypatch.setenv("FLASH_ATTENTION_NUM_SMS", "132")
    cache = torch.empty(B, 1024, 8, 128, device="meta", dtype=dtype)
    call = Call(torch.empty(B, T, 32, 128, device="meta"), None, None, spec=CallSpec(config, True, 1.0))
    assert step._kernel_spec(call._replace(cache=KVCache(cache, cache, cache)), T).keys == keys


DIVIDED = product(
    ("pages", "draft", "packed", "very long", "FP8", "FP8, long"),
    ((0, 1, 4), (0, 2, 8), (3, 2, 8)),
)


@pytest.mark.gpu
@pytest.mark.parametrize("name, splits", [*((name, None) for name in CASES), *DIVIDED])
def test_against_eager(name: str, splits: Splits | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """With keys divided as a step does it, and otherwise."""
    if splits is not None:
        divide(monkeypatch, splits)
    assert_step(CASES[name])


@pytest.mark.gpu
@pytest.mark.parametrize("fp8", [False, True])
def test_token_by_token_in_a_graph(fp8: bool) -> None:
    """One graph, replayed while lengths grow past the ends of blocks and pages, does what eager does for each token."""
    case = Case(lengths=(120, 3, 255), page=64, config=SMALL.replace(block_size=64), seed=1, fp8=fp8)
    call = case.call()
    decode(copied(call), case)  # compiled before the capture
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    with torch.cuda.graph(graph, stream=stream):
        o, lses, _ = decode(call, case)
    generator = torch.Generator("cuda").manual_seed(2)
    for step in range(70):
        for x in (call.q, call.k, call.v):
            x.copy_(torch.randn(x.shape, generator=generator, device="cuda"))
        theirs = copied(call)
        graph.replay()
        o_eager, lses_eager, _ = eager(theirs, case)
        torch.testing.assert_close(o, o_eager, rtol=2e-2, atol=2e-2, msg=lambda m: f"step {step}: {m}")
        for got, want in zip(lses, lses_eager):
            torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-3, msg=lambda m: f"step {step}: {m}")
        call.cache.cache_seqlens.add_(1)


@pytest.mark.gpu
def test_numbers_of_queries_may_be_known_on_the_gpu_alone() -> None:
    """Starts that are none make rows of NaN, and write nowhere else."""
    from nsa_layer.kernels.decode.step import decode_step, supports

    case, call = CASES["packed"], CASES["packed"].call()
    spec = replace(case.spec, lengths=None, bound=8)
    ours, theirs = copied(call), copied(call)
    ours = ours._replace(spec=spec)
    assert supports(ours)
    o, lses = decode_step(ours)
    want, want_lses, _ = decode(theirs, case)
    for got, expected in zip((o, *lses, ours.cache.k_cache), (want, *want_lses, theirs.cache.k_cache)):
        assert torch.equal(got.nan_to_num(7.0), expected.nan_to_num(7.0))
    bad = copied(call)._replace(spec=spec)
    bad.cu_seqlens.copy_(torch.tensor([0, 3, 3, 4, 1 << 30]))
    before = bad.cache.k_cache.clone()
    o, _ = decode_step(bad)
    assert torch.equal(o[:4], want[:4])
    last = bad.cache.page_table[3].long()
    assert torch.equal(bad.cache.k_cache[last].view(torch.int16), before[last].view(torch.int16))


@pytest.mark.gpu
@pytest.mark.parametrize("page", [0, 64])
def test_rows_out_of_the_caches(page: int) -> None:
    """A sequence that its numbers lead out of the caches writes nothing and is NaN; the others are as if alone."""
    case = Case(lengths=(300, 64, 1000, 77), page=page)
    call = case.call()
    kept = copied(call)
    bad = copied(call)
    bad.cache.cache_seqlens[1] = case.capacity
    if page:
        bad.cache.page_table[2, 3] = -1
        bad.cache.cmp_page_table[3, 0] = len(bad.cache.k_cmp_cache)
    else:
        bad.cache.cache_batch_idx[2] = len(bad.cache.k_cache)
        bad.cache.cache_seqlens[3] = -5
    before = copied(bad)
    o, lses, _ = decode(bad, case)
    good, good_lses, _ = decode(kept, case)
    assert torch.equal(o[0], good[0]) and o[1:].isnan().all()
    for lse, whole in zip(lses, good_lses):
        assert torch.equal(lse[0], whole[0]) and lse[1:].isnan().all()
    for name in ("k", "v", "k_cmp", "v_cmp"):
        x, was, wrote = (getattr(c.cache, f"{name}_cache") for c in (bad, before, kept))
        untouched = (x.view(torch.int16) == was.view(torch.int16)) | (x.view(torch.int16) == wrote.view(torch.int16))
        assert untouched.all()
        changed = (x.view(torch.int16) != was.view(torch.int16)).flatten(2).any(-1).sum().item()
        assert changed <= 1
