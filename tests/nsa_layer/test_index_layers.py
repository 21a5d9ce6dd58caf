"""Layers with an index, `NSAttention` and those of transformers: their definition, their loss, conversion, saving."""

from __future__ import annotations

import pickle
from copy import deepcopy
from functools import partial
from pathlib import Path

import pytest
import torch
from hf_cases import CLOSE, CONFIG, INDEX, MARKS, dense, padded, positions, tokens
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint
from transformers import AutoModelForCausalLM, DynamicCache, PreTrainedModel

from nsa_layer import NSACache, NSAConfig, NSAttention, index_loss, nsa
from nsa_layer.checks import starts_of_lengths
from nsa_layer.integrations import hf
from nsa_layer.integrations.hf import convert_to_nsa
from nsa_layer.integrations.hf.models import CACHE
from nsa_layer.rope import RotaryEmbedding

pytestmark = MARKS
Tensor = torch.Tensor
WIDE = INDEX.replace(block_counts=64)
LAYERS = [
    dict(index_dim=4),
    dict(bias=True),  # of as many dimensions as a head
    dict(rope=None, index_dim=16),
    dict(config=INDEX.replace(branches=("selected", "window"))),
    dict(config=INDEX.replace(branches=("compressed", "selected")), gate="input", compression="mlp"),
    dict(config=INDEX.replace(branches=("selected", "window")), gate="linear", kv_per_branch=True, index_dim=6),
]


def layer(**options: object) -> NSAttention:
    """In fp64, of four heads of 8."""
    options = dict(config=INDEX, rope=RotaryEmbedding(8, 100.0)) | options
    return NSAttention(32, num_heads=4, num_kv_heads=2, dtype=torch.float64, **options)


def inputs(*shape: int) -> Tensor:
    return torch.randn(*shape, 32, dtype=torch.float64)


