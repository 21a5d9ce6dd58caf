"""Lists by token of a case, their pairs by key block as the dk and dv pass takes them, and what that has to give."""

import math
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from fa_dq import as_rows

from fuzz.attention import Tensors
from fuzz.oracle import dense


@dataclass(frozen=True)
class TokenCase:
    """A call with lists by token."""

    lengths: tuple[int, ...]  # queries of the sequences: of a batch if `packed` is not set
    G: int
    D: int = 128
    Hkv: int = 1
    n: int = 4  # entries of a list; some are padding, and some are there twice
    block: int = 64
    cap: int = 4096  # tokens of a work tile at most
    causal: bool = True
    packed: bool = False
    add: bool = False
    dtype: str = "bfloat16"
    start: int = 64
    past: int = 0  # keys before the first query, in every sequence
    by_head: bool = False  # a list for each query head
    seed: int = 0

    @property
    def list_heads(self) -> int:
        return self.Hkv * self.parts

    @property
    def parts(self) -> int:
        """Lists of a key/value head."""
        return self.G if self.by_head else 1


@dataclass(frozen=True)
class TokenInputs:
    """q, do [B, T, Hq, D], packed [total, Hq, D]; k, v; lists of each sequence, [T, list heads, n]."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    do: torch.Tensor
    lists: list[torch.Tensor]


def make_inputs(case: TokenCase, device: str = "cuda") -> TokenInputs:
    generator = torch.Generator().manual_seed(case.seed)

    def draw(heads: int, past: int) -> torch.Tensor:
        lengths = [T + past for T in case.lengths]
        tokens = (sum(lengths),) if case.packed else (len(lengths), lengths[0])
        x = torch.randn(*tokens, heads, case.D, generator=generator)
        return x.to(getattr(torch, case.dtype)).to(device)

    q, do = (draw(case.G * case.Hkv, 0) for _ in range(2))
    k, v = (draw(case.Hkv, case.past) for _ in range(2))
    return TokenInputs(q, k, v, do, [draw_lists(case, T, generator).to(device) for T in case.lengths])


def draw_lists(case: TokenCase, T: int, generator: torch.Generator) -> torch.Tensor:
    """Block 0, for causal ones the token's own, and others at random, in any order; int32 [T, list heads, n]."""
    N, own = -(-(T + case.past) // case.block), (torch.arange(T)[:, None] + case.past) // case.block
    last = own if case.causal else torch.full_like(own, N - 1)
    drawn = (torch.rand(T, case.list_heads, case.n, generator=generator) * (last[..., None] + 1)).int()
    drawn[torch.rand(drawn.shape, generator=generator) < 0.2] = -1
    drawn[..., 0] = own
    drawn[..., -1] = 0
    order = torch.rand(drawn.shape, generator=generator).argsort(-1)
    return drawn.gather(-1, order)


def blocks_of(case: TokenCase) -> list[int]:
    return [-(-(T + case.past) // case.block) for T in case.lengths]


def pairs_of(case: TokenCase, lists: list[torch.Tensor]) -> Any:
    """`KeyPairs` of the lists."""

    device, counts = lists[0].device, blocks_of(case)
    before = [0, *accumulate(counts)]
    blocks = before[-1] if case.packed else counts[0]
    rows, positions = [], []
    for b, listed in enumerate(lists):
        T, H, n = listed.shape
        token, head = torch.arange(T, device=device)[:, None, None], torch.arange(H, device=device)[:, None]
        first = head // case.parts
        first = (first * blocks + before[b]) if case.packed else (b * case.Hkv + first) * blocks
        kept = (listed >= 0) & (listed < counts[b])
        if case.causal:
            kept &= listed * case.block <= token + case.past
        rows.append((first + listed)[kept].long())
        positions.append((token * case.parts + head % case.parts).expand_as(listed)[kept].long())
    capacity = 1 << 40
    pairs = torch.unique(torch.cat(rows) * capacity + torch.cat(positions))  # ascending
    row_pairs = torch.bincount(pairs // capacity, minlength=blocks * case.Hkv * (1 if case.packed else len(lists)))
    return deal(pairs % capacity, row_pairs, case, None if not case.packed else before)


def deal(tokens: torch.Tensor, row_pairs: torch.Tensor, case: TokenCase, cu_blocks: list[int] | None) -> Any:
    """Rows as work tiles of at most `cap` pairs; what lies past the last is never read."""
    from flash_attn.cute.bwd_dkdv_sm90.spec import KeyPairs

    items, row_items, partials, begin = [], [0], 0, 0
    for row, count in enumerate(row_pairs.tolist()):
        pieces = max(1, -(-count // case.cap))
        length = -(-count // pieces)
        for i in range(pieces):
            piece = min(i * length, count), min((i + 1) * length, count)
            items.append((row, begin + piece[0], begin + piece[1], partials + i if pieces > 1 else -1))
        partials += pieces if pieces > 1 else 0
        begin += count
        row_items.append(len(items))
    items += [(1 << 30,) * 4] * 3
    tensors = (torch.tensor(x, dtype=torch.int32, device=tokens.device) for x in (items, row_items))
    cu = None if cu_blocks is None else torch.tensor(cu_blocks, dtype=torch.int32, device=tokens.device)
    return KeyPairs(tokens.int(), *tensors, partials, case.block, cu, case.by_head)


def visible(case: TokenCase, listed: torch.Tensor) -> torch.Tensor:
    """The keys that each query of one sequence sees, [heads, queries, keys]."""
    keys, device = listed.shape[0] + case.past, listed.device
    N = -(-keys // case.block)
    table = torch.zeros(*listed.shape[:2], N + 1, dtype=torch.bool, device=device)
    table.scatter_(2, listed.long().where((listed >= 0) & (listed < N), N), True)
    shown = table[..., :N].repeat_interleave(case.block, -1)[..., :keys].transpose(0, 1)
    if case.causal:
        at = torch.arange(keys, device=device)
        shown = shown & (at[None] <= at[case.past :, None])
    return shown.repeat_interleave(case.G // case.parts, 0)


def reference(case: TokenCase, x: TokenInputs, dtype: torch.dtype) -> Tensors:
    lengths = tuple((T, T + case.past) for T in case.lengths)
    return dense(
        (x.q, x.k, x.v), x.do, lambda b: visible(case, x.lists[b]), dtype, lengths=lengths if case.packed else None
    )


def row_sums(case: TokenCase, exact: Tensors) -> tuple[torch.Tensor, torch.Tensor]:
    """dpsum and lse_log2, NaN where nothing is to be read."""
    spare = len(case.lengths) * case.start if case.packed else 0
    lengths = case.lengths if case.packed else case.lengths[:1]
    rows = -(-(sum(lengths) + spare) // case.start) * case.start
    shape = (*(() if case.packed else (len(case.lengths),)), case.G * case.Hkv, rows)
    return as_rows(exact["o"], exact["do"], exact["lse"], lengths, shape, case.start, (math.nan, math.nan))


def call(case: TokenCase, x: TokenInputs, rows: tuple[torch.Tensor, torch.Tensor], dk: torch.Tensor, dv: torch.Tensor):
    from flash_attn.cute.bwd_dkdv_sm90.interface import backward_dkdv

    def tensor(values: list[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=x.q.device)

    more: dict[str, Any] = dict(causal=case.causal, add=case.add, start=case.start)
    if case.packed:
        ends = [tensor([0, *accumulate(T + past for T in case.lengths)]) for past in (0, case.past)]
        more |= dict(zip(("cu_seqlens_q", "cu_seqlens_k"), ends))
    if case.past:
        more["q_offset"] = tensor([case.past] * len(case.lengths))
    backward_dkdv(x.q, x.k, x.v, x.do, *rows, pairs_of(case, x.lists), dk=dk, dv=dv, **more)


def rounded_sums(case: TokenCase, x: TokenInputs) -> float:
    """The error of dk from rounding dP and dpsum to fp32: of the group's rows that see one key, as in `fa_dq`."""
    rows, values = (float(t.double().norm(dim=-1).max()) for t in (x.do, x.v))
    return case.G * torch.finfo(torch.float32).eps * rows * values * float(x.q.abs().max()) * case.D**-0.5
