"""Caches of models of transformers: padding, ended turns, capacity, modes of gradients; on the CPU."""

from __future__ import annotations

from copy import deepcopy

import pytest
import torch
from hf_cases import CLOSE, INDEX, MARKS, padded, positions, sparse, tokens
from transformers import DynamicCache

from nsa_layer.integrations.hf import NSAModelCache
from nsa_layer.integrations.hf.models import CACHE

pytestmark = MARKS
REFUSED = dict(match="attention to cached tokens .* has no gradient")


def test_a_batch_of_padding_alone_fills_a_cache_with_none() -> None:
    model, ids = sparse(), tokens(2, 30)
    mask = (torch.arange(30) >= 12).expand(2, -1).long()
    for cache in (NSAModelCache(model.config), NSAModelCache(model.config, 30, static=True), DynamicCache()):
        step, seen = [], 0
        for end in (12, 20, 21, 30):
            given = dict(attention_mask=mask[:, :end], position_ids=positions(mask)[:, seen:end])
            step, seen = model(ids[:, seen:end], **given, **{CACHE: cache}).logits, end
            assert step.isfinite().all()
        torch.testing.assert_close(step, model(ids[:, 12:]).logits[:, 9:], **CLOSE)


@pytest.mark.parametrize("kind, compression", [("growing", "mean"), ("static", "mlp"), ("dynamic", "mean")])
def test_a_row_that_ended_early_goes_on_behind_its_padding(kind: str, compression: str) -> None:
    model, ids, mask = sparse(nsa_compression=compression), tokens(3, 70), torch.ones(3, 70, dtype=torch.long)
    mask[0, :6] = mask[2, 60:] = 0  # padding on the left, on the right
    mask[1, 22:30] = mask[2, 29:30] = 0  # ended a turn of 30 tokens at 22, at 29
    mask[0, 36:41] = 0  # ended at 36 of the next turn, to 41
    static, position_ids = kind == "static", positions(mask)
    cache = DynamicCache() if kind == "dynamic" else NSAModelCache(model.config, 70 if static else 9, static=static)
    for begin, end, told in ((0, 29, 0), (29, 30, 0), (30, 31, 30), (31, 36, 30), (36, 41, 30), (41, 70, 41)):
        seen = torch.ones(3, end, dtype=torch.long)  # of the tokens of a turn, until the next one, all
        seen[:, :told], seen[0, :6] = mask[:, :told], 0
        if end == 70:
            seen = mask
        given = dict(attention_mask=seen, position_ids=position_ids[:, begin:end])
        step = model(ids[:, begin:end], **given, **{CACHE: cache}).logits
        for row, real in enumerate(mask[:, :end].bool()):
            alone = model(ids[row : row + 1, :end][:, real], use_cache=False).logits[0]
            new = real[begin:]
            torch.testing.assert_close(step[row][new], alone[len(alone) - int(new.sum()) :], **CLOSE)
    if kind != "dynamic":
        assert [layer.cache.lengths for layer in cache.layers] == [tuple(mask.sum(1).tolist())] * 2


@pytest.mark.parametrize("new", [1, 9])
@pytest.mark.parametrize("static", [False, True])
def test_generate_goes_on_where_a_row_ended_early(static: bool, new: int) -> None:
    model, ids = sparse(num_hidden_layers=1), tokens(2, 40 + new)
    mask = torch.ones_like(ids)
    mask[0, :5] = mask[1, 31:40] = 0
    seen = mask[:, :40].clone()
    seen[1, 31:] = 1  # as `generate` has it until the turn ends
    cache = NSAModelCache(model.config, 80, static=static)
    model(ids[:, :40], attention_mask=seen, position_ids=positions(seen), **{CACHE: cache})
    made = model.generate(ids, attention_mask=mask, max_new_tokens=6, **{CACHE: cache})
    for row, real in enumerate(mask.bool()):
        alone = model.generate(ids[row : row + 1, real], max_new_tokens=6)
        assert made[row, 40 + new :].equal(alone[0, int(real.sum()) :])


@pytest.mark.parametrize("options", [{}, dict(nsa_compression="mlp"), dict(nsa=INDEX)], ids=["mean", "mlp", "index"])
def test_a_cache_in_fp8(options: dict) -> None:
    """Scales are of the prompt; steps whose lengths are on the device give what others do. Of random layers, networks'
    errors grow most."""
    model, ids = sparse(**options), padded(tokens(2, 40), (6, 0))
    mask, found, fp8 = ids["attention_mask"], [], dict(dtype=torch.float8_e4m3fn)
    with torch.no_grad():
        want = model(**ids).logits[:, 30:]
        for kind in (dict(max_cache_len=64), dict(max_cache_len=64, static=True), dict(max_cache_len=40)):
            cache, parts = NSAModelCache(model.config, **kind, **fp8), []
            for at, end in ((0, 30), (30, 31), (31, 36), (36, 37), (37, 40)):
                more = dict(attention_mask=mask[:, :end], position_ids=positions(mask)[:, at:end])
                parts.append(model(ids["input_ids"][:, at:end], past_key_values=cache, **more).logits)
            found.append(torch.cat(parts[1:], 1))
        torch.testing.assert_close(found[1:], found[:1] * 2, **CLOSE)
        error = (found[0] - want).norm() / want.norm()
        assert 0.001 < error < (0.5 if "nsa_compression" in options else 0.1)
        caches = [NSAModelCache(model.config, 64, dtype=dtype) for dtype in (None, *fp8.values())]
        for cache in caches:
            made = model.generate(**ids, max_new_tokens=5, **{CACHE: cache})
            assert made.shape == (2, 45) and cache.get_seq_length() == 44
        assert caches[1].nbytes < 0.13 * caches[0].nbytes
        with pytest.raises(TypeError, match="k_cache must have q's dtype torch.float64 or be float8_e4m3fn, got"):
            model(**ids, **{CACHE: NSAModelCache(model.config, dtype=torch.float32)})


