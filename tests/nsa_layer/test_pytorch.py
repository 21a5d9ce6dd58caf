"""The layer in what people put around it: compiled and exported graphs, checkpoints, copies."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.export import Dim, export
from torch.nn.utils import parametrize
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from nsa_layer import NSAConfig, NSAttention, nsa, selected_attention
from nsa_layer.rope import RotaryEmbedding

SMALL = NSAConfig(block_size=8, block_counts=3, q_tile=1, window_size=8)
DIM, HEADS = 32, dict(num_heads=4, num_kv_heads=2)
MODULES = {
    "default": {},
    "tile": dict(config=SMALL.replace(q_tile=16), compression="linear"),
    "paper": dict(compression="mlp", kv_per_branch=True, gate="input", rope=RotaryEmbedding(8)),
}


@pytest.fixture(autouse=True)
def nothing_compiled_before() -> None:
    torch._dynamo.reset()


def layer(**options: object) -> NSAttention:
    made = NSAttention(DIM, **HEADS, **dict(dict(config=SMALL), **options))
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    return made


def gradients(o: torch.Tensor, *of: torch.Tensor) -> list[torch.Tensor]:
    return [o, *torch.autograd.grad(o.square().sum(), of)]


def assert_same(got: Sequence[torch.Tensor], want: Sequence[torch.Tensor]) -> None:
    for x, y in zip(got, want, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("options", MODULES.values(), ids=MODULES)
def test_one_graph_serves_every_length(options: dict) -> None:
    module, counter = layer(**options), CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(module, fullgraph=True, backend=counter)
    for T in (40, 57):
        x = torch.randn(2, T, DIM, requires_grad=True)
        torch._dynamo.mark_dynamic(x, 1)
        of = (x, *module.parameters())
        assert_same(gradients(compiled(x), *of), gradients(module(x), *of))
    assert counter.frame_count == 1


@pytest.mark.parametrize("options", MODULES.values(), ids=MODULES)
def test_one_graph_serves_every_packing(options: dict) -> None:
    module, counter = layer(**options), CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(module, fullgraph=True, backend=counter)
    x = torch.randn(60, DIM, requires_grad=True)
    of = (x, *module.parameters())
    for lengths in ((7, 0, 53), (30, 29, 1)):
        starts = torch.tensor([0, *lengths]).cumsum(0).int()
        assert_same(gradients(compiled(x, cu_seqlens=starts), *of), gradients(module(x, cu_seqlens=starts), *of))
    assert counter.frame_count == 1
    with pytest.raises(ValueError, match="cu_seqlens must end at the 60 tokens"):
        compiled(x, cu_seqlens=starts - torch.tensor([0, 0, 0, 1], dtype=torch.int32))


def test_attention_to_lists_compiles() -> None:
    q, k, v = (torch.randn(60, h, 8, requires_grad=True) for h in (4, 2, 2))
    lists, starts = torch.randint(-1, 1, (60, 2, 3), dtype=torch.int32), torch.tensor([0, 7, 7, 60]).int()
    call = partial(selected_attention, block_size=8)
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    of = (q, k, v)
    packed = (*of, lists), dict(cu_seqlens=starts)
    batch = tuple(x[None] for x in (*of, lists)), dict(q_offset=torch.zeros(1, dtype=torch.int32))
    for tensors, more in (packed, batch):
        assert_same(gradients(compiled(*tensors, **more), *of), gradients(call(*tensors, **more), *of))


def test_the_reference_compiles() -> None:
    q, k, v = (torch.randn(1, 20, h, 8, requires_grad=True) for h in (4, 2, 2))
    call = partial(nsa, config=SMALL, backend="reference")
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    assert_same(gradients(compiled(q, k, v), q, k, v), gradients(call(q, k, v), q, k, v))
    starts = torch.tensor([0, 7, 20]).int()
    with pytest.raises(Exception, match="reference' reads cu_seqlens"):  # of Dynamo's kind
        compiled(*(x[0].detach() for x in (q, k, v)), cu_seqlens=starts)


class Model(nn.Module):
    """Two layers between an embedding and a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(11, DIM), nn.Linear(DIM, 11)
        self.layers = nn.ModuleList(layer() for _ in range(2))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for each in self.layers:
            x = x + each(F.rms_norm(x, (DIM,)))
        return F.cross_entropy(self.head(x[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


@pytest.mark.sweep
@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_a_model_compiles_whole(mode: str) -> None:
    model, tokens = Model(), torch.randint(0, 11, (2, 40))
    of = tuple(model.parameters())
    want = gradients(model(tokens), *of)
    assert_same(gradients(torch.compile(model, fullgraph=True, mode=mode)(tokens), *of), want)


def test_autocast_compiles() -> None:
    module, x = layer(), torch.randn(1, 40, DIM)
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    with torch.autocast("cpu", torch.bfloat16):
        got, want = compiled(x), module(x)
    assert got.dtype == torch.bfloat16
    torch.testing.assert_close(got, want)


def test_results_beside_the_output_compile() -> None:
    q, k, v = (torch.randn(1, 40, h, 8) for h in (4, 2, 2))
    call = partial(nsa, config=SMALL, return_aux=True)
    (got, aux), (want, wanted) = torch.compile(call, fullgraph=True, backend="aot_eager")(q, k, v), call(q, k, v)
    assert_same([got, aux.gates, aux.lse_slc], [want, wanted.gates, wanted.lse_slc])
    assert torch.equal(aux.block_indices, wanted.block_indices)


def test_errors_of_shapes_come_before_a_graph() -> None:
    compiled = torch.compile(layer(), backend="aot_eager")
    with pytest.raises(ValueError, match=r"x must be \[B, T, dim\]"):
        compiled(torch.randn(1, 40, DIM + 1))


@pytest.mark.parametrize("strict", [True, False])
def test_an_export_takes_any_length(strict: bool) -> None:
    module = layer(**MODULES["paper"])
    shapes = {"x": {0: Dim("B", min=1, max=64), 1: Dim("T", min=16, max=4096)}}
    exported = export(module, (torch.randn(2, 40, DIM),), dynamic_shapes=shapes, strict=strict)
    file = io.BytesIO()
    torch.export.save(exported, file)
    file.seek(0)
    x = torch.randn(3, 57, DIM)
    assert_same([torch.export.load(file).module()(x)], [module(x)])


@pytest.mark.sweep
def test_a_package_of_aotinductor_takes_any_length(tmp_path: Path) -> None:
    module = layer().requires_grad_(False)
    shapes = {"x": {0: Dim("B", min=1, max=64), 1: Dim("T", min=16, max=4096)}}
    exported = export(module, (torch.randn(2, 40, DIM),), dynamic_shapes=shapes)
    quick = {"aot_inductor.precompile_headers": False, "aot_inductor.compile_wrapper_opt_level": "O0"}
    options = dict(package_path=str(tmp_path / "layer.pt2"), inductor_configs=quick)
    path = torch._inductor.aoti_compile_and_package(exported, **options)
    x = torch.randn(3, 57, DIM)
    assert_same([torch._inductor.aoti_load_package(path)(x)], [module(x)])


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_selective_checkpoints_keep_the_operators(device: str) -> None:
    """Plain PyTorch's, and the kernels'."""
    if device == "cpu":
        module, x, seen = layer(), torch.randn(1, 40, DIM), []
    else:
        made = NSAttention(256, num_heads=4, num_kv_heads=2, config=NSAConfig(deterministic=True))
        module, x, seen = made.to(device, torch.bfloat16), torch.randn(1, 300, 256, device=device).bfloat16(), []
    x.requires_grad_()
    kept = torch.ops.nsa_layer.branches if device == "cpu" else torch.ops.nsa_layer.attend

    def policy(context: object, op: object, *_: object, **__: object) -> CheckpointPolicy:
        if op is not kept.default:
            return CheckpointPolicy.PREFER_RECOMPUTE
        seen.append(op)
        return CheckpointPolicy.MUST_SAVE

    contexts = partial(create_selective_checkpoint_contexts, policy)
    of = (x, *module.parameters())
    got = gradients(checkpoint(module, x, use_reentrant=False, context_fn=contexts), *of)
    assert_same(got, gradients(module(x), *of))
    assert seen


def test_checkpoints_and_hooks() -> None:
    module, x = layer(), torch.randn(1, 40, DIM, requires_grad=True)
    of = (x, *module.parameters())
    want = gradients(module(x), *of)
    assert_same(gradients(checkpoint(module, x, use_reentrant=False), *of), want)
    o = checkpoint(module, x, use_reentrant=True)
    o.square().sum().backward()
    assert_same([o, *(each.grad for each in of)], want)
    with torch.autograd.graph.save_on_cpu():
        assert_same(gradients(module(x), *of), want)


def test_scaled_gradients_add_up() -> None:
    module, x = layer(), torch.randn(2, 40, DIM)
    optimizer, scaler = torch.optim.SGD(module.parameters()), torch.amp.GradScaler("cpu")
    want = torch.autograd.grad(module(x).square().mean(), list(module.parameters()))
    for part in x.split(1):
        scaler.scale(module(part).square().mean() / 2).backward()
    scaler.unscale_(optimizer)
    assert_same([each.grad for each in module.parameters()], want)


COPIES: dict[str, Callable[[NSAttention], nn.Module]] = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda module: pickle.loads(pickle.dumps(module)),
    "functional_call": lambda module: (
        lambda x: torch.func.functional_call(copy.deepcopy(module), dict(module.named_parameters()), x)
    ),
    "parametrize": lambda module: parametrize.register_parametrization(
        copy.deepcopy(module).requires_grad_(False), "gate_weight", nn.Identity()
    ),
}


@pytest.mark.parametrize("way", COPIES)
def test_copies_compute_the_same(way: str) -> None:
    module, x = layer(), torch.randn(1, 40, DIM)
    assert torch.equal(COPIES[way](module)(x), module(x))


def test_a_layer_made_without_memory_is_filled_later() -> None:
    with torch.device("meta"):
        module = NSAttention(DIM, **HEADS, config=SMALL, **MODULES["paper"])
    module.to_empty(device="cpu").reset_parameters()
    assert module(torch.randn(1, 40, DIM)).isfinite().all()


def test_a_state_without_the_branches_projections_is_refused() -> None:
    with pytest.raises(RuntimeError, match="branch_proj"):
        layer(kv_per_branch=True).load_state_dict(layer().state_dict())


def test_a_profiler_names_the_operators_and_their_parts() -> None:
    with torch.profiler.profile() as profiler:
        layer()(torch.randn(1, 40, DIM)).sum().backward()
    names = {"nsa_layer::branches", "nsa_layer::branches_backward", "nsa_layer::choose", "nsa_layer::slc"}
    assert names <= {event.key for event in profiler.key_averages()}
