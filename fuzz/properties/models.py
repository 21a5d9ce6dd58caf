"""Models of transformers: padding anywhere, masks and options that are wrong, memory that nothing has written."""

from __future__ import annotations

import random
from typing import Any

import torch
from hypothesis import strategies as st
from torch import nn
from torch.nn.utils import parametrize

from fuzz.case import Prompt
from fuzz.prop import holds
from nsa_layer import NSAConfig

MASKS = ("a column more", "a column fewer", "a row fewer", "four dimensions", "one dimension", "turned")
OPTIONS = ("softcap", "sliding_window", "s_aux")
CONFIG = NSAConfig(block_size=4, block_counts=3, window_size=6)
SIZES = dict(vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2)
SIZES |= dict(num_key_value_heads=1, max_position_embeddings=64, initializer_range=0.3, pad_token_id=0)


@st.composite
def prompts(draw: st.DrawFn, masks: tuple[str, ...] = ("bool", "int64"), changes: tuple[str, ...] = ("",)) -> Prompt:
    T, B = draw(st.integers(2, 24)), draw(st.integers(1, 3))
    rows = []
    for _ in range(B):
        left = draw(st.one_of(st.just(0), st.integers(0, T - 1)))
        rows.append((left, draw(st.one_of(st.just(0), st.integers(0, T - 1 - left)))))
    first = draw(st.one_of(st.just(0), st.integers(1, T - 1)))
    return Prompt(
        T=T,
        rows=tuple((left, 0) for left, _ in rows) if first else tuple(rows),
        first=first,
        ours=draw(st.booleans()),
        gate=draw(st.sampled_from(("input", "query"))),
        compression=draw(st.sampled_from(("mean", "linear"))),
        mask=draw(st.sampled_from(masks)),
        change=draw(st.sampled_from(changes)),
        seed=draw(st.integers(0, 999)),
    )


def make_model(case: Prompt) -> Any:
    """In fp64, with gates and matrices other than those that they start with."""
    from nsa_layer.integrations.hf import NSALlamaConfig, NSALlamaForCausalLM

    torch.manual_seed(case.seed)
    own = dict(nsa=CONFIG, nsa_gate=case.gate, nsa_compression=case.compression)
    model = NSALlamaForCausalLM(NSALlamaConfig(**SIZES, **own)).double().eval()
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
    return ids * mask, mask, (mask.cumsum(1) - 1).clamp(min=0)


