"""Backward of the three branches: each call by itself, all together, and in fp64; gates are numbers, some of them 0."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from nsa_layer.call_spec import CallSpec
from nsa_layer.compress import mean_pool
from nsa_layer.config import NSAConfig
from nsa_layer.cute.packing import Packing
from nsa_layer.select import choose_blocks

Tensor = torch.Tensor
Grads = dict[str, Tensor]
NAMES = ("dq", "dk", "dv", "dk_cmp", "dv_cmp")


@dataclass(frozen=True)
class Setup:
    """Three calls, and what they are run on; ``lengths`` for packed sequences, in place of B and T.

    two_passes: how the selected branch's backward is called.
    """

    D: int = 128
    heads: tuple[int, int] = (8, 2)
    block_size: int = 64
    B: int = 2
    T: int = 1000
    lengths: tuple[int, ...] | None = None
    causal: bool = True
    deterministic: bool = False
    two_passes: bool = False
    window: int = 200
    dtype: torch.dtype = torch.bfloat16

    @property
    def spec(self) -> CallSpec:
        config = NSAConfig(block_size=self.block_size, window_size=self.window, deterministic=self.deterministic)
        return CallSpec(config, self.causal, self.D**-0.5, self.lengths)


@dataclass
class Data:
    """What a setup's calls read; o and lse of the compressed branch, the window and the selected one, and the gates
    fp32 [..., Hq] of each."""

    setup: Setup
    q: Tensor
    k: Tensor
    v: Tensor
    k_cmp: Tensor
    v_cmp: Tensor
    do: Tensor
    before: tuple[Tensor, Tensor, Tensor]  # what dq, dk, dv hold already
    chosen: Tensor
    cu_seqlens: Tensor | None
    sparsity: Any = None
    sparsity_of_queries: Any = None
    outputs: tuple[tuple[Tensor, Tensor], ...] = ()
    gates: tuple[Tensor, ...] = ()


def sequences(data: Data, x: Tensor, compressed: bool = False) -> list[Tensor]:
    """Views [T, ...] of every sequence."""
    if data.setup.lengths is None:
        return list(x)
    config, lengths = data.setup.spec.config, data.setup.lengths
    return list(x.split([config.compressed_length(n) if compressed else n for n in lengths]))


def make(setup: Setup, device: str = "cuda", seed: int = 0) -> Data:
    """Tensors, the choice, lists, and forward of each branch."""
    from nsa_layer.cute import branch_options, selected_branch
    from nsa_layer.cute.forward import attend

    torch.manual_seed(seed)
    (Hq, Hkv), D, spec = setup.heads, setup.D, setup.spec
    config, lengths = spec.config, setup.lengths
    lead = (setup.B, setup.T) if lengths is None else (sum(lengths),)

    def tensor(H: int) -> Tensor:
        return torch.randn(*lead, H, D, device=device, dtype=setup.dtype)

    q, do, dq, k, v, dk, dv = (tensor(H) for H in (Hq, Hq, Hq, Hkv, Hkv, Hkv, Hkv))
    before = (dq * 0.02, dk * 0.02, dv * 0.02)
    whole = [(q, k, v)] if lengths is None else zip(*(x[None].split(lengths, 1) for x in (q, k, v)))
    pooled, choices = [], []
    options = dict(config=config, causal=setup.causal, softmax_scale=spec.softmax_scale)
    width = config.list_width(max(lengths) if lengths else setup.T)
    for q_part, *parts in whole:
        if q_part.shape[1] == 0:
            continue
        means = [mean_pool(part, config=config) for part in parts]
        chosen = choose_blocks(q_part, means[0], **options)
        choices.append(torch.nn.functional.pad(chosen, (0, width - chosen.shape[-1]), value=-1))
        pooled.append([mean.to(setup.dtype) for mean in means])
    cu_seqlens = None
    if lengths is None:
        (k_cmp, v_cmp), chosen = pooled[0], choices[0]
    else:
        k_cmp, v_cmp = (torch.cat(parts, 1)[0] for parts in zip(*pooled))
        chosen = torch.cat(choices, 2)[0]
        cu_seqlens = torch.tensor([0, *lengths]).cumsum(0).to(device, torch.int32)
    data = Data(setup, q, k, v, k_cmp, v_cmp, do, before, chosen, cu_seqlens)
    for backward in (False, True):
        tile = (selected_branch.backward_tile if backward else selected_branch.forward_tile)(q.device, setup.block_size)
        static = dict(spec=spec, tile=tile, backward=backward, cu_seqlens=cu_seqlens)
        sparsity = selected_branch.selected_sparsity(
            chosen, q.shape[-3], setup.heads, ordered=backward and setup.deterministic, **static
        )
        if not backward:
            data.sparsity_of_queries = sparsity
            packing = Packing.of(spec, q.device)
            data.outputs = (
                attend(q, k_cmp, v_cmp, spec, branch_options.compressed_options(spec, packing)),
                attend(q, k, v, spec, branch_options.window_options(spec, packing)),
                attend(q, k, v, spec, selected_branch.selected_options(sparsity, packing)),
            )
    data.sparsity = sparsity
    gates = [torch.rand(q.shape[:-1], device=device) for _ in range(3)]
    data.gates = tuple(g.masked_fill(torch.rand_like(g) < 0.1, 0.0) for g in gates)
    return data


def calls(data: Data, *, two_passes: bool = False) -> tuple:
    """As `nsa_layer.cute.grad_accum` takes them."""
    from nsa_layer.cute import branch_options, selected_branch
    from nsa_layer.cute.grad_accum import BranchCall

    spec = data.setup.spec
    packing, fixed = (
        Packing.of(spec, data.q.device),
        dict(deterministic=spec.config.deterministic),
    )
    cmp = branch_options.compressed_options(spec, packing) | fixed
    selected = selected_branch.selected_options(data.sparsity, packing) | fixed
    if two_passes:
        selected |= dict(without_dq=True)
    window = branch_options.window_options(spec, packing) | fixed
    of_tokens = (BranchCall(data.k, data.v, window), BranchCall(data.k, data.v, selected))
    return (BranchCall(data.k_cmp, data.v_cmp, cmp), *of_tokens) if data.k_cmp.shape[-3] else of_tokens


def row_sums(data: Data, layouts: Any) -> list[tuple[Tensor, Tensor]]:
    """dpsum and lse_log2 of each branch, gates in the latter, as the layouts want them; the rest is never read."""
    rows = []
    for (o, lse), g in zip(data.outputs, data.gates):
        dpsum = (o.float() * data.do.float()).sum(-1).movedim(-1, -2)
        logs = (lse - g.movedim(-1, -2).log()) * math.log2(math.e)
        logs = torch.where(lse.isneginf(), 0.0, logs)
        rows.append(tuple(_padded(data, x, layouts, fill) for x, fill in ((dpsum, 0.0), (logs, math.inf))))
    return rows[-len(layouts.calls) :]


def _padded(data: Data, x: Tensor, layouts: Any, fill: float) -> Tensor:
    layout = layouts.calls[-1]
    out = torch.full(layout.row_shape, math.nan, device=x.device)
    start, tiles, begin = layout.dq.start, [each.dq.tile.rows for each in layouts.calls], 0
    for b, length in enumerate(data.setup.lengths or [x.shape[-1]]):
        at = (begin + b * start) // start * start
        out[..., at : at + max(-(-length // tile) * tile for tile in tiles)] = fill
        out[..., at : at + length] = x[..., begin : begin + length]
        begin += length
    return out


def together(data: Data, rows: Any = None, layouts: Any = None, of_calls: Any = None) -> Grads:
    """Gradients by shared calls, on top of what was there before."""
    from flash_attn.cute.bwd_sm90.two_pass import backward_dq
    from flash_attn.cute.interface import _flash_attn_bwd
    from nsa_layer.cute import selected_branch
    from nsa_layer.cute.grad_accum import GradAccumulators, backward_layouts

    spec, two_passes = data.setup.spec, data.setup.two_passes
    of_calls, scale = of_calls or calls(data, two_passes=two_passes), dict(softmax_scale=spec.softmax_scale)
    layouts = layouts or backward_layouts(data.q, of_calls, key=spec)
    rows = rows or row_sums(data, layouts)
    sums, stored = GradAccumulators(layouts, data.q.device, **scale), []
    for call, row in zip(of_calls, rows):
        shared = sums.share(*row, with_dq=not call.options.get("without_dq"))
        stored.append(
            _flash_attn_bwd(data.q, call.k, call.v, None, data.do, None, **scale, shared=shared, **call.options)[1:]
        )
    dk_cmp = dv_cmp = None
    if len(of_calls) == 3:
        dk_cmp, dv_cmp = stored[0]
        if dk_cmp is None:
            dk_cmp, dv_cmp = torch.empty_like(data.k_cmp), torch.empty_like(data.v_cmp)
            sums.write_compressed(dk_cmp, dv_cmp, of_calls[0].options.get("cu_seqlens_k"))
    dq, dk, dv = (x.clone() for x in data.before)
    accum = sums.take_dq(layouts.calls[-1]) if two_passes else None
    sums.write_dq(dq, data.cu_seqlens, add=True)
    if two_passes:
        into = dict(dq=dq, accum=accum, add=True, start=layouts.calls[-1].dq.start)
        options = selected_branch.dq_options(data.sparsity_of_queries, Packing.of(spec, data.q.device))
        backward_dq(data.q, data.k, data.v, data.do, *rows[-1], **scale, **into, **options)
    sums.add_dk_dv(dk, dv, tuple(stored[-2:]), data.cu_seqlens)
    return dict(zip(NAMES, (dq, dk, dv, dk_cmp, dv_cmp)))


def apart(data: Data) -> Grads:
    """Gradients by calls as they are without sharing, summed in fp32 and rounded at the end."""
    from flash_attn.cute.interface import _flash_attn_bwd

    parts = []
    of_calls = calls(data)
    outputs, gates = data.outputs[-len(of_calls) :], data.gates[-len(of_calls) :]
    for call, (o, lse), g in zip(of_calls, outputs, gates):
        do = (data.do * g.unsqueeze(-1)).to(data.do.dtype)
        scale = data.setup.spec.softmax_scale
        parts.append(_flash_attn_bwd(data.q, call.k, call.v, o, do, lse, softmax_scale=scale, **call.options))
    dq, dk, dv = (x.float() for x in data.before)
    dq = dq + sum(part[0].float() for part in parts)
    dk, dv = (x + sum(part[i].float() for part in parts[-2:]) for i, x in ((1, dk), (2, dv)))
    of_blocks = parts[0][1:] if len(parts) == 3 else (None, None)
    return dict(zip(NAMES, (*(x.to(data.q.dtype) for x in (dq, dk, dv)), *of_blocks)))


def exact(data: Data) -> Grads:
    """Gradients by autograd in fp64, from dense masks."""
    setup, config = data.setup, data.setup.spec.config
    leaves = [x.double().requires_grad_() for x in (data.q, data.k, data.v, data.k_cmp, data.v_cmp)]
    pieces = [sequences(data, x, i > 2) for i, x in enumerate(leaves)]
    dos, total = sequences(data, data.do.double()), 0.0
    gates = [sequences(data, g.double()) for g in data.gates]
    tile = 0
    for b, (q, k, v, k_cmp, v_cmp) in enumerate(zip(*pieces)):
        tiles = config.num_tiles(len(q))
        chosen = data.chosen[b] if setup.lengths is None else data.chosen[:, tile : tile + tiles]
        tile += tiles
        t = torch.arange(len(q), device=q.device)
        causal = t[:, None] >= t[None] if setup.causal else torch.ones_like(t[:, None] >= t[None])
        near = (t[:, None] - t[None]).abs() < config.window_size
        blocks = torch.arange(len(k_cmp), device=q.device) * config.stride
        whole = (blocks[None] + config.offset <= t[:, None]) | torch.tensor(not setup.causal, device=q.device)
        for seen, keys, values, g in (
            (whole.expand(chosen.shape[0], -1, -1), k_cmp, v_cmp, gates[0][b]),
            ((near & causal).expand(chosen.shape[0], -1, -1), k, v, gates[1][b]),
            (_listed(chosen, t, config) & causal, k, v, gates[2][b]),
        ):
            if len(keys):
                total = total + (_attention(q, keys, values, seen) * g.unsqueeze(-1) * dos[b]).sum()
    grads = torch.autograd.grad(total, leaves, allow_unused=True)
    added = [grad + x.double() for grad, x in zip(grads, data.before)]
    return dict(zip(NAMES, (*added, *grads[3:])))


def _listed(chosen: Tensor, t: Tensor, config: NSAConfig) -> Tensor:
    """[Hs, M, n] block indices as a mask [Hs, T, T]."""
    mask = torch.zeros(*chosen.shape[:2], config.num_blocks(len(t)) + 1, dtype=torch.bool, device=t.device)
    mask.scatter_(2, torch.where(chosen < 0, mask.shape[2] - 1, chosen).long(), True)
    return mask[:, t // config.q_tile][:, :, t // config.block_size]


def _attention(q: Tensor, k: Tensor, v: Tensor, seen: Tensor) -> Tensor:
    group = q.shape[1] // k.shape[1]
    seen = seen.repeat_interleave(q.shape[1] // seen.shape[0], 0)
    k, v = (x.repeat_interleave(group, 1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q, k) * q.shape[-1] ** -0.5
    p = torch.where(seen, scores, -1e30).softmax(-1) * seen
    return torch.einsum("hqk,khd->qhd", p, v)


def errors(got: Grads, true: Grads) -> dict[str, float]:
    """Largest error of each gradient over its largest value."""
    return {
        name: float((got[name].double() - x.double()).abs().max() / x.double().abs().max().clamp(min=1e-6))
        for name, x in true.items()
        if x is not None and x.numel() and got[name] is not None
    }
