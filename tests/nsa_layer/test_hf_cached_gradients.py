"""Models of transformers with cached tokens: backward says that there is no gradient, and inference mode is left."""

from __future__ import annotations

from copy import deepcopy

import pytest
import torch
from hf_cases import CLOSE, padded, positions, same_numbers, sparse, tokens  # noqa: F401
from transformers import DynamicCache

from nsa_layer.integrations.hf import NSAModelCache

pytestmark = pytest.mark.xdist_group("hf")
REFUSED = dict(match="attention to cached tokens .* has no gradient")


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