def pairs(D: int, size: int) -> list[int]:
    """Dimensions of the last pairs (i, i + D / 2)."""
    return [i + half for half in (0, D // 2) for i in range(D // 2 - size // 2, D // 2)]


def index_by_definition(made: NSAttention, x: Tensor, positions: Tensor) -> dict[str, Tensor]:
    """The index' arguments of `nsa`, for x [total, dim]."""
    found = {}
    for name in ("q_index", "k_index"):
        x_index = getattr(made, name)(x.detach()).view(len(x), 2, -1)
        if made.rope is not None:
            at, wide = pairs(8, made.index_dim), x.new_zeros(len(x), 2, 8)
            wide[..., at] = x_index
            x_index = made.rope(wide, wide, positions)[0][..., at]
        found[name] = x_index
    return found


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[tuple, dict]]:
    """Calls of `nsa` by layers."""
    seen: list[tuple[tuple, dict]] = []

    def recorded(*args: Tensor, **options: object) -> object:
        seen.append((args, options))
        return nsa(*args, **options)

    monkeypatch.setattr("nsa_layer.module.nsa", recorded)
    monkeypatch.setattr("nsa_layer.integrations.hf.attention.nsa", recorded)
    return seen


@pytest.mark.parametrize("options", LAYERS, ids=str)
def test_a_layer_has_the_index_of_its_projections(options: dict, calls: list) -> None:
    """By the reference; other arguments are those of any layer."""
    made = layer(**options)
    of_index = [name for name, _ in made.named_parameters() if name.startswith(("q_index", "k_index"))]
    for lengths in ((90,), (30, 0, 59, 1)):
        x, starts = inputs(sum(lengths)).requires_grad_(), starts_of_lengths(lengths)
        o, loss = made(x[None]) if len(lengths) == 1 else made(x, cu_seqlens=starts), made.index_loss
        args, given = calls.pop()
        for name, each in index_by_definition(made, x, torch.cat([torch.arange(n) for n in lengths])).items():
            torch.testing.assert_close(given[name].view_as(each), each)
        exact, of_reference = nsa(*args, **given | dict(backend="reference"))
        torch.testing.assert_close((o, loss), (made.o_proj(exact.flatten(-2)), of_reference))
        assert (given["gates"] is given["gate_weight"] is None) == (len(made.config.branches) == 1)
        assert loss > 0 and torch.equal(index_loss(nn.ModuleList([made, nn.Identity()])), loss)
        names, leaves = zip(("x", x), *made.named_parameters())
        d = torch.autograd.grad(loss, leaves, allow_unused=True)
        assert [name for name, each in zip(names, d) if each is not None and each.any()] == of_index


def test_the_loss_is_that_of_the_last_forward_in_training() -> None:
    made, x = layer(), inputs(2, 70)
    none = dict(match=r"index_loss is of a forward in training, .* call train\(\) before")
    with pytest.raises(RuntimeError, **none):
        index_loss(made)
    o, loss = made(x), made.index_loss
    assert torch.equal(made(x, return_aux=True)[0], o) and torch.equal(made.index_loss, loss)
    for copied in (deepcopy(made), pickle.loads(pickle.dumps(made))):
        with pytest.raises(RuntimeError, **none):
            index_loss(copied)
        assert torch.equal(copied(x), o) and torch.equal(index_loss(copied), loss)
    with torch.no_grad():
        made(x)
        assert torch.equal(index_loss(made), loss)  # as a number
    with pytest.raises(RuntimeError, match="index_loss has no graph: .* use_reentrant=False, or return the loss"):
        index_loss(made)
    made.eval()
    assert torch.equal(made(x), o)
    with pytest.raises(RuntimeError, **none):
        index_loss(made)
    with pytest.raises(ValueError, match="index_loss needs a model with layers of rule='index', got NSAttention"):
        index_loss(layer(config=CONFIG))


def in_checkpoint(made: NSAttention, x: Tensor, **options: bool) -> Tensor:
    """The loss is a result of what is checkpointed."""
    o, loss = checkpoint(lambda x: (made(x), index_loss(made)), x, **options)
    return o.square().mean() + loss


def behind_checkpoint(made: NSAttention, x: Tensor) -> Tensor:
    return checkpoint(made, x, use_reentrant=False).square().mean() + index_loss(made)


def compiled(made: NSAttention, x: Tensor) -> Tensor:
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    loss = torch.compile(lambda x: made(x).square().mean() + index_loss(made), fullgraph=True, backend=counter)
    loss(x)
    assert torch.equal(loss(x), loss(x)) and counter.frame_count == 1
    return loss(x)


WAYS = {f"reentrant={each}": partial(in_checkpoint, use_reentrant=each) for each in (True, False)}
WAYS |= {f.__name__: f for f in (behind_checkpoint, compiled)}


@pytest.mark.parametrize("way", WAYS)
def test_ways_to_train_give_the_same_gradients_which_add_up(way: str) -> None:
    made, x = layer(config=INDEX.replace(branches=("selected", "window")), index_dim=4), inputs(2, 70).requires_grad_()
    expected = torch.autograd.grad(made(x).square().mean() + index_loss(made), list(made.parameters()))
    for times in (1, 2):
        WAYS[way](made, x).backward()
        for (name, parameter), d in zip(made.named_parameters(), expected, strict=True):
            assert d.any(), name
            torch.testing.assert_close(parameter.grad, times * d, msg=name)
    checkpoint(made, x, use_reentrant=True)
    with pytest.raises(RuntimeError, match="index_loss has no graph"):
        index_loss(made)


def test_the_loss_alone_trains_behind_a_checkpoint() -> None:
    """Backward begins at the loss, and reads saved tensors once."""
    made, x = layer(config=INDEX.replace(branches=("selected", "window")), index_dim=4), inputs(2, 70).requires_grad_()
    of_index = [parameter for name, parameter in made.named_parameters() if "_index" in name]
    made(x)
    expected = torch.autograd.grad(index_loss(made), of_index)
    checkpoint(made, x, use_reentrant=False)
    for d, of_layer in zip(torch.autograd.grad(index_loss(made), of_index), expected, strict=True):
        assert d.any()
        torch.testing.assert_close(d, of_layer)


PROPORTIONAL = dict(rope_type="proportional", partial_rotary_factor=0.5, rope_theta=100.0)  # the last pairs stand still
DENSE = {
    "llama": ("Llama", dict(attention_bias=True)),
    "partial": ("Llama", dict(rope_parameters=PROPORTIONAL)),
    "qwen2": ("Qwen2", {}),
    "qwen3": ("Qwen3", dict(head_dim=12)),
}


def noisy(model: PreTrainedModel) -> PreTrainedModel:
    """With biases and norms other than those that they start with."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("bias", "_norm.weight")):
                parameter.add_(torch.randn_like(parameter), alpha=0.3)
    return model


@pytest.mark.parametrize("index_dim", [None, 4])
@pytest.mark.parametrize("family", DENSE)
def test_a_converted_model_with_all_blocks_is_the_dense_one(family: str, index_dim: int | None, calls: list) -> None:
    """And chooses by its own keys and the mean of a group's queries, normed alone, of the pairs that turn slowest."""
    kind, options = DENSE[family]
    model, ids = noisy(dense(kind, **options)), tokens(2, 90)
    expected, converted = model(ids).logits, convert_to_nsa(model, WIDE, index_dim=index_dim)
    torch.testing.assert_close(converted(ids).logits, expected, **CLOSE)
    new = {name.split(".nsa.")[1].split(".")[0] for name, _ in converted.named_parameters() if ".nsa." in name}
    assert new <= {"q_index", "k_index", "q_index_norm", "k_index_norm"}  # no gates
    for (args, given), part in zip(calls, converted.model.layers, strict=True):
        (q, k, _), own = args, part.self_attn
        at = pairs(q.shape[-1], given["k_index"].shape[-1])
        if family != "qwen3":
            q = q.unflatten(2, (2, 2)).mean(3)
            torch.testing.assert_close((given["q_index"], given["k_index"]), (q[..., at], k[..., at]))
        else:  # means and fewer dimensions have norms of their own
            rows = own.q_proj.weight.unflatten(0, (2, 2, -1)).mean(1)[:, at].flatten(0, 1)
            assert own.nsa.q_index.weight.equal(rows)
            assert own.nsa.q_index_norm.weight.equal(own.q_norm.weight[at])
            if index_dim is None:
                torch.testing.assert_close(given["k_index"], k)


def gradients(model: nn.Module, ids: Tensor, call: nn.Module | None = None) -> list[Tensor]:
    model.zero_grad()
    loss = (model if call is None else call)(ids, labels=ids, use_cache=False).loss + index_loss(model)
    loss.backward()
    return [x.grad.full_tensor() if isinstance(x.grad, DTensor) else x.grad for x in model.parameters()]


@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing")
def test_a_model_trains_its_index_compiled_sharded_and_with_checkpoints(one_rank: None) -> None:
    model, ids = convert_to_nsa(dense("Qwen3"), INDEX, index_dim=4).train(), tokens(2, 70)
    expected, sharded = gradients(model, ids), sharded_by_layer(deepcopy(model))
    assert all(d.any() for d in expected)
    torch._dynamo.reset()
    ways = [gradients(model, ids, torch.compile(model, fullgraph=True, backend="aot_eager"))]
    model.gradient_checkpointing_enable(dict(use_reentrant=False))
    ways += gradients(model, ids), gradients(sharded, ids)
    for way in ways:
        torch.testing.assert_close(way, expected)
    model.gradient_checkpointing_enable(dict(use_reentrant=True))
    model(ids)
    with pytest.raises(RuntimeError, match="index_loss has no graph"):
        index_loss(model)


def sharded_by_layer(model: nn.Module) -> nn.Module:
    mesh = init_device_mesh("cpu", (1,))
    for each in [part for part in model.modules() if hasattr(part, "self_attn")]:
        fully_shard(each, mesh=mesh, reshard_after_forward=True)
    return fully_shard(model, mesh=mesh)


@pytest.mark.parametrize("sharded", [False, True])
def test_the_index_alone_learns_what_a_frozen_model_attends_to(sharded: bool, one_rank: None) -> None:
    """Of no output that FSDP2 could wait for; norms of the index need their weights in backward."""
    model, ids = convert_to_nsa(dense("Qwen3"), INDEX, index_dim=4).train(), tokens(2, 120)
    for name, x in model.named_parameters():
        x.requires_grad_("_index" in name)
    assert not model(ids).logits.requires_grad  # layers save nothing but their index'
    index_loss(model).backward()
    expected = [x.grad for x in model.parameters() if x.requires_grad]
    assert all(d.any() for d in expected)
    model.zero_grad()
    model = sharded_by_layer(model) if sharded else model
    trained = [x for x in model.parameters() if x.requires_grad]
    optimizer, losses = torch.optim.Adam(trained, lr=2e-2), []
    for _ in range(10):
        optimizer.zero_grad()
        model(ids)
        losses.append(index_loss(model))
        assert index_loss(model) == losses[-1]
        losses[-1].backward()
        if len(losses) == 1:
            got = [x.grad.full_tensor() if sharded else x.grad for x in trained]
            torch.testing.assert_close(got, expected)
        optimizer.step()
    assert losses[-1] < 0.8 * losses[0]


def test_saved_and_loaded_it_goes_on_as_it_was(tmp_path: Path) -> None:
    model, ids = convert_to_nsa(noisy(dense("Qwen2")), INDEX, index_dim=4).train(), tokens(2, 60)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)

    def step(model: PreTrainedModel, optimizer: torch.optim.Optimizer) -> Tensor:
        optimizer.zero_grad()
        loss = model(ids, labels=ids).loss + index_loss(model)
        loss.backward()
        optimizer.step()
        return loss

    step(model, optimizer)
    model.save_pretrained(tmp_path)
    state = deepcopy(optimizer.state_dict())
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path).train()
    assert loaded.config.nsa_index_dim == 4 and loaded.config.nsa["branches"] == ("selected",)
    other = torch.optim.Adam(loaded.parameters())
    other.load_state_dict(state)
    for _ in range(2):
        assert torch.equal(step(loaded, other), step(model, optimizer))


