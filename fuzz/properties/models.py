"""Models of transformers: padding anywhere, masks and options that are wrong, memory that nothing has written."""

from __future__ import annotations

import random
import warnings
from functools import partial
from itertools import count, pairwise
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from hypothesis import strategies as st
from torch import nn
from torch.nn.utils import parametrize

from fuzz.case import Prompt
from fuzz.prop import Skip, holds, refused
from nsa_layer import NSAConfig
from nsa_tools.shape import Shape

MASKS = ("a column more", "a column fewer", "a row fewer", "four dimensions", "one dimension", "turned")
OPTIONS = ("softcap", "sliding_window", "s_aux", "sinks", "position_bias", "head_mask", "output_attentions")
CONFIG = NSAConfig(block_size=4, block_counts=3, window_size=6)
SIZES = dict(vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2)
SIZES |= dict(num_key_value_heads=1, max_position_embeddings=64, initializer_range=0.3, pad_token_id=0)


@st.composite
def prompts(draw: st.DrawFn, masks: tuple[str, ...] = ("bool", "int64"), changes: tuple[str, ...] = ("",)) -> Prompt:
    T, B = draw(st.integers(2, 24)), draw(st.integers(1, 3))
    first = draw(st.one_of(st.just(0), st.integers(1, T - 1)))
    rows, ended = [], []
    for _ in range(B):
        left = draw(st.one_of(st.just(0), st.just(T), st.integers(0, T)))
        behind, early = max(0, T - 1 - left), max(0, first - left)
        rows.append((left, 0 if first else draw(st.one_of(st.just(0), st.integers(0, behind)))))
        ended.append(draw(st.one_of(st.just(0), st.integers(0, early))))
    return Prompt(
        T=T,
        rows=tuple(rows),
        first=first,
        ended=tuple(ended),
        ours=draw(st.booleans()),
        gate=draw(st.sampled_from(("input", "query"))),
        compression=draw(st.sampled_from(("mean", "linear", "mlp"))),
        mask=draw(st.sampled_from(masks)),
        change=draw(st.sampled_from(changes)),
        seed=draw(st.integers(0, 999)),
    )


def make_model(case: Prompt, **changes: object) -> Any:
    """In fp64, with gates and matrices other than those that they start with."""
    from nsa_layer.integrations.hf import NSALlamaConfig, NSALlamaForCausalLM

    torch.manual_seed(case.seed)
    sizes = SIZES | dict(nsa=CONFIG, nsa_gate=case.gate, nsa_compression=case.compression) | changes
    model = NSALlamaForCausalLM(NSALlamaConfig(**sizes)).double().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".nsa." in name:
                parameter.add_(torch.randn_like(parameter), alpha=0.3)
    return model


