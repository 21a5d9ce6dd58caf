"""MiniMax-M3 with its sparse layers by `nsa`: what transformers' own layers give, from logits to generated text."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from types import SimpleNamespace

import pytest
import torch
from hf_cases import CLOSE, MARKS, VOCABULARY, padded, plain, tokens
from transformers import DynamicCache, PreTrainedModel, StaticCache

from nsa_layer.call import Call
from nsa_layer.integrations.hf import minimax, use_nsa_kernels
from nsa_layer.integrations.hf.minimax import NSAMiniMaxM3Attention
from nsa_layer.integrations.hf.models import CACHE
from nsa_tools.index_training import _Calls
from nsa_tools.testing.assertions import assert_sequence_choice, rounding_error
from nsa_tools.testing.row_oracle import choice_scores

if minimax.modeling is None:
    pytest.skip("transformers without minimax_m3_vl", allow_module_level=True)
pytestmark = MARKS
DEVICE = "cuda"  # of tests of the kernels
LARGE = dict(num_hidden_layers=2, layer_types=["full_attention", "minimax_m3_sparse"], mlp_layer_types=["dense"] * 2)
LARGE |= dict(num_attention_heads=32, head_dim=128, index_head_dim=128, index_topk_blocks=16, index_block_size=128)


def dense_model(**options: object) -> PreTrainedModel:
    """A dense layer and two that choose blocks of 16 keys, with lists of each key/value head."""
    from transformers.models import minimax_m3_vl

    sizes = dict(vocab_size=VOCABULARY, hidden_size=32, num_hidden_layers=3, num_attention_heads=4, head_dim=8)
    sizes |= dict(num_key_value_heads=2, intermediate_size=16, dense_intermediate_size=48, shared_intermediate_size=16)
    sizes |= dict(
        mlp_layer_types=["dense"] * 3, partial_rotary_factor=0.5, index_n_heads=2, index_head_dim=8, index_topk_blocks=3
    )
    sizes |= dict(index_block_size=16, layer_types=["full_attention", *["minimax_m3_sparse"] * 2])
    sizes |= dict(bos_token_id=None, eos_token_id=None, pad_token_id=0, initializer_range=0.2)
    config = minimax_m3_vl.MiniMaxM3VLTextConfig(**sizes | options, attn_implementation="sdpa")
    torch.manual_seed(1)
    return minimax.modeling.MiniMaxM3VLForCausalLM(config).double().eval()


@pytest.fixture
def models() -> tuple[PreTrainedModel, PreTrainedModel]:
    """transformers' model, and a copy on `nsa`."""
    dense = dense_model()
    return dense, use_nsa_kernels(deepcopy(dense))


def listed(model: PreTrainedModel, run: Callable[[], object]) -> list[torch.Tensor]:
    """Lists of the sparse layers of transformers: ascending, -1 behind them; [B, T, Hkv, n]."""
    seen, hooks = [], []
    for layer in model.model.layers[1:]:
        hooks.append(layer.self_attn.indexer.register_forward_hook(lambda *call: seen.append(call[-1])))
    run()
    for hook in hooks:
        hook.remove()
    last = torch.iinfo(torch.int64).max
    ascending = [lists.masked_fill(lists < 0, last).sort().values.transpose(1, 2) for lists in seen]
    return [lists.masked_fill(lists == last, -1) for lists in ascending]


