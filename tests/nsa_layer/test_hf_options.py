"""Options, masks and lists that models of transformers give the attention "nsa"; on the CPU."""

from __future__ import annotations

import warnings

import pytest
import torch
from hf_cases import CLOSE, MARKS, VOCABULARY, counted, padded, plain, sparse, tokens
from transformers import DynamicCache, PreTrainedModel
from transformers.masking_utils import create_bidirectional_mask, create_causal_mask
from transformers.utils import TransformersKwargs

from nsa_layer.integrations.hf import NSAModelCache
from nsa_layer.integrations.hf.attention import nsa_attention_forward
from nsa_layer.integrations.hf.models import CACHE

pytestmark = MARKS
SET = dict(softcap=30.0, s_aux=torch.zeros(4), sinks=torch.zeros(4), position_bias=torch.zeros(1), dropout=0.1)
SET |= dict(sliding_window=8, indices=torch.zeros(1, dtype=torch.int32), head_mask=torch.ones(4), is_causal=False)
SET |= dict(output_attentions=True)


@pytest.mark.parametrize("name", SET)
def test_an_option_that_changes_the_result_is_an_error(name: str) -> None:
    model = plain()
    with pytest.raises(NotImplementedError, match=name):
        direct(model, **{name: SET[name]})
    torch.testing.assert_close(direct(model, **{name: None}), direct(model))


def direct(model: PreTrainedModel, **options: object) -> torch.Tensor:
    q, k = torch.linspace(-1, 1, 4 * 20 * 8).reshape(1, 4, 20, 8).sin(), torch.linspace(0, 2, 320).reshape(1, 2, 20, 8)
    return nsa_attention_forward(model.model.layers[0].self_attn, q, k, k.cos(), None, scaling=0.3, **options)[0]


def test_an_option_that_is_not_known_warns_once() -> None:
    model = plain()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        known = dict.fromkeys(TransformersKwargs.__annotations__, None) | dict(use_cache=True, num_items_in_batch=3)
        expected = direct(model, **known, of_a_later_version=None)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        for _ in range(2):
            assert direct(model, of_a_later_version=torch.ones(2)).equal(expected)
            model(tokens(1, 9), of_another_version=3)
    said = sorted(str(warning.message) for warning in seen)
    assert said == [f'attention "nsa" ignores the option of_{name}_version' for name in ("a_later", "another")]


def minimax(attention: str) -> PreTrainedModel:
    """Two layers that choose blocks of 16 keys themselves, with lists of each key/value head."""
    from transformers.models import minimax_m3_vl

    sizes = dict(vocab_size=VOCABULARY, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, head_dim=8)
    sizes |= dict(num_key_value_heads=2, intermediate_size=16, dense_intermediate_size=48, shared_intermediate_size=16)
    sizes |= dict(mlp_layer_types=["dense"] * 2, rotary_dim=4, index_n_heads=2, index_head_dim=8)
    sizes |= dict(
        bos_token_id=None,
        eos_token_id=None,
        index_block_size=16,
        index_topk_blocks=3,
        layer_types=["minimax_m3_sparse"] * 2,
    )
    config = minimax_m3_vl.MiniMaxM3VLTextConfig(**sizes, initializer_range=0.2, attn_implementation=attention)
    torch.manual_seed(1)
    return minimax_m3_vl.MiniMaxM3VLTextModel(config).double().eval()


def test_lists_of_the_model_take_the_place_of_a_choice() -> None:
    own, model = minimax("sdpa"), minimax("nsa")
    ids = tokens(2, 90)
    expected = own(ids).last_hidden_state
    o = model(ids).last_hidden_state
    torch.testing.assert_close(o, expected, **CLOSE)
    for x in (o, expected):
        x.square().sum().backward()
    for x, y in zip(model.parameters(), own.parameters()):
        assert (x.grad is None) == (y.grad is None)  # the choice carries none
        if x.grad is not None:
            torch.testing.assert_close(x.grad, y.grad, rtol=1e-9, atol=1e-9)
    cache = DynamicCache(config=model.config)
    ends = (0, 50, 51, 90)
    steps = [model(ids[:, a:b], **{CACHE: cache}).last_hidden_state for a, b in zip(ends, ends[1:])]
    torch.testing.assert_close(torch.cat(steps, dim=1), expected, **CLOSE)
    batch = padded(ids, (0, 0), (0, 30))
    short, real = own(**batch).last_hidden_state, batch["attention_mask"].bool()
    torch.testing.assert_close(model(**batch).last_hidden_state[real], short[real], **CLOSE)
    with pytest.raises(NotImplementedError, match="block_indices .*padding in front of tokens"):
        model(**padded(ids, (0, 30)))
    with pytest.raises(NotImplementedError, match="block_indices of packed sequences"):
        model(ids, position_ids=counted(40, 50), use_cache=False)
    with pytest.raises(NotImplementedError, match="block_indices of a model with gates"):
        sparse()(ids, block_indices=torch.zeros(2, 2, 90, 1, dtype=torch.long))


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
