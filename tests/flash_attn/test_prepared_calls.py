"""Prepared calls: repeated where the signature is the same, the function's own anywhere else."""

from __future__ import annotations

import ast
import weakref
from collections.abc import Callable
from pathlib import Path
from types import FunctionType
from typing import NamedTuple

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from flash_attn.cute import interface, prepared_calls
from flash_attn.cute.cache_utils import JITCache
from flash_attn.cute.call_recording import Recording, active
from flash_attn.cute.prepared_calls import REASONS, Prepared


class Extra(NamedTuple):
    scale: torch.Tensor | None
    factor: int


class Layer:
    """A function like the kernels' host code: it allocates, computes a little, and launches out of a cache."""

    def __init__(self, **options: object) -> None:
        self.calls = 0
        self.launches: list[tuple] = []
        self.cache = JITCache()
        self.cache["add"] = self._add
        self.prepared = Prepared(self.function, **options)

    def _add(self, x: torch.Tensor, y: torch.Tensor, out: torch.Tensor, total: torch.Tensor, extra: Extra) -> None:
        self.launches.append((x.shape, extra.factor))
        out.copy_(x + y * extra.factor + (0 if extra.scale is None else extra.scale))
        total.add_(out.sum(dtype=total.dtype))

    def function(self, x, y, *, factor=2, scale=None, flag=None, out=None):
        self.calls += 1
        out = torch.empty_like(x) if out is None else out
        total = torch.zeros(1, dtype=torch.float32)
        self.cache["add"](x.detach(), y.contiguous(), out, total, Extra(scale, factor))
        return out, total, None, factor


def same(got: tuple, want: tuple) -> None:
    for a, b in zip(got, want, strict=True):
        assert torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b


def three(layer: Layer, *args, **kwargs) -> None:
    for _ in range(3):
        layer.prepared(*args, **kwargs)


def test_third_call_launches_without_the_function() -> None:
    layer, want = Layer(), Layer()
    for seed in range(4):
        x, y = (torch.randn(3, 4, generator=torch.Generator().manual_seed(2 * seed + i)) for i in (0, 1))
        same(layer.prepared(x, y, factor=3), want.function(x, y, factor=3))
    assert (layer.calls, len(layer.launches)) == (2, 4)
    assert layer.prepared.refusals == []


def test_outputs_are_new_and_accumulators_start_at_zero() -> None:
    layer = Layer()
    x = torch.ones(3)
    results = [layer.prepared(x, x) for _ in range(5)]
    assert len({out.data_ptr() for out, *_ in results}) == 5
    assert [total.item() for _, total, *_ in results] == [9.0] * 5


def varied() -> list:
    x, y = torch.randn(4, 6), torch.randn(4, 6)
    memory = torch.randn(26)
    return [
        pytest.param((torch.randn(5, 6), torch.randn(5, 6)), {}, id="shape"),
        pytest.param((torch.randn(6, 4).t(), y), {}, id="stride"),
        pytest.param((x.double(), y.double()), {}, id="dtype"),
        pytest.param((memory[1:25].view(4, 6), y), {}, id="alignment"),
        pytest.param((x, x), {}, id="the same tensor twice"),
        pytest.param((x.clone().requires_grad_(), y), {}, id="requires_grad"),
        pytest.param((torch.nn.Parameter(x), y), {}, id="parameter"),
        pytest.param((x, y), dict(factor=3), id="value"),
        pytest.param((x, y), dict(factor=2.0), id="type of an equal number"),
        pytest.param((x, y), dict(flag=True), id="option"),
        pytest.param((x, y), dict(scale=torch.ones(1)), id="optional tensor"),
        pytest.param((x, y), dict(out=torch.empty(4, 6)), id="output given"),
    ]


@pytest.mark.parametrize(("args", "kwargs"), varied())
def test_whatever_the_launch_depends_on_makes_a_new_entry(args: tuple, kwargs: dict) -> None:
    layer, want = Layer(), Layer()
    three(layer, torch.randn(4, 6), torch.randn(4, 6))
    assert layer.calls == 2
    same(layer.prepared(*args, **kwargs), want.function(*args, **kwargs))
    assert layer.calls == 3
    for _ in range(3):
        same(layer.prepared(*args, **kwargs), want.function(*args, **kwargs))
    assert layer.calls == 4