def logits_of(model: Any, case: Prompt, ids: torch.Tensor, mask: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    from transformers import DynamicCache

    from nsa_layer.integrations.hf import NSAModelCache

    if not case.first:
        return model(ids, attention_mask=mask, position_ids=positions, use_cache=False).logits
    cache = NSAModelCache(model.config) if case.ours else DynamicCache(config=model.config)
    parts = [
        model(
            ids[:, begin:end],
            attention_mask=mask[:, :end],
            position_ids=positions[:, begin:end],
            past_key_values=cache,
        ).logits
        for begin, end in ((0, case.first), (case.first, case.T))
    ]
    return torch.cat(parts, dim=1)


@holds("models.padding anywhere", prompts, pr=10)
@torch.no_grad()
def padding_anywhere(case: Prompt) -> None:
    """Tokens have the logits that they have without padding, in one call or two on a cache."""
    model, (ids, mask, positions) = make_model(case), inputs_of(case)
    logits = logits_of(model, case, ids, mask if case.mask == "bool" else mask.long(), positions)
    assert logits.isfinite().all()
    for row, own, got in zip(ids, mask, logits):
        torch.testing.assert_close(got[own], model(row[own][None], use_cache=False).logits[0], rtol=1e-9, atol=1e-9)


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
    model, (ids, mask, positions) = make_model(case), inputs_of(case)
    wrong = wrong_mask(mask, case.mask)
    if wrong.shape == mask.shape:
        return
    try:
        model(ids, attention_mask=wrong, position_ids=positions, use_cache=False)
    except (ValueError, NotImplementedError) as error:
        assert "mask" in str(error), f"names no mask: {error}"
        return
    raise AssertionError(f"a mask of shape {tuple(wrong.shape)} was taken")


CHANGES = {"nsa": CONFIG.replace(window_size=3), "nsa_gate": None, "nsa_compression": None}


@holds("models.settings are those of the model", lambda: prompts(changes=(*CHANGES, *OPTIONS)), pr=10)
@torch.no_grad()
def options_are_those_of_the_model(case: Prompt) -> None:
    """Fields that are set after a model is made, and options that sparse attention lacks, are refused by name."""
    model, (ids, mask, positions) = make_model(case), inputs_of(case)
    others = {"nsa_gate": {"input", "query"} - {case.gate}, "nsa_compression": {"mean", "linear"} - {case.compression}}
    more = {}
    if case.change in CHANGES:
        value = others[case.change].pop() if case.change in others else CHANGES[case.change]
        setattr(model.config, case.change, value)
    else:
        more = {case.change: 3}
    try:
        model(ids, attention_mask=mask, position_ids=positions, use_cache=False, **more)
    except (ValueError, NotImplementedError) as error:
        assert case.change in str(error), f"does not name {case.change}: {error}"
        return
    raise AssertionError(f"{case.change} was taken")


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
        if "compress_" in name:
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
    places = torch.tensor([positions])
    logits = model(ids, position_ids=places, use_cache=False).logits
    for begin, end in zip(starts, [*starts[1:], case.T]):
        own = dict(position_ids=places[:, begin:end], past_key_values=NSAModelCache(model.config))
        alone = model(ids[:, begin:end], **own).logits
        torch.testing.assert_close(logits[:, begin:end], alone, rtol=1e-9, atol=1e-9)


@holds("models.parametrized parameters are used", prompts, pr=6)
@torch.no_grad()
def parametrized_parameters_are_used(case: Prompt) -> None:
    """Gates and matrices behind `torch.nn.utils.parametrize` give the same logits."""
    model, (ids, mask, positions) = make_model(case), inputs_of(case)
    options = dict(attention_mask=mask, position_ids=positions, use_cache=False)
    before = model(ids, **options).logits
    branches = model.model.layers[0].self_attn.nsa
    for name in [name for name, _ in branches.named_parameters(recurse=False)]:
        parametrize.register_parametrization(branches, name, nn.Identity())
    torch.testing.assert_close(model(ids, **options).logits, before, rtol=1e-12, atol=1e-12)


FIELDS = {"block_counts": 5, "window_size": 7, "block_size": 8, "init_blocks": 2, "deterministic": True}


@holds("models.part of the fields is set", lambda: prompts(changes=tuple(FIELDS)), pr=6)
def part_of_the_fields_is_set(case: Prompt) -> None:
    """A dictionary of some fields changes these and keeps the others of the configuration."""
    from nsa_layer.integrations.hf import NSALlamaConfig

    config = NSALlamaConfig(**SIZES, nsa=CONFIG)
    change = {case.change: FIELDS[case.change]}
    config.nsa = change
    assert NSAConfig.from_dict(config.nsa) == CONFIG.replace(**change), f"{change} changes others"


@holds("models.caches fit their model", lambda: prompts(changes=("room", "config")), pr=6)
@torch.no_grad()
def caches_fit_their_model(case: Prompt) -> None:
    """A static cache with a place too few, and one that a model with other options has filled, are refused."""
    from nsa_layer.integrations.hf import NSAModelCache

    model, (ids, _, _) = make_model(case), inputs_of(case)
    if case.change == "room":
        cache, said = NSAModelCache(model.config, case.T - 1, static=True), "has room for"
    else:
        cache, said = NSAModelCache(model.config), "make another"
        model(ids, past_key_values=cache)
        other = model.config.to_dict() | {"nsa": CONFIG.replace(window_size=3)}
        model = type(model)(type(model.config).from_dict(other)).double()
    try:
        model(ids, past_key_values=cache)
    except ValueError as error:
        assert said in str(error), f"says nothing of it: {error}"
        return
    raise AssertionError(f"a cache with another {case.change} was taken")