def test_logits_lists_and_gradients(models: tuple[PreTrainedModel, PreTrainedModel], monkeypatch) -> None:
    own, model = models
    assert [type(layer.self_attn) is NSAMiniMaxM3Attention for layer in model.model.layers] == [False, True, True]
    ids, chosen = tokens(2, 90), []
    expected = listed(own, lambda: own(ids))
    monkeypatch.setattr("nsa_tools.index_training._coverage", lambda call, lists: chosen.append(lists))
    with _Calls():
        model(ids)
    assert len(chosen) == 2 and all(torch.equal(x.long(), y) for x, y in zip(chosen, expected, strict=True))
    logits = [each.train()(ids).logits for each in models]
    torch.testing.assert_close(*logits, **CLOSE)
    for x in logits:
        x.square().sum().backward()
    for (name, x), y in zip(model.named_parameters(), own.parameters(), strict=True):
        assert "indexer" in name or y.grad is not None
        if y.grad is None:  # the choice carries none
            assert x.grad is None or not x.grad.any()
        else:
            torch.testing.assert_close(x.grad, y.grad, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("kind", [None, "static"])
def test_greedy_tokens(models: tuple[PreTrainedModel, PreTrainedModel], kind: str | None) -> None:
    ids, options = (
        tokens(2, 40),
        dict(max_new_tokens=64, do_sample=False, cache_implementation=kind, disable_compile=True),
    )
    text = [each.generate(ids, **options) for each in models]
    assert torch.equal(*text) and text[0].shape == (2, 104)


def test_chunks_beams_and_padding(models: tuple[PreTrainedModel, PreTrainedModel]) -> None:
    own, model = models
    ids = tokens(2, 90)
    expected, cache, ends = own(ids).logits, DynamicCache(config=model.config), (0, 50, 51, 90)
    steps = [model(ids[:, a:b], **{CACHE: cache}).logits for a, b in zip(ends, ends[1:])]
    torch.testing.assert_close(torch.cat(steps, dim=1), expected, **CLOSE)
    beams = [each.generate(ids[:, :40], max_new_tokens=12, num_beams=3) for each in models]
    assert torch.equal(*beams)
    batch = padded(ids, (0, 0), (0, 30))
    real = batch["attention_mask"].bool()
    torch.testing.assert_close(model(**batch).logits[real], own(**batch).logits[real], **CLOSE)
    with pytest.raises(NotImplementedError, match="padding in front of tokens"):
        model(**padded(ids, (0, 30)))


@torch.no_grad()
def test_steps_on_a_static_cache_compile_whole(models: tuple[PreTrainedModel, PreTrainedModel]) -> None:
    own, model = models
    ids, cache = tokens(2, 52), StaticCache(config=model.config, max_cache_len=64)
    model(ids[:, :50], **{CACHE: cache})
    step = torch.compile(model, fullgraph=True, backend="eager")
    parts = [step(ids[:, i, None], position_ids=torch.tensor([[i]]), **{CACHE: cache}).logits for i in (50, 51)]
    torch.testing.assert_close(torch.cat(parts, dim=1), own(ids).logits[:, 50:], **CLOSE)


def test_models_that_have_no_such_layers_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(NotImplementedError, match="LlamaForCausalLM has none"):
        use_nsa_kernels(plain())
    with pytest.raises(ValueError, match="backend must be"):
        use_nsa_kernels(dense_model(), backend="sdpa")
    wide = dense_model(index_n_heads=4)
    with pytest.raises(NotImplementedError, match="4 index heads and 2 key/value heads"):
        use_nsa_kernels(wide)
    assert not any(type(layer.self_attn) is NSAMiniMaxM3Attention for layer in wide.model.layers)
    dropping = use_nsa_kernels(dense_model(attention_dropout=0.1)).train()
    with pytest.raises(NotImplementedError, match="dropout"):
        dropping(tokens(1, 20))
    monkeypatch.setattr(minimax, "modeling", None)
    with pytest.raises(NotImplementedError, match="a release of transformers with minimax_m3_vl"):
        use_nsa_kernels(SimpleNamespace())


@pytest.fixture
def on_gpu() -> tuple[PreTrainedModel, PreTrainedModel, PreTrainedModel]:
    """transformers' model in bf16, with attention's and the index' real sizes but for fewer heads, a copy on the
    kernels, and one in fp64."""
    own = dense_model(**LARGE)
    with torch.no_grad():
        for each in own.model.layers:
            each.self_attn.q_norm.weight.fill_(2.0)  # attention that is not close to a mean
    own = own.to(DEVICE, torch.bfloat16)
    return own, use_nsa_kernels(deepcopy(own)), deepcopy(own).double()


def replay(model: PreTrainedModel, lists: list[torch.Tensor]) -> None:
    """Let the sparse layer of transformers attend to these blocks [B, Hkv, T, n], call after call."""
    left = iter(lists)
    model.model.layers[1].self_attn.indexer.forward = lambda *_, **__: next(left)


def assert_near(name: str, got: torch.Tensor, straight: torch.Tensor, exact: torch.Tensor) -> None:
    """Off by twice what transformers' layers in bf16 are off, and rounding, at most."""
    assert got.isfinite().all() and got.shape == exact.shape, name
    error, of_straight = ((x.double() - exact).abs().max().item() for x in (got, straight))
    limit = 2 * of_straight + rounding_error(got.dtype, got.dtype, exact.abs().max().item())
    assert error <= limit, f"{name}: {error:.3g} > {limit:.3g}"


@pytest.mark.gpu
def test_kernels(on_gpu: tuple[PreTrainedModel, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """Lists, logits and gradients of 2,600 tokens, in training."""
    own, model, _ = on_gpu
    ids, chosen = tokens(1, 2600).to(DEVICE), []
    (expected,) = listed(own, lambda: own(ids))
    monkeypatch.setattr("nsa_tools.index_training._coverage", lambda *call: chosen.append(call))
    with _Calls():
        model(ids)
    ((call, lists),) = chosen
    assert isinstance(call, Call) and call.spec.backend == ("cute" if DEVICE == "cuda" else "eager")
    (sequence,) = call._replace(block_indices=lists).map(torch.Tensor.detach).sequences()
    assert_sequence_choice("a layer", sequence.block_indices, expected[0].int(), *choice_scores(sequence))
    for each in (own, on_gpu[2]):
        replay(each, [lists.transpose(1, 2).long()])
    logits = [each.train()(ids).logits for each in (model, own, on_gpu[2])]
    assert_near("logits", *logits)
    do = torch.randn_like(logits[0])
    for x in logits:
        x.backward(do.to(x.dtype))
    for (name, x), y, z in zip(model.named_parameters(), own.parameters(), on_gpu[2].parameters(), strict=True):
        assert "indexer" in name or z.grad is not None, name
        if z.grad is None:
            assert x.grad is None or not x.grad.any(), name
        else:
            assert_near(name, x.grad, y.grad, z.grad)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", [None, "static"])
def test_cached_tokens_on_the_kernels(on_gpu: tuple[PreTrainedModel, ...], kind: str | None) -> None:
    """A prompt in chunks, and 64 greedy tokens, each of which no other one exceeds by more than rounding."""
    own, model, exact = on_gpu
    prompt, steps, lists, logits = 2060, 64, [], []
    options = dict(max_new_tokens=steps, do_sample=False, cache_implementation=kind, disable_compile=True)
    text = model.generate(tokens(2, prompt).to(DEVICE), **options)
    own.model.layers[1].self_attn.indexer.register_forward_hook(lambda *call: lists.append(call[-1]))
    ends = 0, 1000, *range(prompt, prompt + steps)
    for each in (own, exact, model):
        static = dict(config=each.config, max_cache_len=prompt + steps)
        cache = StaticCache(**static) if kind else DynamicCache(config=each.config)
        if each is exact:
            replay(exact, lists)
        with torch.no_grad():
            parts = [each(text[:, a:b], **{CACHE: cache}).logits for a, b in zip(ends, ends[1:])]
        logits.append(torch.cat(parts, dim=1))
    straight, truth, got = logits
    assert len(lists) == len(ends) - 1
    assert_near("logits", got, straight, truth)
    behind = truth[:, prompt - 1 :]
    short = behind.max(-1).values - behind.gather(-1, text[:, prompt:, None])[..., 0]
    rounding = 2 * (straight - truth).abs().max() + rounding_error(got.dtype, got.dtype, truth.abs().max().item())
    assert text.shape == (2, prompt + steps) and (short <= 2 * rounding).all()
