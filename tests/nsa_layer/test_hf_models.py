"""Models of transformers with sparse attention: initial values, configurations, and what conversion takes over."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from copy import deepcopy
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from accelerate import Accelerator, cpu_offload
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.utils import parametrize
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

from nsa_layer import NSAConfig, NSAttention
from nsa_layer.integrations.hf import NSALlamaConfig, NSALlamaForCausalLM, NSALlamaModel, convert_to_nsa

pytestmark = pytest.mark.xdist_group("hf")

CONFIG = NSAConfig(block_size=8, block_counts=4, window_size=16)
SIZES = dict(vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4)
SIZES |= dict(num_key_value_heads=2, bos_token_id=None, eos_token_id=None, pad_token_id=0)
WAYS = [("input", "mean"), ("query", "linear"), ("input", "mlp")]


@pytest.fixture(autouse=True)
def same_numbers() -> None:
    torch.manual_seed(0)


def sparse(**changes: object) -> NSALlamaForCausalLM:
    """A sparse model whose gates and matrices are not those that they start with."""
    model = NSALlamaForCausalLM(NSALlamaConfig(**SIZES | dict(nsa=CONFIG) | changes)).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".nsa." in name:
                parameter.add_(0.3 * torch.randn_like(parameter))
    return model


def dense() -> LlamaForCausalLM:
    return LlamaForCausalLM(LlamaConfig(**SIZES))


def tokens(*shape: int) -> torch.Tensor:
    return torch.randint(1, 64, shape)


@pytest.fixture
def poisoned() -> Iterator[None]:
    """Memory that is not initialized holds NaN."""
    torch.use_deterministic_algorithms(True)
    assert torch.utils.deterministic.fill_uninitialized_memory and torch.empty(3).isnan().all()
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("start", ["scratch", "base", "dense folder", "linear folder", "part of a folder"])
@pytest.mark.parametrize("gate", ["input", "query"])
def test_all_parameters_start_as_they_should(start: str, gate: str, poisoned: None, tmp_path: Path) -> None:
    options = dict(nsa_gate=gate, nsa_compression="mlp", nsa=CONFIG)
    kept = {}
    if start in ("scratch", "base"):
        kind = NSALlamaForCausalLM if start == "scratch" else NSALlamaModel
        model = kind(NSALlamaConfig(**SIZES | dict(hidden_size=256), **options))
    else:
        if start == "dense folder":
            before = dense()
        else:
            before = sparse(nsa_compression="linear" if start == "linear folder" else "mlp", nsa_gate=gate)
        parameters = before.state_dict()
        if start == "part of a folder":
            parameters.pop("model.layers.1.self_attn.nsa.networks.k_cmp.up")
        before.save_pretrained(tmp_path, state_dict=dict(parameters))
        model = NSALlamaForCausalLM.from_pretrained(tmp_path, **options)
        kept = {name: x for name, x in parameters.items() if name in model.state_dict()}
    for name, x in model.state_dict().items():
        assert x.isfinite().all(), name
        if name in kept:
            assert x.equal(kept[name]), name
        elif name.endswith((".up", ".down")):
            assert abs(x.std() * x.shape[1] ** 0.5 - 1) < 0.2, name
        elif name.endswith(".position"):
            assert abs(x.std() / 0.02 - 1) < 0.2, name
    if start in ("scratch", "base", "dense folder"):
        part = model.base_model.layers[1].self_attn.nsa
        scores = part.gate_weight if gate == "query" else part.gate_mlp(torch.randn(9, model.config.hidden_size))
        assert not scores.any()
        assert gate == "query" or part.gate_mlp[0].weight.any()


def test_a_folders_configuration_is_changed_by_name_and_checked(tmp_path: Path) -> None:
    sparse(nsa=CONFIG.replace(compress_stride=4)).save_pretrained(tmp_path)
    load = NSALlamaForCausalLM.from_pretrained
    assert load(tmp_path, nsa=dict(block_counts=8)).model.layers[0].self_attn.nsa.config == CONFIG.replace(
        compress_stride=4, block_counts=8
    )
    assert load(tmp_path, nsa=CONFIG).config.nsa == load(tmp_path, nsa=CONFIG).config.to_dict()["nsa"]
    assert load(tmp_path, nsa=CONFIG).model.layers[0].self_attn.nsa.config == CONFIG
    assert load(tmp_path, nsa=None).config.nsa["compress_stride"] == 4
    for error, message, options in (
        (ValueError, "nsa_gate must be one of 'query', 'input', got 'inputs'", dict(nsa_gate="inputs")),
        (ValueError, "nsa_compression must be one of .*, got 'MLP'", dict(nsa_compression="MLP")),
        (
            ValueError,
            "nsa_backend must be one of None, 'cute', .*, got 'gpu'",
            dict(nsa_backend="gpu"),
        ),
        (ValueError, "unknown NSAConfig fields: blocks", dict(nsa=dict(blocks=3))),
        (TypeError, "block_counts must be an int, got 'many'", dict(nsa=dict(block_counts="many"))),
        (TypeError, "nsa must be an NSAConfig, its fields or None, got int", dict(nsa=8)),
    ):
        for kind in (NSALlamaForCausalLM, AutoModelForCausalLM):
            with pytest.raises(error, match=message):
                kind.from_pretrained(tmp_path, **options)
    with pytest.raises(ValueError, match="nsa_gate must be"):
        NSALlamaConfig(**SIZES).update(dict(nsa_gate="inputs"))
    with pytest.raises(AttributeError, match="has nsa, nsa_gate, nsa_compression, nsa_backend, and no nsa_gates"):
        NSALlamaConfig(**SIZES, nsa_gates="query")


@pytest.mark.parametrize("value", [CONFIG, dict(block_size=8, block_counts=4, window_size=16)])
def test_a_dense_models_configuration_has_options_too(value: object) -> None:
    plain, ids = LlamaForCausalLM(LlamaConfig(**SIZES, attn_implementation="nsa", nsa=value)).eval(), tokens(1, 60)
    expected = plain(ids).logits
    plain.config.nsa_backend = "reference"
    torch.testing.assert_close(plain(ids).logits, expected)
    plain.config.nsa_backend = "cute"
    with pytest.raises(ValueError, match="backend='cute' needs tensors on a GPU"):
        plain(ids)
    for nsa, message in ((dict(blocks=3), "unknown NSAConfig fields: blocks"), (8, "nsa must be an NSAConfig")):
        plain.config.nsa = nsa
        with pytest.raises((ValueError, TypeError), match=message):
            plain(ids)


def test_an_edit_of_a_models_configuration_is_refused_and_a_backend_taken() -> None:
    ids = tokens(1, 60)
    for name, value in dict(nsa=dict(block_counts=8), nsa_gate="query", nsa_compression="linear").items():
        model = sparse()
        setattr(model.config, name, value)
        with pytest.raises(ValueError, match=f"config.{name} must be that of the model when it was made"):
            model(ids)
    model.config.nsa_compression = "mean"
    model.config.nsa["window_size"] = 8
    with pytest.raises(ValueError, match="config.nsa must be that of the model"):
        model(ids)
    model.config.nsa = CONFIG
    expected = model(ids).logits
    model.config.nsa_backend = "reference"
    torch.testing.assert_close(model(ids, use_cache=False).logits, expected)
    model.config.nsa_backend = "cute"
    for call in (partial(model, use_cache=False), model, partial(model.generate, max_new_tokens=2)):
        with pytest.raises(ValueError, match="backend='cute' needs tensors on a GPU"):
            call(ids)


@pytest.mark.parametrize("gate, compression", WAYS[1:])
def test_parametrized_and_replaced_parameters_are_the_ones_used(gate: str, compression: str) -> None:
    model, ids = sparse(nsa_gate=gate, nsa_compression=compression), tokens(2, 60)
    expected = model(ids).logits
    for layer in model.model.layers:
        for part in list(layer.self_attn.nsa.modules()):
            for name, x in list(part.named_parameters(recurse=False)):
                if name == "down":  # as the replicas of DataParallel have them
                    del part._parameters[name]
                    setattr(part, name, x.detach().clone())
                else:
                    parametrize.register_parametrization(part, name, nn.Identity())
    assert model(ids).logits.equal(expected)
    replica = sparse(nsa_gate="query", nsa_compression="linear")
    expected = replica(ids).logits
    for layer in replica.model.layers:
        weights = dict(layer.self_attn.nsa.named_parameters(recurse=False))
        layer.self_attn.nsa._parameters.clear()
        vars(layer.self_attn.nsa).update(weights)
    assert replica(ids).logits.equal(expected)


@pytest.fixture
def one_rank() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("gate, compression", WAYS[1:])
def test_gates_and_compression_are_sharded_alone(gate: str, compression: str, one_rank: None) -> None:
    model, ids = sparse(nsa_gate=gate, nsa_compression=compression), tokens(2, 60)
    sharded, mesh = deepcopy(model), init_device_mesh("cpu", (1,))
    for layer in sharded.model.layers:
        fully_shard(layer.self_attn.nsa, mesh=mesh, reshard_after_forward=True)
    for each in (model, sharded):
        each(ids, labels=ids).loss.backward()
    for (name, x), y in zip(model.named_parameters(), sharded.parameters(), strict=True):
        assert x.grad.any(), name
        torch.testing.assert_close(y.grad.full_tensor() if ".nsa." in name else y.grad, x.grad, msg=name)
    assert model.generate(ids, max_new_tokens=5).equal(sharded.generate(ids, max_new_tokens=5))


@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing")
def test_conversion_takes_over_checkpointing_hooks_and_flags() -> None:
    model, ids, calls = dense().train(), tokens(1, 40), []
    model.gradient_checkpointing_enable(dict(use_reentrant=False))
    model.model.layers[0].register_forward_hook(lambda *_: calls.append("layer"))
    model.model.layers[1].self_attn.register_forward_pre_hook(lambda *_: calls.append("attention"))
    model.register_forward_hook(lambda *_: calls.append("model"))
    model.hf_device_map = {"": "cpu"}
    model.model.layers[1].mlp.eval()
    made = convert_to_nsa(model, CONFIG)
    assert made.is_gradient_checkpointing and made.hf_device_map == {"": "cpu"}
    assert made.model.layers[1].self_attn.nsa.training and not made.model.layers[1].mlp.training
    made(ids, labels=ids).loss.backward()
    assert calls[:3] == ["layer", "attention", "model"] and calls.count("attention") == 2  # once to recompute
    made.register_forward_hook(lambda *_: calls.append("sparse"))
    made.gradient_checkpointing_disable()
    calls.clear()
    model(ids)
    assert model.is_gradient_checkpointing and calls == ["layer", "attention", "model"]


def test_conversion_takes_a_model_that_accelerate_prepared() -> None:
    accelerator, ids = Accelerator(cpu=True, mixed_precision="bf16"), tokens(1, 40)
    prepared = accelerator.prepare(dense())
    for model in (prepared, accelerator.unwrap_model(prepared, keep_fp32_wrapper=False)):
        made = convert_to_nsa(model, CONFIG)
        assert "forward" not in vars(made) and made(ids).logits.dtype == torch.float32


class Doubled(nn.Linear):
    """A projection with an adapter."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__(base.in_features, base.out_features)
        self.base_layer = base


