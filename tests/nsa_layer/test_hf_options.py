"""Options and lists that models of transformers give the attention "nsa", and batches of padding; on the CPU."""

from __future__ import annotations

import warnings

import pytest
import torch
from hf_cases import CLOSE, VOCABULARY, counted, padded, plain, positions, same_numbers, sparse, tokens  # noqa: F401
from transformers import DynamicCache, PreTrainedModel
from transformers.utils import TransformersKwargs

from nsa_layer.integrations.hf.attention import nsa_attention_forward
from nsa_layer.integrations.hf.models import CACHE

pytestmark = pytest.mark.xdist_group("hf")


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


@pytest.mark.parametrize("gate, compression", [("input", "mean"), ("query", "linear"), ("input", "mlp")])
def test_a_batch_of_padding_alone_is_finite_and_all_parameters_get_a_gradient(gate: str, compression: str) -> None:
    model = sparse(nsa_gate=gate, nsa_compression=compression).train()
    batch = dict(input_ids=tokens(2, 20), attention_mask=torch.zeros(2, 20, dtype=torch.long))
    for use_cache in (True, False):
        model.zero_grad()
        logits = model(**batch, use_cache=use_cache).logits
        assert logits.isfinite().all()
        logits.sum().backward()
        assert all(x.grad is not None and x.grad.isfinite().all() for x in model.parameters())
    batch["attention_mask"][1, 5:] = 1
    row = model(**batch, position_ids=positions(batch["attention_mask"])).logits[1, 5:]
    torch.testing.assert_close(row, model(batch["input_ids"][1:, 5:]).logits[0], **CLOSE)