def inputs_of(case: Prompt) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Tokens [B, T], bool mask, positions of the tokens."""
    at, ids = torch.arange(case.T), torch.randint(1, SIZES["vocab_size"], (len(case.rows), case.T))
    left, right = torch.tensor(case.rows).unsqueeze(2).unbind(1)
    mask = (at >= left) & (at < case.T - right)
    mask &= (at < case.first - torch.tensor(case.ended or [0])[:, None]) | (at >= case.first)
    return ids * mask, mask, (mask.cumsum(1) - 1).clamp(min=0)


def batch_of(case: Prompt) -> dict[str, Any]:
    """Arguments of a model without a cache."""
    ids, mask, positions = inputs_of(case)
    return dict(input_ids=ids, attention_mask=mask, position_ids=positions, use_cache=False)


def logits_of(model: Any, case: Prompt, ids: torch.Tensor, mask: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    from transformers import DynamicCache

    from nsa_layer.integrations.hf import NSAModelCache

    if not case.first:
        return model(ids, attention_mask=mask, position_ids=positions, use_cache=False).logits
    ours = case.ours or case.compression == "mlp"  # which other caches refuse
    cache = NSAModelCache(model.config) if ours else DynamicCache(config=model.config)
    shown = mask.clone()  # until the next turn, the padding behind a turn that ended early counts as tokens
    for row, early in zip(shown, case.ended):
        row[case.first - early : case.first] = 1
    parts = [
        model(
            ids[:, begin:end], attention_mask=seen[:, :end], position_ids=positions[:, begin:end], past_key_values=cache
        ).logits
        for seen, begin, end in ((shown, 0, case.first), (mask, case.first, case.T))
    ]
    return torch.cat(parts, dim=1)


@holds("models.padding anywhere", prompts, pr=10)
@torch.no_grad()
def padding_anywhere(case: Prompt) -> None:
    """Tokens have the logits that they have without padding, in one call or two on a cache; padding is finite."""
    model, (ids, mask, positions) = make_model(case), inputs_of(case)
    logits = logits_of(model, case, ids, mask if case.mask == "bool" else mask.long(), positions)
    assert logits.isfinite().all()
    for row, is_token, got in zip(ids, mask, logits):
        if is_token.any():
            alone = model(row[is_token][None], use_cache=False).logits[0]
            torch.testing.assert_close(got[is_token], alone, rtol=1e-9, atol=1e-9)


@holds("models.padding alone has a gradient", prompts, pr=6)
def padding_alone_has_a_gradient(case: Prompt) -> None:
    """A mask of zeros gives finite logits and a finite gradient to every parameter, which other ranks wait for."""
    model = make_model(case)
    ids = inputs_of(case)[0]
    logits = model(ids, attention_mask=torch.zeros_like(ids), use_cache=False).logits
    assert logits.isfinite().all()
    logits.sum().backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None and parameter.grad.isfinite().all(), f"{name} has no gradient"


def wrong_mask(mask: torch.Tensor, kind: str) -> torch.Tensor:
    more = torch.cat((mask, mask[:, -1:]), dim=1)
    return {
        "a column more": more,
        "a column fewer": mask[:, 1:],
        "a row fewer": torch.cat((mask, mask))[:-1] if len(mask) == 1 else mask[:-1],
        "four dimensions": mask[:, None, None].expand(-1, 1, mask.shape[1], -1),
        "one dimension": mask[0],
        "turned": mask.mT if mask.shape[0] != mask.shape[1] else more,
    }[kind]


@holds("models.wrong masks are refused", lambda: prompts(MASKS), pr=10)
@torch.no_grad()
def wrong_masks_are_refused(case: Prompt) -> None:
    """An error that names attention_mask or a mask; with one row too much of a batch of one as well."""
    model, batch = make_model(case), batch_of(case)
    wrong = wrong_mask(batch["attention_mask"], case.mask)
    if wrong.shape == batch["attention_mask"].shape:
        raise Skip
    with refused("mask", ValueError, NotImplementedError):
        model(**batch | dict(attention_mask=wrong))


CHANGES = {"nsa": (CONFIG.replace(window_size=3),), "nsa_gate": ("input", "query")}
CHANGES |= {"nsa_compression": ("mean", "linear", "mlp")}


@holds("models.settings are those of the model", lambda: prompts(changes=(*CHANGES, *OPTIONS)), pr=10)
@torch.no_grad()
def options_are_those_of_the_model(case: Prompt) -> None:
    """Fields that are set after a model is made, and options that sparse attention lacks, are refused by name."""
    model, batch = make_model(case), batch_of(case)
    if case.change in CHANGES:
        others = (value for value in CHANGES[case.change] if value not in (case.gate, case.compression))
        setattr(model.config, case.change, next(others))
    else:
        batch[case.change] = 3
    with refused(case.change, ValueError, NotImplementedError):
        model(**batch)


_numbers = count()


@holds("models.settings that nobody knows warn", prompts, pr=6)
@torch.no_grad()
def unknown_options_warn(case: Prompt) -> None:
    """An option that neither transformers nor sparse attention knows is named in a warning, and changes nothing."""
    model, batch = make_model(case), batch_of(case)
    name = f"of_a_later_version_{next(_numbers)}"  # each name warns once in a process
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        logits = model(**batch, **{name: 3}).logits
    assert any(name in str(warning.message) for warning in seen), f"{name} was ignored without a warning"
    assert logits.equal(model(**batch).logits)


@holds("models.start in any memory", prompts, pr=6)
def start_in_any_memory(case: Prompt) -> None:
    """Gates start equal and matrices at the identity, whatever was in memory before; so do those of `NSAttention`."""
    from nsa_layer import NSAttention
    from nsa_layer.integrations.hf import NSALlamaConfig, NSALlamaForCausalLM

    before = torch.are_deterministic_algorithms_enabled()
    own = dict(nsa=CONFIG, nsa_gate=case.gate, nsa_compression=case.compression)
    torch.use_deterministic_algorithms(True)  # new memory is NaN then
    try:
        assert torch.empty(3).isnan().all()
        model = NSALlamaForCausalLM(NSALlamaConfig(**SIZES, **own))
        layer = NSAttention(16, num_heads=2, num_kv_heads=1, gate=case.gate, compression=case.compression)
    finally:
        torch.use_deterministic_algorithms(before)
    found = [*model.named_parameters(), *layer.named_parameters()]
    for name, parameter in found:
        assert parameter.isfinite().all(), f"{name} has what was in memory"
        if "compress_" in name and name.endswith("_weight"):
            assert parameter.equal(torch.eye(parameter.shape[-1]).expand_as(parameter)), f"{name} is another matrix"
        if "gate_weight" in name or name.endswith(("gate_mlp.2.weight", "gate_mlp.2.bias")):
            assert not parameter.any(), f"{name} starts elsewhere"


def packed_positions(case: Prompt) -> tuple[list[int], list[int]]:
    """Positions of T tokens of packed sequences, with jumps and repeats inside, and where sequences start."""
    draw, positions, starts = random.Random(case.seed), [], []
    while len(positions) < case.T:
        starts.append(len(positions))
        at = 0
        for _ in range(draw.randint(1, 8)):
            positions.append(at)
            at += draw.choice((1, 1, 1, 5, 0)) if at else draw.choice((1, 7))
    return positions[: case.T], starts


@holds("models.positions say where sequences start", prompts, pr=6)
@torch.no_grad()
def positions_say_where_sequences_start(case: Prompt) -> None:
    """Where positions fall, or 0 follows 0: packed sequences have the logits that each has in a cache of its own."""
    from nsa_layer.integrations.hf import NSAModelCache

    model, (ids, _, _) = make_model(case), inputs_of(Prompt(T=case.T, rows=((0, 0),), seed=case.seed))
    positions, starts = packed_positions(case)
    position_ids = torch.tensor([positions])
    logits = model(ids, position_ids=position_ids, use_cache=False).logits
    for begin, end in zip(starts, [*starts[1:], case.T]):
        own = dict(position_ids=position_ids[:, begin:end], past_key_values=NSAModelCache(model.config))
        alone = model(ids[:, begin:end], **own).logits
        torch.testing.assert_close(logits[:, begin:end], alone, rtol=1e-9, atol=1e-9)


FIELDS = {"block_counts": 5, "window_size": 7, "block_size": 8, "init_blocks": 2, "deterministic": True}


@holds("models.part of the fields is set", lambda: prompts(changes=tuple(FIELDS)), pr=6)
def part_of_the_fields_is_set(case: Prompt) -> None:
    """A dictionary of some fields changes these and keeps the others of the configuration."""
    from nsa_layer.integrations.hf import NSALlamaConfig

    config = NSALlamaConfig(**SIZES, nsa=CONFIG)
    change = {case.change: FIELDS[case.change]}
    config.nsa = change
    assert NSAConfig.from_dict(config.nsa) == CONFIG.replace(**change), f"{change} changes others"


CACHES = {
    "capacity": "the static capacity",
    "config": "make another",
    "batch": "make another",
    "layers": "the cache must have the model's layers",
}


@holds("models.caches fit their model", lambda: prompts(changes=tuple(CACHES)), pr=8)
@torch.no_grad()
def caches_fit_their_model(case: Prompt) -> None:
    """Refused: a static cache with a place too few, one of fewer layers, and one that another model or batch filled."""
    from nsa_layer.integrations.hf import NSAModelCache

    model, (ids, _, _), said = make_model(case), inputs_of(case), CACHES[case.change]
    cache = NSAModelCache(model.config)
    if case.change == "capacity":
        cache = NSAModelCache(model.config, case.T - 1, static=True)
    elif case.change == "layers":
        model = make_model(case, num_hidden_layers=2)
    else:
        model(ids, past_key_values=cache)
        if case.change == "config":
            model = make_model(case, nsa=CONFIG.replace(window_size=3))
        else:
            cache.reset()
            ids = torch.cat((ids, ids[:1]))
    with refused(said, ValueError):
        model(ids, past_key_values=cache)


LENGTHS = {"int": int, "numpy": np.int64, "tensor": torch.tensor, "none": lambda length: None}


@holds("models.packed sequences", lambda: prompts(changes=tuple(LENGTHS)), pr=6)
@torch.no_grad()
def packed_sequences(case: Prompt) -> None:
    """`cu_seq_lens_q` with a longest length of any integer type: sequences have the logits that each has alone."""
    model, (ids, _, _) = make_model(case), inputs_of(Prompt(T=case.T, rows=((0, 0),), seed=case.seed))
    draw = random.Random(case.seed)
    starts = [0, *sorted(draw.sample(range(1, case.T), draw.randint(0, min(4, case.T - 1)))), case.T]
    parts = [ids[:, begin:end] for begin, end in pairwise(starts)]
    logits = model(
        ids,
        position_ids=torch.cat([torch.arange(part.shape[1]) for part in parts])[None],
        cu_seq_lens_q=torch.tensor(starts, dtype=torch.int32),
        max_length_q=LENGTHS[case.change](max(part.shape[1] for part in parts)),
        use_cache=False,
    ).logits
    alone = torch.cat([model(part, use_cache=False).logits for part in parts], dim=1)
    torch.testing.assert_close(logits, alone, rtol=1e-9, atol=1e-9)


@holds("models.lists of the model are used", prompts, pr=6)
@torch.no_grad()
def lists_of_the_model_are_used(case: Prompt) -> None:
    """With `block_indices` of a model that selects blocks itself, queries attend to these and to no others."""
    from nsa_layer.integrations.hf.attention import nsa_attention_forward

    torch.manual_seed(case.seed)
    B, T, block_size = len(case.rows), case.T, 4
    blocks = -(-T // block_size)
    q, k, v = (torch.randn(B, heads, T, 8, dtype=torch.float64) for heads in (4, 2, 2))
    listed = torch.rand(B, 2, T, blocks) < 0.5
    lists = torch.where(listed, torch.arange(blocks), -1)
    module = SimpleNamespace(config=SimpleNamespace(), indexer=SimpleNamespace(block_size=block_size))
    o, _ = nsa_attention_forward(module, q, k, v, None, scaling=0.3, block_indices=lists)
    visible = listed.repeat_interleave(block_size, -1)[..., :T].repeat_interleave(2, 1) & torch.ones(T, T).tril().bool()
    dense = nn.functional.scaled_dot_product_attention(q, k, v, visible, scale=0.3, enable_gqa=True).nan_to_num()
    torch.testing.assert_close(o.transpose(1, 2), dense, rtol=1e-9, atol=1e-9)


PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj")


@holds("models.replaced parts are used", lambda: prompts(changes=(*PROJECTIONS, "parametrized")), pr=8)
@torch.no_grad()
def replaced_parts_are_used(case: Prompt) -> None:
    """A projection without a weight, or gates and matrices behind `parametrize`, give the same logits."""
    model, batch = make_model(case), batch_of(case)
    before = model(**batch).logits
    attention = model.model.layers[0].self_attn
    if case.change in PROJECTIONS:
        setattr(attention, case.change, nn.Sequential(getattr(attention, case.change)))
    else:
        for name in [name for name, _ in attention.nsa.named_parameters(recurse=False)]:
            parametrize.register_parametrization(attention.nsa, name, nn.Identity())
    torch.testing.assert_close(model(**batch).logits, before, rtol=1e-12, atol=1e-12)


BACKENDS = ("cute", "fp32", "head size")


@holds("models.backend is the one that is named", lambda: prompts(changes=BACKENDS), pr=6)
@torch.no_grad()
def backend_is_the_one_that_is_named(case: Prompt) -> None:
    """`config.nsa_backend` is passed on; without it, what the kernels lack on a GPU is refused and eager is named."""
    from nsa_layer import support

    if case.change == "cute":
        model, batch = make_model(case), batch_of(case)
        model.config.nsa_backend, said, error = "cute", "backend='cute' needs tensors on a GPU", ValueError
        ask = partial(model, **batch | dict(attention_mask=None))
    else:
        dtype, D = (torch.float32, 64) if case.change == "fp32" else (torch.bfloat16, 48)
        shape = Shape(B=1, T=64, Hq=2, Hkv=2, D=D, Dv=D, dtype=dtype, config=CONFIG)
        call = shape.call(), torch.device("cuda", 0)
        ask, said, error = partial(support.choose_backend, None, *call), "backend='eager' does", NotImplementedError
        assert support.choose_backend("eager", *call) == "eager"
    with patch.object(support, "device_arch", lambda *_: 90), refused(said, error):
        ask()
