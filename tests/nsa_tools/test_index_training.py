"""Training of an index: what is frozen, what learns, and that a run goes on; dense probability that blocks cover."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from nsa_layer import NSAConfig, NSAttention, index_loss
from nsa_layer.integrations.hf import convert_to_nsa
from nsa_tools.index_training import coverage, index_alone, index_parameters, listing, train_index

BY_INDEX = NSAConfig(rule="index", branches=("selected",), block_size=8, block_counts=6, init_blocks=1, local_blocks=2)
T = 96
SIZES = dict(vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4)
SIZES["num_key_value_heads"] = 2


def small_model() -> torch.nn.Module:
    torch.manual_seed(0)
    dense = LlamaForCausalLM(LlamaConfig(**SIZES, initializer_range=0.3))
    return convert_to_nsa(dense, BY_INDEX, index_dim=4)


def batch_of(step: int) -> torch.Tensor:
    return torch.randint(64, (2, T), generator=torch.Generator().manual_seed(step))


def test_the_index_alone_learns() -> None:
    """Its loss falls, nothing else changes, and the model's modes are those of before."""
    model = small_model().train()
    model.lm_head.weight.requires_grad_(False)
    before = {name: x.clone() for name, x in model.named_parameters()}
    losses = train_index(model, lambda step: batch_of(0), steps=30, learning_rate=3e-3)
    changed = {name for name, x in model.named_parameters() if not torch.equal(x, before[name])}
    assert changed == {name for name in before if "_index" in name}
    assert losses[-1] < 0.9 * losses[0]
    assert all(part.training for part in model.modules())
    assert [x is model.lm_head.weight for x in model.parameters() if not x.requires_grad] == [True]


def test_all_blocks_are_listed() -> None:
    """Attention is the dense model's then, and the index learns of every block."""
    model = small_model().eval()
    ids, few = batch_of(0), model(batch_of(0)).logits
    with listing(model, T):
        whole = model(ids).logits
        assert all(layer.self_attn.nsa.config.block_counts == T // 8 for layer in model.model.layers)
    assert torch.equal(model(ids).logits, few) and not torch.equal(whole, few)
    assert len(train_index(model, batch_of, steps=1, all_blocks=True)) == 1


def test_with_a_weight_everything_trains() -> None:
    model = small_model()
    before = {name: x.clone() for name, x in model.named_parameters()}
    train_index(model, batch_of, steps=2, weight=0.1)
    assert not [name for name, x in model.named_parameters() if torch.equal(x, before[name])]


def test_steps_that_round_to_nothing_in_half_precision_add_up() -> None:
    model = small_model().bfloat16()
    before = [x.clone() for x in index_parameters(model)]
    train_index(model, lambda step: batch_of(0), steps=40, learning_rate=1e-4)
    changed = [(x != y)[y.abs() > 0.1] for x, y in zip(index_parameters(model), before, strict=True)]
    assert torch.cat(changed).float().mean() > 0.2  # each step is below half a unit in the last place


def test_a_dense_model_trains_alike() -> None:
    dense = LlamaForCausalLM(LlamaConfig(**SIZES))
    losses = train_index(dense, lambda step: batch_of(0), steps=10, learning_rate=3e-3, weight=0)
    assert losses[-1] < losses[0] - 0.1


def test_a_run_goes_on(tmp_path: Path) -> None:
    """From its checkpoint, to the bit."""
    whole, parts, file = small_model(), small_model(), tmp_path / "index.safetensors"
    losses = train_index(whole, batch_of, steps=6)
    asked = []

    def interrupted(step: int) -> torch.Tensor:
        asked.append(step)
        if len(asked) == 4:
            raise KeyboardInterrupt
        return batch_of(step)

    with pytest.raises(KeyboardInterrupt):
        train_index(parts, interrupted, steps=6, checkpoint=file, save_every=2)
    assert train_index(small_model(), batch_of, steps=2, checkpoint=file) == []
    assert train_index(parts, batch_of, steps=6, checkpoint=file) == losses[2:]
    for x, y in zip(index_parameters(whole), index_parameters(parts), strict=True):
        assert torch.equal(x, y)


def test_an_index_keeps_no_activations_of_other_layers() -> None:
    """The loss of a layer has no path to the index before it."""
    model = small_model()
    with index_alone(model) as parameters:
        model(batch_of(0))
        last = model.model.layers[1].self_attn.nsa.index_loss
        grads = torch.autograd.grad(last, parameters, allow_unused=True)
    half = len(parameters) // 2
    assert all(x is None for x in grads[:half]) and all(x is not None for x in grads[half:])
    layer = NSAttention(32, num_heads=4, num_kv_heads=2, config=BY_INDEX)
    with index_alone(layer):
        o = layer(torch.randn(1, T, 32))
        assert not o.requires_grad and index_loss(layer).requires_grad


def test_coverage_is_the_dense_probability_of_blocks() -> None:
    """The chosen blocks' against a plain sum; the best ones' is what lists of the exact masses cover."""
    model, ids = small_model().eval(), batch_of(0)
    seen = []
    for layer in model.model.layers:
        layer.self_attn.nsa.register_forward_hook(lambda nsa, inputs, o: seen.append(inputs), always_call=True)
    got = coverage(model, ids)
    assert len(got) == len(seen) == 2
    for (chosen, best), (layer, _, q, k, *_) in zip(got, seen):
        scores = q @ k.repeat_interleave(2, dim=1).transpose(-1, -2) * layer.head_dim**-0.5
        probability = scores.masked_fill(torch.ones(T, T).triu(1).bool(), -torch.inf).softmax(-1)
        mass = probability.unflatten(1, (2, 2)).mean(2).unflatten(-1, (T // 8, 8)).sum(-1)[:, :, 48:]
        own = torch.arange(48, T)[:, None] // 8
        forced = torch.zeros_like(mass, dtype=torch.bool)
        forced[..., 0] = True
        for back in (0, 1):
            forced.scatter_(-1, (own - back).expand(2, 2, -1, 1), True)
        most = mass.masked_fill(~forced, 0).sum(-1) + mass.masked_fill(forced, 0).topk(3).values.sum(-1)
        torch.testing.assert_close(best, most.mean().item(), rtol=1e-5, atol=0)
        assert 0 < chosen <= best < 1
    with listing(model, T), pytest.raises(ValueError, match="more than 12 blocks of 8 tokens"):
        coverage(model, ids)


def test_models_without_an_index_are_refused() -> None:
    with pytest.raises(ValueError, match="Linear has no layers of rule='index'"):
        train_index(torch.nn.Linear(2, 2), batch_of, steps=1)
