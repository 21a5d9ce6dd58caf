"""The layer in what people put around it: compiled and exported graphs, checkpoints, copies; on the CPU, in plain
PyTorch, and on a GPU on the kernels."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from layer_calls import assert_near, gradients
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.export import Dim, export
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import parametrize
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from nsa_layer import NSAConfig, NSAttention, nsa, selected_attention
from nsa_layer.checks import starts_of_lengths
from nsa_layer.rope import RotaryEmbedding

Tensor = torch.Tensor


@dataclass(frozen=True)
class Place:
    """A device, and sizes for its backend: ``dim`` is four heads, ``lengths`` are of sequences and divide ``total``."""

    device: str
    dim: int
    config: NSAConfig
    dtype: torch.dtype
    lengths: tuple[int, int]
    packings: tuple[tuple[int, ...], ...]

    @property
    def total(self) -> int:
        return sum(self.packings[0])

    def tokens(self, *shape: int) -> Tensor:
        return torch.randn(*shape, self.dim).to(self.device, self.dtype)

    def heads(self, *lead: int) -> list[Tensor]:
        """q, k and v that need gradients."""
        each = (torch.randn(*lead, h, self.dim // 4) for h in (4, 2, 2))
        return [x.to(self.device, self.dtype).requires_grad_() for x in each]

    def starts(self, lengths: Iterable[int]) -> Tensor:
        return starts_of_lengths(lengths, self.device)


SMALL = NSAConfig(block_size=8, block_counts=3, q_tile=1, window_size=8)
CPU = Place("cpu", 32, SMALL, torch.float32, (40, 57), ((7, 0, 53), (30, 29, 1)))
FIXED = NSAConfig(deterministic=True)
GPU = Place("cuda", 256, FIXED, torch.bfloat16, (300, 1000), ((300, 0, 723), (1, 895, 127)))


@pytest.fixture(params=[pytest.param(CPU, id="cpu"), pytest.param(GPU, id="cuda", marks=pytest.mark.gpu)])
def place(request: pytest.FixtureRequest) -> Place:
    return request.param


def faded(q: Tensor, k: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    """A position embedding of a caller's own."""
    scale = torch.cos(positions[..., None, None] / 100)
    return q * scale.to(q.dtype), k * scale.to(k.dtype)


MODULES = {
    "default": {},
    "tile": dict(q_tile=16, compression="linear", rope=faded),
    "paper": dict(compression="mlp", kv_per_branch=True, gate="input", rope="rotary"),
}


@pytest.fixture(autouse=True)
def nothing_compiled_before() -> None:
    torch._dynamo.reset()