@pytest.mark.parametrize(
    ("usual", "other"),
    [
        (dict(factor=2), dict(factor=2.0)),
        (dict(factor=1), dict(factor=True)),
        (dict(flag=torch.ones(1)), dict(scale=torch.ones(1))),
        (dict(flag=(1, 2)), dict(flag=[1, 2])),
    ],
)
def test_equal_is_not_the_same(usual: dict, other: dict) -> None:
    layer, want = Layer(), Layer()
    x, y = torch.randn(4, 6), torch.randn(4, 6)
    three(layer, x, y, **usual)
    assert layer.calls == 2
    got = layer.prepared(x, y, **other)
    same(got, want.function(x, y, **other))
    assert layer.calls == 3 and type(got[-1]) is type(other.get("factor", 2))


def test_state_is_part_of_the_signature(monkeypatch: pytest.MonkeyPatch) -> None:
    for knob in prepared_calls.KNOBS:
        layer = Layer()
        x = torch.ones(2)
        three(layer, x, x)
        monkeypatch.setenv(knob, "64")
        layer.prepared(x, x)
        assert layer.calls == 3, knob
    with torch.autocast("cuda", dtype=torch.bfloat16):
        layer.prepared(x, x)
    assert layer.calls == 4


def test_inputs_may_share_memory_and_move_within_it() -> None:
    """Slices of one projection's output, as layers have them; where the next call has them is another matter."""
    layer, want = Layer(), Layer()
    views = Prepared(lambda q, k: q[1:].unsqueeze(0) * 2 + k[:-1])
    for shift in range(6):
        qkv = torch.randn(7, 48)
        q, k = qkv[:, shift * 8 : shift * 8 + 4], torch.randn(7, 48)[:, :4] if shift == 4 else qkv[:, 36:40]
        same(layer.prepared(q, k), want.function(q, k))
        assert torch.equal(views(q, k), views.function(q, k))
    assert layer.calls <= 4 and views.refusals == []


def test_result_that_is_an_input_is_that_input() -> None:
    layer = Layer()
    for _ in range(4):
        x, out = torch.randn(2, 2), torch.empty(2, 2)
        assert layer.prepared(x, x.clone(), out=out)[0].data_ptr() == out.data_ptr()
    assert layer.calls == 2


def cases_of_operators() -> dict[str, Callable]:
    def views(x, y):
        a = x.unsqueeze(0).expand(3, *x.shape)
        return a, a[1, ::2], y.t()[1:], torch.cat([x, y], 1).split(3, 1)

    def in_place(x, y):
        z = torch.zeros(8, 8)
        z[: x.shape[0], : x.shape[1]] += x
        z[2:, 2:].mul_(2)
        return z, z[1:3], y.to(torch.promote_types(y.dtype, torch.float64))

    def several(x, y):
        best, at = (x @ y.t()).topk(2, dim=-1)
        return best, at.to(torch.int32), torch.where(x > 0, x, 0.0), torch.full((2,), 3.0), torch.arange(5)

    def nothing(x, y):
        return None

    def other_type(x, y):
        return (x + y).view(torch.int32) ^ 1

    return {f.__name__: f for f in (views, in_place, several, nothing, other_type)}


@pytest.mark.parametrize("name", cases_of_operators())
def test_operators_of_pytorch_are_repeated(name: str) -> None:
    function = cases_of_operators()[name]
    calls = []
    prepared = Prepared(lambda x, y: calls.append(1) or function(x, y))
    flat = lambda r: [t for p in r or () for t in (p if isinstance(p, tuple) else (p,))] if r is not None else []  # noqa: E731
    for _ in range(5):
        x, y = torch.randn(4, 6), torch.randn(4, 6)
        got, want = prepared(x, y), function(x, y)
        got, want = ([got], [want]) if isinstance(want, torch.Tensor) else (flat(got), flat(want))
        for a, b in zip(got, want, strict=True):
            assert torch.equal(a, b) and a.stride() == b.stride()
    assert prepared.refusals == [] and len(calls) == 2