def test_conversion_refuses_what_it_cannot_keep() -> None:
    def quantized(model: LlamaForCausalLM) -> LlamaForCausalLM:
        model.hf_quantizer = object()
        return model

    def adapted(model: LlamaForCausalLM) -> LlamaForCausalLM:
        model.model.layers[1].self_attn.q_proj = Doubled(model.model.layers[1].self_attn.q_proj)
        return model

    def patched(model: LlamaForCausalLM) -> LlamaForCausalLM:
        forward = model.model.layers[0].forward
        model.model.layers[0].forward = lambda *given, **options: forward(*given, **options)
        return model

    def compiled(model: LlamaForCausalLM) -> LlamaForCausalLM:
        model.compile()
        return model

    def compiled_forward(model: LlamaForCausalLM) -> LlamaForCausalLM:
        model.forward = torch.compile(model.forward)
        return model

    def compiled_layer(model: LlamaForCausalLM) -> LlamaForCausalLM:
        model.model.layers[1] = torch.compile(model.model.layers[1])
        return model

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        int8 = torch.ao.quantization.quantize_dynamic(dense(), {nn.Linear})
    for model, message in (
        (quantized(dense()), "a quantized model"),
        (int8, "adapters or changed layers: 'lm_head._packed_params"),
        (adapted(dense()), "adapters or changed layers: 'model.layers.1.self_attn.q_proj"),
        (cpu_offload(dense(), execution_device="cpu"), "accelerate offloads or dispatches"),
        (patched(dense()), "LlamaForCausalLM.model.layers.0 is wrapped or compiled"),
        (compiled(dense()), "LlamaForCausalLM is wrapped or compiled"),
        (compiled_forward(dense()), "LlamaForCausalLM is wrapped or compiled"),
        (compiled_layer(dense()), "LlamaForCausalLM.model.layers.1 is wrapped or compiled"),
    ):
        with pytest.raises(NotImplementedError, match=message):
            convert_to_nsa(model, CONFIG)


