"""Models of transformers with sparse attention: initial values, configurations, and what conversion takes over."""

from __future__ import annotations

import json
import runpy
import warnings
from collections.abc import Iterator
from copy import deepcopy
from pathlib import Path
from types import SimpleNamespace

import hf_cases
import pytest
import torch
from accelerate import Accelerator, cpu_offload
from hf_cases import CONFIG, MARKS, SIZES, tokens
from safetensors.torch import save_file
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM, CompileConfig, LlamaConfig, LlamaForCausalLM, PreTrainedModel

from nsa_layer import NSAConfig, NSAttention, nsa
from nsa_layer.integrations.hf import NSALlamaConfig, NSALlamaForCausalLM, NSALlamaModel, convert_to_nsa

pytestmark = MARKS

WAYS = [("query", "linear"), ("input", "mlp"), ("linear", "mlp")]


def sparse(**changes: object) -> NSALlamaForCausalLM:
    return hf_cases.sparse(**changes).float()


def dense(family: str = "Llama", **changes: object) -> PreTrainedModel:
    return hf_cases.dense(family, **changes).float()


@pytest.fixture
def poisoned() -> Iterator[None]:
    """Memory that is not initialized holds NaN."""
    torch.use_deterministic_algorithms(True)
    assert torch.utils.deterministic.fill_uninitialized_memory and torch.empty(3).isnan().all()
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("start", ["scratch", "base", "dense folder", "linear folder", "part of a folder"])
@pytest.mark.parametrize("gate", ["input", "linear", "query"])
def test_all_parameters_start_as_they_should(start: str, gate: str, poisoned: None, tmp_path: Path) -> None:
    compression = "linear" if (start, gate) == ("dense folder", "query") else "mlp"
    options = dict(nsa_gate=gate, nsa_compression=compression, nsa=CONFIG)
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
        elif ".compress_" in name:
            assert (x == torch.eye(x.shape[-1])).all(), name
        elif name.endswith(".position"):
            assert abs(x.std() / 0.02 - 1) < 0.2, name
    if start in ("scratch", "base", "dense folder"):
        part = model.base_model.layers[1].self_attn.nsa
        scores = part.gate_weight if gate == "query" else part.gate_mlp(torch.randn(9, model.config.hidden_size))
        assert not scores.any()
        assert gate != "input" or part.gate_mlp[0].weight.any()


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
        (ValueError, "nsa_gate must be one of None, 'query', 'input', 'linear', got 'inputs'", dict(nsa_gate="inputs")),
        (ValueError, "nsa_compression must be one of .*, got 'MLP'", dict(nsa_compression="MLP")),
        (ValueError, "nsa_backend must be one of None, 'cute', .*, got 'gpu'", dict(nsa_backend="gpu")),
        (ValueError, "values must be fields of NSAConfig, got blocks", dict(nsa=dict(blocks=3))),
        (TypeError, "block_counts must be an int, got 'many'", dict(nsa=dict(block_counts="many"))),
        (TypeError, "nsa must be an NSAConfig, its fields or None, got int", dict(nsa=8)),
    ):
        for kind in (NSALlamaForCausalLM, AutoModelForCausalLM):
            with pytest.raises(error, match=message):
                kind.from_pretrained(tmp_path, **options)
    with pytest.raises(ValueError, match="nsa_gate must be"):
        NSALlamaConfig(**SIZES).update(dict(nsa_gate="inputs"))
    with pytest.raises(
        AttributeError, match="has nsa, nsa_gate, nsa_compression, nsa_index_dim, nsa_backend, and no nsa_gates"
    ):
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
    for value, message in (
        (dict(blocks=3), "fields of NSAConfig, got blocks"),
        (8, "nsa must be an NSAConfig"),
    ):
        plain.config.nsa = value
        with pytest.raises((ValueError, TypeError), match=message):
            plain(ids)


def test_another_attention_of_a_model_is_refused() -> None:
    """The fuzzing sets other fields, and backends."""
    ids, model = tokens(1, 60), sparse()
    model.config.nsa = CONFIG  # the same
    expected = model(ids).logits
    model.set_attn_implementation("eager")
    with pytest.raises(ValueError, match="config._attn_implementation must be .*, 'nsa', got 'eager'"):
        model(ids)
    model.set_attn_implementation("nsa")
    model.config.nsa_backend = "reference"
    torch.testing.assert_close(model(ids, use_cache=False).logits, expected)


@pytest.mark.parametrize("gate, compression", WAYS)
def test_parameters_that_are_tensors_are_the_ones_used(gate: str, compression: str) -> None:
    """As the replicas of DataParallel have them."""
    model, ids = sparse(nsa_gate=gate, nsa_compression=compression), tokens(2, 60)
    expected = model(ids).logits
    for part in model.model.layers[1].self_attn.nsa.modules():
        weights = {name: None if x is None else x.detach().clone() for name, x in part._parameters.items()}
        part._parameters.clear()
        vars(part).update(weights)
    assert model(ids).logits.equal(expected)