@pytest.mark.parametrize("family", ["Llama", "Qwen2", "Qwen3"])
def test_a_dense_folder_starts_an_index_as_conversion_does(family: str, tmp_path: Path) -> None:
    model, kind = (
        noisy(dense(family, **dict(head_dim=8) if family == "Qwen3" else {})),
        getattr(hf, f"NSA{family}ForCausalLM"),
    )
    model.save_pretrained(tmp_path / "dense")
    options = dict(nsa=dict(rule="index", branches=("selected",), block_counts=64, block_size=8), nsa_index_dim=4)
    loaded, ids = kind.from_pretrained(tmp_path / "dense", **options).eval(), tokens(2, 60)
    torch.testing.assert_close(loaded(ids).logits, model(ids).logits, **CLOSE)
    converted = convert_to_nsa(model, NSAConfig(**options["nsa"]), index_dim=4)
    for (name, x), y in zip(loaded.named_parameters(), converted.parameters(), strict=True):
        assert x.equal(y), name
    # Of a folder that has part of an index, that part is kept.
    parameters = {name: x + 1 for name, x in converted.state_dict().items()}
    missing = "model.layers.1.self_attn.nsa.k_index.weight"
    converted.save_pretrained(tmp_path / "part", state_dict={n: x for n, x in parameters.items() if n != missing})
    again = kind.from_pretrained(tmp_path / "part").state_dict()
    assert all(x.equal(parameters[name]) for name, x in again.items() if name != missing)
    start = parameters[missing.replace("nsa.k_index", "k_proj")].unflatten(0, (2, 8))[:, pairs(8, 4)]
    assert again[missing].equal(start.flatten(0, 1))