def test_a_window_in_a_configuration_is_refused_at_once(tmp_path: Path) -> None:
    windows = dict(use_sliding_window=True, sliding_window=8)
    model = Qwen2ForCausalLM(Qwen2Config(**SIZES, **windows, max_window_layers=1))
    with pytest.raises(NotImplementedError, match="layers of sliding_attention: config.layer_types"):
        convert_to_nsa(model)
    full = Qwen2ForCausalLM(Qwen2Config(**SIZES, **windows, max_window_layers=2))
    assert convert_to_nsa(full, CONFIG)(tokens(1, 40)).logits.isfinite().all()


class Int8Linear(nn.Module):
    """A projection by numbers of 8 bits, which has no weight."""

    def __init__(self, of: nn.Linear) -> None:
        super().__init__()
        scale = of.weight.detach().abs().amax() / 127
        self.register_buffer("numbers", (of.weight / scale).round().to(torch.int8))
        self.register_buffer("scale", scale)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x, self.numbers.to(x.dtype) * self.scale)


def test_projections_are_not_asked_for_a_weight() -> None:
    layer = NSAttention(32, num_heads=4, num_kv_heads=2, config=CONFIG)
    model = sparse(nsa=CONFIG)
    for part in (layer, model.model.layers[0].self_attn):
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            setattr(part, name, Int8Linear(getattr(part, name)))
    assert layer(torch.randn(2, 40, 32)).isfinite().all()
    assert model.generate(tokens(1, 40), max_new_tokens=3).shape == (1, 43)


@pytest.mark.parametrize("longest", [50, np.int64(50), torch.tensor(50), None], ids=lambda x: type(x).__name__)
def test_max_length_q_is_any_integer(longest: object) -> None:
    model, ids, starts = sparse(), tokens(1, 90), torch.tensor([0, 40, 90], dtype=torch.int32)
    places = torch.cat((torch.arange(40), torch.arange(50)))[None]
    packed = model(ids, position_ids=places, cu_seq_lens_q=starts, max_length_q=longest).logits
    torch.testing.assert_close(packed[:, 40:], model(ids[:, 40:]).logits)
    with pytest.raises(TypeError):
        model(ids, position_ids=places, cu_seq_lens_q=starts, max_length_q=50.5)
