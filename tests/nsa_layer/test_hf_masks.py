"""Masks, positions and caches of transformers that do not fit the model or the batch; on the CPU."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from hf_cases import CLOSE, CONFIG, SIZES, WIDE, counted, padded, plain, positions, same_numbers, sparse, tokens  # noqa: F401
from transformers import DynamicCache
from transformers.masking_utils import create_bidirectional_mask, create_causal_mask

from nsa_layer.integrations.hf import NSAModelCache
from nsa_layer.integrations.hf.models import CACHE

pytestmark = pytest.mark.xdist_group("hf")


@pytest.mark.parametrize("use_cache", [True, False])
@pytest.mark.parametrize("shape", [(2, 19), (2, 1), (1, 20), (3, 20), (2, 20, 1), (20,)])
def test_a_mask_of_another_shape_is_an_error(shape: tuple[int, ...], use_cache: bool) -> None:
    ids, mask = tokens(2, 20), torch.ones(shape, dtype=torch.long)
    for model in (sparse(), plain()):
        with pytest.raises(ValueError, match=r"attention_mask must be .*\(2, 20\), got"):
            model(ids, attention_mask=mask, use_cache=use_cache)


def test_a_mask_without_cached_tokens_is_an_error() -> None:
    model, ids = sparse(), tokens(2, 21)
    for cache in (NSAModelCache(model.config), NSAModelCache(model.config, 30, static=True), DynamicCache()):
        model(ids[:, :20], **{CACHE: cache})
        with pytest.raises(ValueError, match=r"attention_mask must be .*\(2, 21\), got \(2, 1\)"):
            model(ids[:, 20:], attention_mask=torch.ones(2, 1), **{CACHE: cache})
        assert cache.get_seq_length() == 20
        longer = model(ids[:, 20:], attention_mask=torch.ones(2, 25), **{CACHE: cache}).logits
        torch.testing.assert_close(longer, model(ids).logits[:, 20:], **CLOSE)


def test_a_mask_that_shows_later_tokens_is_an_error_with_padding_too() -> None:
    config = plain().config
    mask = torch.ones(2, 12, dtype=torch.long)
    mask[1, :3] = 0
    images = torch.full((2, 12), -1)
    images[:, 4:8] = 1
    given = dict(config=config, inputs_embeds=torch.zeros(2, 12, 0), attention_mask=mask, **{CACHE: None})
    with pytest.raises(NotImplementedError, match="later tokens"):
        create_bidirectional_mask(**given)
    with pytest.raises(NotImplementedError, match="later tokens"):
        create_causal_mask(**given, block_sequence_ids=images)
    assert create_causal_mask(**given).is_token.equal(mask.bool())


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
    static, places = kind == "static", positions(mask)
    cache = DynamicCache() if kind == "dynamic" else NSAModelCache(model.config, 70 if static else 9, static=static)
    for begin, end, told in ((0, 29, 0), (29, 30, 0), (30, 31, 30), (31, 36, 30), (36, 41, 30), (41, 70, 41)):
        seen = torch.ones(3, end, dtype=torch.long)  # of the tokens of a turn, until the next one, all
        seen[:, :told], seen[0, :6] = mask[:, :told], 0
        if end == 70:
            seen = mask
        given = dict(attention_mask=seen, position_ids=places[:, begin:end])
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
    with pytest.raises(ValueError, match="rows would have 28 tokens, a static cache has capacity for 27"):
        model.generate(**batch, max_new_tokens=9, **{CACHE: caches[1]})
    assert caches[1].get_seq_length() == 27
    with pytest.raises(ValueError, match="28 tokens, a static cache has capacity for 27"):
        model(tokens(2, 1), **{CACHE: caches[1]})
    with pytest.raises(ValueError, match="20 tokens, a static cache has capacity for 19"):
        model(**batch, **{CACHE: caches[2]})
    torch.compiler.reset()
    sizes = torch.compile(lambda x: x + caches[1].get_mask_sizes(1, 0)[0], backend="eager", fullgraph=True)
    with pytest.raises(RuntimeError, match="a static cache has no capacity"):
        sizes(torch.ones(1))
    caches[1].crop(-1)
    assert sizes(torch.ones(1)) == 2


def test_a_cache_of_another_model_or_batch_is_an_error() -> None:
    model, ids = sparse(), tokens(2, 20)
    other = sparse(nsa=CONFIG.replace(block_counts=2))
    said = "cache is of 2 rows and NSAConfig.*block_counts=4.*got 2 and NSAConfig.*block_counts=2"
    for kind in (dict(), dict(max_cache_len=40, static=True)):
        cache = NSAModelCache(model.config, **kind)
        model(ids, **{CACHE: cache})
        for new in (ids, ids[:, :1]):
            with pytest.raises(ValueError, match=said):
                other(new, **{CACHE: cache})
        assert cache.get_seq_length() == 20
        cache.reset()
        with pytest.raises(ValueError, match="cache is of 2 rows and .*, got 3 and .*: make another"):
            model(tokens(3, 20), **{CACHE: cache})
        with pytest.raises(ValueError, match="cache is of 2 rows and .*, got 1 and .*: make another"):
            model(tokens(1, 1), **{CACHE: cache})
        torch.testing.assert_close(model(ids, **{CACHE: cache}).logits, model(ids).logits, **CLOSE)
    deeper = sparse(num_hidden_layers=3)
    for call in (deeper, partial(deeper.generate, max_new_tokens=2)):
        with pytest.raises(ValueError, match="the cache has 2 layers, fewer than the model"):
            call(ids, **{CACHE: NSAModelCache(model.config)})