@pytest.mark.parametrize("gate, compression", WAYS)
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
def test_conversion_copies_hooks_and_flags() -> None:
    """So that those set later belong to one model; the fuzzing looks that they are there."""
    model, ids, calls = dense().train(), tokens(1, 40), []
    model.gradient_checkpointing_enable(dict(use_reentrant=False))
    model.model.layers[1].self_attn.register_forward_pre_hook(lambda *_: calls.append("attention"))
    model.register_forward_hook(lambda *_: calls.append("model"))
    made = convert_to_nsa(model, CONFIG)
    made(ids, labels=ids).loss.backward()
    assert calls == ["attention", "model", "attention"]  # once to recompute
    made.register_forward_hook(lambda *_: calls.append("sparse"))
    made.gradient_checkpointing_disable()
    calls.clear()
    model(ids)
    assert model.is_gradient_checkpointing and calls == ["attention", "model"]


def test_conversion_takes_a_model_that_accelerate_prepared() -> None:
    accelerator, ids = Accelerator(cpu=True, mixed_precision="bf16"), tokens(1, 40)
    prepared = accelerator.prepare(dense())
    for model in (prepared, accelerator.unwrap_model(prepared, keep_fp32_wrapper=False)):
        made = convert_to_nsa(model, CONFIG)
        assert "forward" not in vars(made) and made(ids).logits.dtype == torch.float32


def test_conversion_leaves_what_belongs_to_the_dense_model(tmp_path: Path) -> None:
    renamed = {f"of.{name}": x for name, x in dense().state_dict().items()}
    dense().save_pretrained(tmp_path / "dense", state_dict=renamed)
    loaded = LlamaForCausalLM.from_pretrained(tmp_path / "dense", key_mapping={r"^of\.": ""}).eval()
    how = CompileConfig(backend="eager", mode=None)
    loaded.get_compiled_call(how)
    made, ids = convert_to_nsa(loaded, CONFIG), tokens(1, 60)
    made.get_compiled_call(how)
    assert made._compiled_call is not loaded._compiled_call
    made.save_pretrained(tmp_path / "sparse")
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "sparse")(ids).logits.equal(made(ids).logits)


def test_conversion_refuses_what_it_cannot_keep() -> None:
    """Beside what the fuzzing refuses: parts that libraries replace."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        int8 = torch.ao.quantization.quantize_dynamic(dense(), {nn.Linear})
    quantized = dense()
    quantized.hf_quantizer = SimpleNamespace(quantization_config=SimpleNamespace(quant_method="bitsandbytes"))
    compiled, forward, layer = dense(), dense(), dense()
    compiled.compile()
    forward.forward = torch.compile(forward.forward)
    layer.model.layers[1] = torch.compile(layer.model.layers[1])
    for model, message in (
        (int8, "adapters or changed layers: 'lm_head._packed_params"),
        (quantized, "a quantized model: convert it first"),
        (cpu_offload(dense(), execution_device="cpu"), "accelerate offloads or dispatches"),
        (compiled, "LlamaForCausalLM is wrapped or compiled"),
        (forward, "LlamaForCausalLM is wrapped or compiled"),
        (layer, "LlamaForCausalLM.model.layers.1 is wrapped or compiled"),
    ):
        with pytest.raises(NotImplementedError, match=message):
            convert_to_nsa(model, CONFIG)
    windows = dense("Qwen2", use_sliding_window=True, sliding_window=8, max_window_layers=2)  # in no layer
    assert convert_to_nsa(windows, CONFIG)(tokens(1, 40)).logits.isfinite().all()


def test_a_model_of_a_gguf_file_converts(tmp_path: Path) -> None:
    """Its weights are plain ones, although transformers calls it quantized."""
    model = dense()
    model.is_quantized = True
    model.hf_quantizer = SimpleNamespace(quantization_config=SimpleNamespace(quant_method="gguf"))
    model.config.quantization_config = {"quant_method": "gguf"}
    converted = convert_to_nsa(model)
    converted.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert not hasattr(loaded.config, "quantization_config") and not getattr(converted, "is_quantized", False)


def test_projections_are_not_asked_for_a_weight() -> None:
    layer = NSAttention(32, num_heads=4, num_kv_heads=2, config=CONFIG)
    model = sparse(nsa=CONFIG)
    for part in (layer, model.model.layers[0].self_attn):
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            setattr(part, name, nn.Sequential(getattr(part, name)))
    assert layer(torch.randn(2, 40, 32)).isfinite().all()
    assert model.generate(tokens(1, 40), max_new_tokens=3).shape == (1, 43)


FLA = dict(vocab_size=64, hidden_size=48, num_hidden_layers=2, num_heads=4, num_kv_heads=2, head_dim=32, norm_eps=1e-5)
FLA |= dict(block_size=8, block_counts=4, window_size=12, rope_theta=5e3, max_position_embeddings=512, qkv_bias=False)
FLA |= dict(bos_token_id=1, eos_token_id=2, pad_token_id=None)
D, WIDTH = 16, 40  # heads are not of head_dim, as the layers do not read it


def fla_weights(bias: bool) -> dict[str, torch.Tensor]:
    """Tensors of fla's names and shapes."""
    dim, heads, kv_heads = FLA["hidden_size"], FLA["num_heads"], FLA["num_kv_heads"]
    projections = dict(q_proj=(heads * D, dim), k_proj=(kv_heads * D, dim), v_proj=(kv_heads * D, dim))
    parts = {f"attn.{name}.weight": shape for name, shape in projections.items()}
    parts |= {f"attn.{name}.bias": shape[:1] for name, shape in projections.items() if bias}
    parts |= {"attn.g_proj.weight": (3 * heads, dim), "attn.o_proj.weight": (dim, heads * D)}
    parts |= {"attn_norm.weight": (dim,), "mlp_norm.weight": (dim,), "mlp.down_proj.weight": (dim, WIDTH)}
    parts |= {"mlp.gate_proj.weight": (WIDTH, dim), "mlp.up_proj.weight": (WIDTH, dim)}
    layers = range(FLA["num_hidden_layers"])
    shapes = {f"model.layers.{i}.{name}": shape for i in layers for name, shape in parts.items()}
    shapes |= {"model.embeddings.weight": (64, dim), "model.norm.weight": (dim,), "lm_head.weight": (64, dim)}
    return {name: torch.randn(shape) * (shape[-1] ** -0.5 if len(shape) > 1 else 1) for name, shape in shapes.items()}