KEPT = torch.ones(4, 6)


@pytest.mark.parametrize(
    ("function", "said"),
    [
        (lambda x: x * x.sum().item(), "act on"),
        (lambda x: x.nonzero(), "waits for values"),
        (lambda x: x + KEPT, "neither passed nor made"),
        (lambda x: x + torch.tensor([1.0] * 6), "neither passed nor made"),
        (lambda x: {"x": x}, "dict"),
    ],
)
def test_what_cannot_be_repeated_stays_the_function_s_own(function: Callable, said: str) -> None:
    calls = []
    prepared = Prepared(lambda x: calls.append(1) or function(x))
    for _ in range(5):
        x = torch.randn(4, 6)
        got, want = prepared(x), function(x)
        assert torch.equal(got["x"] if isinstance(got, dict) else got, want["x"] if isinstance(want, dict) else want)
    assert len(calls) == 5 and len(prepared.refusals) == 1 and said in prepared.refusals[0]


def test_reasons_of_shapes_that_never_end_are_not_all_kept() -> None:
    """A training run has ever new lengths, and each could say why it is not repeated."""
    prepared = Prepared(lambda x: x + KEPT.new_zeros(6) + KEPT.sum())
    for rows in range(1, 3 * REASONS):
        for _ in range(2):
            prepared(torch.zeros(rows, 6))
    assert len(prepared.refusals) == REASONS


def test_memory_that_inputs_share_is_not_guessed_at() -> None:
    """A view of what both are slices of: of which of them it is one, a later call may see otherwise."""
    base = torch.randn(4, 8)
    prepared = Prepared(lambda x, y: x + y + base[:, 2:6])
    for _ in range(4):
        assert torch.equal(prepared(base[:, :4], base[:, 4:]), base[:, :4] + base[:, 4:] + base[:, 2:6])
    assert "several inputs" in prepared.refusals[0]


def test_fake_tensors_and_tensors_in_static_arguments_go_to_the_function() -> None:
    layer = Layer()
    with FakeTensorMode():
        x = torch.empty(3, 4)
        three(layer, x, x)
    x = torch.randn(2)
    x.__leading_dim__ = 0
    three(layer, x, x)
    three(layer, torch.randn(2), torch.randn(2), flag=frozenset([x]))
    assert layer.calls == 9 and not layer.prepared._programs


def test_temporaries_are_let_go_of() -> None:
    cache, alive = JITCache(), []

    def kernel(x: torch.Tensor, out: torch.Tensor) -> None:
        alive.append((weakref.ref(x), [ref() is not None for ref, _ in alive[-1:]]))
        out.copy_(x)

    cache["k"] = kernel

    def function(x: torch.Tensor) -> torch.Tensor:
        first = torch.empty_like(x)
        cache["k"](x, first)
        second = torch.empty_like(x)
        cache["k"](first, second)
        third = torch.empty_like(x)
        cache["k"](second, third)
        return third

    prepared = Prepared(function)
    for _ in range(2):
        prepared(torch.randn(3))
    alive.clear()
    x = torch.randn(3)
    assert torch.equal(prepared(x), x)
    assert [was for _, was in alive] == [[], [True], [False]]  # the input is the caller's


def test_an_error_while_recording_is_the_function_s_and_ends_the_recording() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        if active() is not None:
            raise ValueError("from within")
        return x + 1

    prepared = Prepared(function)
    prepared(torch.ones(2))
    with pytest.raises(ValueError, match="from within"):
        prepared(torch.ones(2))
    assert active() is None
    with Recording([]), pytest.raises(RuntimeError, match="already"), Recording([]):
        pass


def test_a_prepared_call_within_another_is_part_of_it() -> None:
    inner = Layer()
    outer = Prepared(lambda x, y: inner.prepared(inner.prepared(x, y)[0], y)[0])
    want = Layer()
    for _ in range(5):
        x, y = torch.randn(3), torch.randn(3)
        assert torch.equal(outer(x, y), want.function(want.function(x, y)[0], y)[0])
    assert outer.refusals == [] and len(inner.launches) == 10