def layer(place: Place, q_tile: int = 1, rope: object = None, **options: object) -> NSAttention:
    """A layer none of whose parameters is zero."""
    torch.manual_seed(0)
    rope = RotaryEmbedding(place.dim // 4) if rope == "rotary" else rope
    config = place.config.replace(q_tile=q_tile)
    made = NSAttention(place.dim, num_heads=4, num_kv_heads=2, config=config, rope=rope, **options)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    return made.to(place.device, place.dtype)


@pytest.mark.parametrize("packed", [False, True], ids=["lengths", "packings"])
@pytest.mark.parametrize("options", MODULES.values(), ids=MODULES)
def test_one_graph_serves_every(options: dict, packed: bool, place: Place) -> None:
    module, counter = layer(place, **options), CompileCounterWithBackend("aot_eager")
    compiled, tokens = torch.compile(module, fullgraph=True, backend=counter), place.tokens(place.total)
    for size in place.packings if packed else place.lengths:
        x = (tokens if packed else place.tokens(2, size)).requires_grad_()
        starts = place.starts(size) if packed else None
        if not packed:
            torch._dynamo.mark_dynamic(x, 1)
        of = (x, *module.parameters())
        assert_near(gradients(compiled(x, cu_seqlens=starts), *of), gradients(module(x, cu_seqlens=starts), *of))
    assert counter.frame_count == 1
    if packed and place is CPU:
        with pytest.raises(ValueError, match="cu_seqlens must end at the 60 tokens"):
            compiled(x, cu_seqlens=starts - torch.tensor([0, 0, 0, 1], dtype=torch.int32))


@pytest.mark.parametrize("options", MODULES.values(), ids=MODULES)
def test_short_sequences_leave_no_parameter_without_a_gradient(options: dict, place: Place) -> None:
    """DDP and FSDP count on it; without a whole block compression has nothing to do."""
    module = layer(place, **options)
    for x, given in ((place.tokens(2, 1), {}), (place.tokens(4), dict(cu_seqlens=place.starts((1, 0, 3))))):
        found = gradients(module(x, **given), *module.parameters())  # an error where one is not used
        assert all(d.isfinite().all() for d in found)


def test_attention_to_lists_compiles(place: Place) -> None:
    q, k, v = of = place.heads(place.total)
    lists = torch.randint(-1, 1, (place.total, 2, 3), dtype=torch.int32, device=place.device)
    call = partial(selected_attention, block_size=place.config.block_size, deterministic=True)
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    starts = dict(cu_seqlens=place.starts(place.packings[0]))
    packed, of_tiles = (*of, lists), (*of, lists[: sum(-(-T // 8) for T in place.packings[0])])
    batch = tuple(x[None] for x in (*of, lists)), dict(q_offset=torch.zeros(1, dtype=torch.int32, device=place.device))
    for tensors, more in ((packed, starts), (of_tiles, starts), batch):
        assert_near(gradients(compiled(*tensors, **more), *of), gradients(call(*tensors, **more), *of))


def test_the_reference_compiles() -> None:
    q, k, v = of = CPU.heads(1, 20)
    call = partial(nsa, config=SMALL, backend="reference")
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    assert_near(gradients(compiled(q, k, v), *of), gradients(call(q, k, v), *of))
    with pytest.raises(Exception, match="reference' reads cu_seqlens"):  # of Dynamo's kind
        compiled(*(x[0].detach() for x in of), cu_seqlens=CPU.starts((7, 13)))


@pytest.mark.sweep
@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_two_layers_compile_whole(mode: str, place: Place) -> None:
    layers, x = [layer(place), layer(place)], place.tokens(2, place.lengths[0]).requires_grad_()
    of = (x, *layers[0].parameters(), *layers[1].parameters())

    def model(x: Tensor) -> Tensor:
        for each in layers:
            x = x + each(nn.functional.rms_norm(x, x.shape[-1:]))
        return x

    want, compiled = gradients(model(x), *of), torch.compile(model, fullgraph=True, mode=mode)
    for _ in range(3 if mode == "reduce-overhead" else 1):  # a graph of CUDA is recorded at the second step
        torch.compiler.cudagraph_mark_step_begin()
        assert_near(gradients(compiled(x), *of), want)


def test_autocast_compiles(place: Place) -> None:
    module, x = layer(place).float(), place.tokens(1, place.lengths[0]).float()
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    with torch.autocast(place.device, torch.bfloat16):
        got, want = compiled(x), module(x)
    assert got.dtype == torch.bfloat16
    torch.testing.assert_close(got, want)


def test_results_beside_the_output_compile(place: Place) -> None:
    q, k, v = (x.detach() for x in place.heads(1, place.lengths[0]))
    call = partial(nsa, config=place.config, return_aux=True)
    (got, aux), (want, wanted) = torch.compile(call, fullgraph=True, backend="aot_eager")(q, k, v), call(q, k, v)
    assert_near([got, aux.gates, aux.lse_slc], [want, wanted.gates, wanted.lse_slc])
    width = wanted.block_indices.shape[-1]  # in a graph there is capacity for any length
    assert torch.equal(aux.block_indices[..., :width], wanted.block_indices)
    assert (aux.block_indices[..., width:] == -1).all()


def test_errors_of_shapes_come_before_a_graph() -> None:
    compiled = torch.compile(layer(CPU), backend="aot_eager")
    with pytest.raises(ValueError, match=r"x must have shape \(B, T, "):
        compiled(torch.randn(1, 40, CPU.dim + 1))


def exported(module: NSAttention, place: Place, strict: bool) -> torch.export.ExportedProgram:
    least = 2 * max(place.config.block_size, module.config.q_tile)
    shapes = {"x": {0: Dim("B", min=1, max=64), 1: Dim("T", min=least, max=4096)}}
    x = place.tokens(2, place.lengths[0]).to(module.q_proj.weight.dtype)
    return export(module, (x,), dynamic_shapes=shapes, strict=strict)


@pytest.mark.parametrize("name, strict", [("paper", True), ("paper", False), ("tile", False), ("own means", False)])
def test_an_export_takes_any_length(name: str, strict: bool, place: Place) -> None:
    """In 16 bits too, where PyTorch asks for more of strides."""
    dtype = place.dtype if strict else torch.bfloat16
    module = layer(place, **dict(MODULES, **{"own means": dict(kv_per_branch=True)})[name]).to(dtype)
    program, file = exported(module, place, strict), io.BytesIO()
    operator = torch.ops.nsa_layer.attend.default
    assert [node.target for node in program.graph.nodes].count(operator) == 1
    torch.export.save(program, file)
    file.seek(0)
    loaded = torch.export.load(file).module()
    for shape in ((3, place.lengths[1]), (1, place.lengths[0])):
        x = place.tokens(*shape).to(dtype)
        assert_near([loaded(x)], [module(x)])


class Packed(nn.Module):
    """A layer that takes the starts of sequences beside tokens."""

    def __init__(self, module: NSAttention) -> None:
        super().__init__()
        self.module = module

    def forward(self, x: Tensor, starts: Tensor) -> Tensor:
        return self.module(x, cu_seqlens=starts)


def test_an_export_takes_any_packing(place: Place) -> None:
    module = layer(place, **MODULES["paper"]).requires_grad_(False)
    total, least = place.total, 2 * place.config.block_size
    shapes = {"x": {0: Dim("total", min=least, max=4096)}, "starts": {0: Dim("starts", min=3, max=64)}}
    given = place.tokens(total), place.starts(place.packings[0])
    program = export(Packed(module), given, dynamic_shapes=shapes).module()
    for lengths in (place.packings[1], (total, 40)):
        x, starts = place.tokens(sum(lengths)), place.starts(lengths)
        assert_near([program(x, starts)], [module(x, cu_seqlens=starts)])


@pytest.mark.sweep
def test_a_package_of_aotinductor_takes_any_length(tmp_path: Path, place: Place) -> None:
    module = layer(place).requires_grad_(False)
    quick = {"aot_inductor.precompile_headers": False, "aot_inductor.compile_wrapper_opt_level": "O0"}
    options = dict(package_path=str(tmp_path / "layer.pt2"), inductor_configs=quick)
    with torch.no_grad():
        path = torch._inductor.aoti_compile_and_package(exported(module, place, False), **options)
    x = place.tokens(3, place.lengths[1])
    assert_near([torch._inductor.aoti_load_package(path)(x)], [module(x)])


@pytest.mark.parametrize("compiles", [False, True], ids=["eager", "compiled"])
def test_selective_checkpoints_keep_the_operators(compiles: bool, place: Place) -> None:
    """Backward does not call them again."""
    module, x = layer(place), place.tokens(1, place.lengths[0]).requires_grad_()
    kept, of = torch.ops.nsa_layer.attend.default, (x, *module.parameters())

    def policy(context: object, op: object, *_: object, **__: object) -> CheckpointPolicy:
        return CheckpointPolicy.MUST_SAVE if op is kept else CheckpointPolicy.PREFER_RECOMPUTE

    def run(x: Tensor) -> Tensor:
        contexts = partial(create_selective_checkpoint_contexts, policy)
        return checkpoint(module, x, use_reentrant=False, context_fn=contexts)

    compiled = torch.compile(run, fullgraph=True, backend="aot_eager") if compiles else run
    assert_near(gradients(compiled(x), *of), gradients(module(x), *of))
    assert chosen(lambda: gradients(compiled(x), *of)) == chosen(lambda: gradients(module(x), *of)) > 0


def chosen(call: Callable[[], object]) -> int:
    """Selections of blocks, which forward alone makes."""
    with torch.profiler.profile() as profiler:
        call()
    return sum(event.count for event in profiler.key_averages() if event.key == "nsa_layer::choose")


def test_checkpoints_and_hooks(place: Place) -> None:
    module, x = layer(place), place.tokens(1, place.lengths[0]).requires_grad_()
    of = (x, *module.parameters())
    want = gradients(module(x), *of)
    assert_near(gradients(checkpoint(module, x, use_reentrant=False), *of), want)
    o = checkpoint(module, x, use_reentrant=True)
    o.float().square().sum().backward()
    assert_near([o, *(each.grad for each in of)], want)
    with torch.autograd.graph.save_on_cpu():
        assert_near(gradients(module(x), *of), want)


COPIES: dict[str, Callable[[NSAttention], Callable[[Tensor], Tensor]]] = {
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
def test_copies_compute_the_same(way: str, place: Place) -> None:
    module, x = layer(place), place.tokens(1, place.lengths[0])
    assert torch.equal(COPIES[way](module)(x), module(x))


def test_a_layer_made_without_memory_is_filled_later(place: Place) -> None:
    options = dict(config=place.config, **MODULES["paper"] | dict(rope=RotaryEmbedding(place.dim // 4)))
    with torch.device("meta"):
        module = NSAttention(place.dim, num_heads=4, num_kv_heads=2, dtype=place.dtype, **options)
    module.to_empty(device=place.device)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.fill_(torch.nan)
    module.reset_parameters()
    assert module(place.tokens(1, place.lengths[0])).isfinite().all()


@pytest.mark.parametrize("own", [False, True], ids=["to own projections", "from own projections"])
def test_a_state_of_a_layer_with_other_projections_is_refused(own: bool) -> None:
    state = nn.Sequential(layer(CPU, kv_per_branch=own)).state_dict()
    with pytest.raises(RuntimeError, match="0.branch_proj.k_win.weight"):
        nn.Sequential(layer(CPU, kv_per_branch=not own)).load_state_dict(state)
    same = nn.Sequential(layer(CPU, kv_per_branch=own))
    same.load_state_dict(state)
    assert all(torch.equal(x, state[name]) for name, x in same.state_dict().items())


def test_a_profiler_names_the_operators_and_their_parts(place: Place) -> None:
    module, x = layer(place), place.tokens(1, place.lengths[0])
    with torch.profiler.profile() as profiler:
        module(x).float().sum().backward()
        torch.compile(module, fullgraph=True, backend="aot_eager")(x).float().sum().backward()
    names = {f"nsa_layer::{name}" for name in ("attend", "attend_backward", "choose")}
    assert names | {"nsa_layer::slc" if place is CPU else "nsa_layer::slc_dkdv"} <= {
        event.key for event in profiler.key_averages()
    }


@pytest.mark.gpu
def test_wrappers_of_distributed_training_run_the_kernels(tmp_path: Path) -> None:
    """In one process, by NCCL."""
    module, x = layer(GPU), GPU.tokens(1, 1000)
    want = [d.clone() for d in torch.autograd.grad(module(x).float().square().mean(), list(module.parameters()))]
    store = f"file://{tmp_path / 'store'}"
    dist.init_process_group("nccl", init_method=store, rank=0, world_size=1, device_id=torch.device("cuda", 0))
    try:
        both = DistributedDataParallel(copy.deepcopy(module)), fully_shard(module, mesh=init_device_mesh("cuda", (1,)))
        for wrapped in both:
            wrapped(x).float().square().mean().backward()
            found = [p.grad for p in wrapped.parameters()]
            assert_near([d.full_tensor() if isinstance(d, DTensor) else d for d in found], want)
    finally:
        dist.destroy_process_group()