def plain_logits(weights: dict[str, torch.Tensor], ids: torch.Tensor) -> torch.Tensor:
    """The logits of tokens [T] in fp64."""
    weights = {name: x.double() for name, x in weights.items()}
    x = weights["model.embeddings.weight"][ids]
    for i in range(FLA["num_hidden_layers"]):
        layer = {name.split(f"layers.{i}.")[1]: w for name, w in weights.items() if f"layers.{i}." in name}
        x = x + plain_attention(normed(x, layer["attn_norm.weight"]), layer)
        h = normed(x, layer["mlp_norm.weight"])
        h = nn.functional.silu(h @ layer["mlp.gate_proj.weight"].T) * (h @ layer["mlp.up_proj.weight"].T)
        x = x + h @ layer["mlp.down_proj.weight"].T
    return normed(x, weights["model.norm.weight"]) @ weights["lm_head.weight"].T


def normed(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return weight * x * (x.square().mean(-1, keepdim=True) + FLA["norm_eps"]).rsqrt()


def plain_attention(x: torch.Tensor, layer: dict[str, torch.Tensor]) -> torch.Tensor:
    q, k, v = (
        nn.functional.linear(x, layer[f"attn.{p}.weight"], layer.get(f"attn.{p}.bias")).view(1, len(x), -1, D)
        for p in ("q_proj", "k_proj", "v_proj")
    )
    angles = torch.arange(len(x))[:, None, None] * FLA["rope_theta"] ** (-torch.arange(0, D, 2).double() / D)
    q, k = (
        torch.cat((a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()), dim=-1)
        for a, b in (q.chunk(2, dim=-1), k.chunk(2, dim=-1))
    )
    gates = (x @ layer["attn.g_proj.weight"].T).sigmoid().view(1, len(x), -1, 3)
    config = NSAConfig(**{name: FLA[name] for name in ("block_size", "block_counts", "window_size")})
    o = nsa(q, k, v, gates=gates, config=config, backend="reference")
    return o[0].flatten(1) @ layer["attn.o_proj.weight"].T


@pytest.mark.parametrize("bias", [False, True])
def test_weights_of_fla_give_its_logits(bias: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    weights, ids = fla_weights(bias), tokens(80)
    save_file({name: x.contiguous() for name, x in weights.items()}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(FLA | dict(qkv_bias=bias)))
    monkeypatch.setattr("sys.argv", ["from_fla.py", str(tmp_path), str(tmp_path / "ours")])
    runpy.run_path(str(Path(__file__).parents[2] / "examples" / "from_fla.py"), run_name="__main__")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "ours").eval()
    torch.testing.assert_close(model(ids[None]).logits[0].double(), plain_logits(weights, ids), rtol=0, atol=2e-5)
    projections = model.model.layers[0].self_attn
    assert (projections.q_proj.bias is not None) == bias and projections.o_proj.bias is None