def test_entries_are_bounded() -> None:
    layer = Layer(capacity=4)
    for n in range(1, 20):
        layer.prepared(torch.ones(n), torch.ones(n))
    assert len(layer.prepared._programs) == 4


def test_who_watches_sees_the_function() -> None:
    watched = [False]
    layer = Layer(unless=lambda: watched[0])
    three(layer, torch.ones(10), torch.ones(10))
    watched[0] = True
    three(layer, torch.ones(10), torch.ones(10))
    watched[0] = False
    three(layer, torch.ones(10), torch.ones(10))
    assert layer.calls == 2 + 3


def test_a_recording_keeps_no_memory() -> None:
    """A call of millions of tokens has room for what it holds at a time, not for all that it ever makes."""
    live, most = [], []

    def made(x: torch.Tensor) -> torch.Tensor:
        live.append(weakref.ref(x.untyped_storage()))
        most.append(sum(ref() is not None for ref in live))
        return x

    def function(x: torch.Tensor) -> torch.Tensor:
        for _ in range(20):
            x = made(torch.empty_like(x).copy_(x + 1).unsqueeze(0)[0].mul(2))
        return x[1:]

    prepared = Prepared(function)
    for _ in range(4):
        x = torch.randn(5)
        live.clear(), most.clear()
        got, peak = prepared(x), max(most, default=0)
        assert peak <= 2 and torch.equal(got, function(x))
    assert prepared.refusals == [] and len(prepared._programs) == 1 and not most[20:]


def test_what_watches_operators_is_not_compiled() -> None:
    """A recording within a compiled function sees the function's operators, not those of compiling the recording."""

    def recorded(x: torch.Tensor) -> tuple[Recording, torch.Tensor]:
        with Recording([x]) as recording:
            y = torch.empty_like(x)
            y.copy_(x * 2)
            out = y + 1
        return recording, out

    x = torch.randn(4)
    steps = len(recorded(x)[0]._steps)
    compiled = torch.compile(lambda x: recorded(x + 0), backend="eager")
    for _ in range(2):
        recording, out = compiled(x)
        assert recording.refusal is None and len(recording._steps) == steps
        assert torch.equal(out, x * 2 + 1)


def test_every_cache_of_kernels_is_one_that_a_recording_sees() -> None:
    functions = [f for f in vars(interface).values() if isinstance(f, FunctionType)]
    caches = [f.compile_cache for f in functions if hasattr(f, "compile_cache")]
    assert len(caches) > 8 and all(isinstance(cache, JITCache) for cache in caches)


def test_the_environment_is_read_nowhere_else() -> None:
    """A knob that a version of upstream adds has to go into KNOBS, or be known not to matter."""
    elsewhere = {
        "FLASH_ATTENTION_MLA_1CTA",  # absorbed attention, which the layer has none of
        "FLASH_ATTENTION_CUTE_VALIDATE_LISTS",  # the public functions'
    }
    found = set()
    # How and where kernels are kept is asked once a process.
    others = ("cute_dsl_ptxas.py", "prepared_calls.py", "kernel_cache.py")
    for file in Path(interface.__file__).parent.glob("*.py"):
        for function in ast.walk(ast.parse(file.read_text())):
            if isinstance(function, ast.FunctionDef) and file.name not in others:
                found |= {_variable(node, file) for node in ast.walk(function) if _reads_environment(node)}
    assert found <= set(prepared_calls.KNOBS) | elsewhere
    assert set(prepared_calls.KNOBS) <= found


def _reads_environment(node: ast.AST) -> bool:
    called = ast.unparse(node.func) if isinstance(node, ast.Call) else ""
    return called in ("os.getenv", "os.environ.get", "environ.get", "getenv")


def _variable(node: ast.Call, file: Path) -> str:
    name = node.args[0]
    return name.value if isinstance(name, ast.Constant) else "FLASH_ATTENTION_CUTE_VALIDATE_LISTS"