def test_padded_and_packed_rows_choose_and_lose_as_alone() -> None:
    """With gates, too, which start at nearly 1 for the selected branch."""
    llama, ids, config = dense(), tokens(2, 90), INDEX.replace(branches=("selected", "window"))
    near, expected = convert_to_nsa(llama, config.replace(block_counts=64))(ids).logits, llama(ids).logits
    assert 0 < (near - expected).norm() < 0.2 * expected.norm()
    model, batch = convert_to_nsa(llama, config).train(), padded(ids, (0, 31))
    mask = batch["attention_mask"]
    together, loss = model(**batch, position_ids=positions(mask)).logits[mask.bool()], index_loss(model)
    packed, starts = torch.cat([ids[0], ids[1, 31:]])[None], starts_of_lengths((90, 59))
    logits = model(packed, position_ids=positions(mask)[mask.bool()][None], cu_seq_lens_q=starts).logits[0]
    torch.testing.assert_close((logits, index_loss(model)), (together, loss), **CLOSE)
    alone = torch.cat([model(row[None]).logits[0] for row in (ids[0], ids[1, 31:])])
    torch.testing.assert_close(alone, together, **CLOSE)
    nothing = model(**batch | dict(attention_mask=torch.zeros_like(mask))).logits
    (nothing.sum() + index_loss(model)).backward()
    assert not index_loss(model) and all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


def test_generation_computes_no_loss() -> None:
    model, ids = convert_to_nsa(dense(), INDEX).eval(), tokens(2, 40)
    text = model.generate(ids, max_new_tokens=4)
    assert text.equal(model.generate(ids, max_new_tokens=4, use_cache=False)) and text.shape == (2, 44)
    with pytest.raises(RuntimeError, match="forward in training"):
        index_loss(model)


def test_what_an_index_does_not_fit_is_an_error() -> None:
    llama, other, ids = dense(), dense(), tokens(1, 20)
    cache = NSACache(1, 40, 2, 8, config=INDEX, index_dim=8, dtype=torch.float64)
    model = convert_to_nsa(llama, INDEX)
    other.model.layers[1].self_attn.k_proj.weight = nn.Parameter(torch.zeros(16, 32, dtype=torch.int8), False)
    for error, message, call in (
        (ValueError, "nsa_index_dim must be even and at most the head dimension 8, got 3",
         lambda: convert_to_nsa(llama, INDEX, index_dim=3)),
        (ValueError, "nsa_index_dim must be even and at most the head dimension 8, got 16",
         lambda: convert_to_nsa(llama, INDEX, index_dim=16)),
        (ValueError, "index_dim is for rule='index', got 4", lambda: convert_to_nsa(llama, CONFIG, index_dim=4)),
        (NotImplementedError, "an index starts from k_proj, which has no weight of floating point",
         lambda: convert_to_nsa(other, INDEX)),
        (ValueError, r"q_index must have shape .*, 8\), got .*, 4\)",
         lambda: layer(index_dim=4)(inputs(1, 9), cache=cache)),
        (ValueError, "rule='index' needs causal=True", lambda: layer()(inputs(1, 9), causal=False)),
        (NotImplementedError, "an index with a cache of transformers' own: use NSAModelCache",
         lambda: model.generate(ids, **{CACHE: DynamicCache()}, max_new_tokens=3)),
    ):  # fmt: skip
        with pytest.raises(error, match=message):
            call()