def test_masks_that_hide_or_show_other_cached_tokens_are_errors() -> None:
    model, ids = sparse(), tokens(2, 21)
    mask = torch.ones_like(ids)
    mask[1, :4] = 0
    shown, inner, moved = mask.clone(), mask.clone(), mask.clone()
    shown[1, 3] = 1
    inner[0, 7:9] = 0
    moved[1, 3], moved[1, 19] = 1, 0
    for kind in (dict(), dict(max_cache_len=30, static=True)):
        cache = NSAModelCache(model.config, **kind)
        model(ids[:, :20], attention_mask=mask[:, :20], **{CACHE: cache})
        for other in (shown, inner, moved):
            with pytest.raises(ValueError, match="attention_mask must be that of the cached tokens"):
                model(ids[:, 20:], attention_mask=other, **{CACHE: cache})
        assert cache.layers[0].cache.lengths == (20, 16)


def test_a_static_cache_without_room_for_a_token_is_an_error_before_the_step() -> None:
    model, batch = sparse(num_hidden_layers=1), padded(tokens(2, 20), (6, 0))
    caches = [NSAModelCache(model.config, size, static=True) for size in (28, 27, 19)]
    expected = model.generate(**batch, max_new_tokens=9)
    assert model.generate(**batch, max_new_tokens=9, **{CACHE: caches[0]}).equal(expected)
    with pytest.raises(ValueError, match="rows must have at most 27 tokens, the static capacity, got 28"):
        model.generate(**batch, max_new_tokens=9, **{CACHE: caches[1]})
    assert caches[1].get_seq_length() == 27
    with pytest.raises(ValueError, match="at most 27 tokens, .*, got 28"):
        model(tokens(2, 1), **{CACHE: caches[1]})
    with pytest.raises(ValueError, match="at most 19 tokens, .*, got 20"):
        model(**batch, **{CACHE: caches[2]})
    torch.compiler.reset()
    sizes = torch.compile(lambda x: x + caches[1].get_mask_sizes(1, 0)[0], backend="eager", fullgraph=True)
    with pytest.raises(RuntimeError, match="a static cache has no capacity"):
        sizes(torch.ones(1))
    caches[1].crop(-1)
    assert sizes(torch.ones(1)) == 2


@pytest.mark.parametrize("kind", [NSAModelCache, DynamicCache])
@pytest.mark.parametrize("options", [{}, dict(nsa_gate="query", nsa_compression="linear")])
def test_a_loss_behind_cached_tokens_raises_in_backward(kind: type, options: dict) -> None:
    model, ids = sparse(**options), tokens(2, 40)
    caches = [kind(config=model.config) for _ in range(2)]
    with torch.no_grad():
        want = model(ids).logits[:, 30:]
        for cache in caches:
            model(ids[:, :30], past_key_values=cache)
        torch.testing.assert_close(model(ids[:, 30:], past_key_values=caches[0]).logits, want, **CLOSE)
    logits = model(ids[:, 30:], past_key_values=caches[1]).logits
    torch.testing.assert_close(logits.detach(), want, **CLOSE)
    with pytest.raises(RuntimeError, **REFUSED):
        logits.sum().backward()


def test_a_trained_prefix_raises_in_backward() -> None:
    model = sparse().requires_grad_(False)
    prefix = torch.randn(2, 2, 2, 10, 8, dtype=torch.float64, requires_grad=True)
    cache = DynamicCache(config=model.config)
    for i, layer in enumerate(prefix):
        cache.update(layer.clone(), layer.clone(), i)
    logits = model(tokens(2, 20), past_key_values=cache).logits
    with pytest.raises(RuntimeError, **REFUSED):
        logits.sum().backward()


@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("copied", [False, True])
def test_a_cache_of_inference_mode_goes_on_without(static: bool, copied: bool) -> None:
    model, ids = sparse(), tokens(2, 40)
    given = padded(ids, (0, 7))
    mask = given["attention_mask"]
    cache = NSAModelCache(model.config, 40 if static else 24, static=static)

    def step(at: int, end: int) -> torch.Tensor:
        more = dict(attention_mask=mask[:, :end], position_ids=positions(mask)[:, at:end])
        return model(given["input_ids"][:, at:end], past_key_values=cache, **more).logits

    with torch.inference_mode():
        step(0, 20), step(20, 21)
        cache = deepcopy(cache) if copied else cache
    with torch.no_grad():
        want = model(**given, position_ids=positions(mask)).logits
        cache.reorder_cache(torch.tensor([0, 1]))
        found = [step(21, 30), step(30, 31)]
        cache.crop(-2)
        found.append(step(29, 40))
        torch.testing.assert_close(torch.cat(found, 1), torch.cat((want[:, 21:31], want[:, 29:]), 1), **CLOSE)
        cache.reset()
        torch.testing.assert_close(step(0, 40)[mask.bool()], want[mask.bool()], **CLOSE)
