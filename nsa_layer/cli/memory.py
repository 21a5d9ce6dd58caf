"""`python -m nsa_layer memory`: peak memory of `nsa`, predicted and measured, and the longest call that fits."""

from __future__ import annotations

import argparse
import json
import sys
from functools import partial

import torch

from nsa_layer.api import nsa
from nsa_layer.cli.peaks import in_a_process_of_its_own, longest, outside_allocator, peaks_by_component
from nsa_layer.cli.shape import Shape, add_shape_options, backend_of, shapes
from nsa_layer.cli.variants import is_out_of_memory
from nsa_layer.measure import peak_bytes
from nsa_layer.policy import RESERVE, MemoryPolicy, Schedule, Sizes, predict, schedule
from nsa_layer.problem import Problem
from nsa_layer.tables import markdown

STEP = 1 << 16  # tokens to which the longest call is found
ALLOCATORS = ("expandable_segments:False", "expandable_segments:True")


def sizes(shape: Shape, *, gated: bool, backward: bool) -> Sizes:
    """What the policy's predictions depend on."""
    q, v = (torch.empty(*shape.tokens(), *heads, dtype=shape.dtype, device="meta") for heads in _heads(shape))
    problem = Problem(shape.config, True, shape.D**-0.5, shape.lengths)
    return Sizes.of(q, v, problem=problem, gated=gated, needs_grad=backward)


def _heads(shape: Shape) -> tuple[tuple[int, int], tuple[int, int]]:
    return (shape.Hq, shape.D), (shape.Hkv, shape.Dv)


def input_bytes(shape: Shape) -> int:
    """q, k and v: the caller's."""
    tokens = shape.B * shape.T
    return tokens * (shape.Hq * shape.D + shape.Hkv * (shape.D + shape.Dv)) * shape.dtype.itemsize


def planned(shape: Shape, *, gated: bool, backward: bool, total: int | None = None) -> Schedule:
    """How a call goes about it; with `total` on a GPU with so many bytes and nothing else on it."""
    of = sizes(shape, gated=gated, backward=backward)
    if total is None or shape.policy.budget is not None:
        return schedule(of, shape.policy, torch.device(shape.device))
    parts = predict(of, of.Hkv, (backward,) * 3)
    left = int(total * (1 - RESERVE)) - input_bytes(shape) - parts["outputs"] - parts["gradients"]
    return schedule(of, MemoryPolicy(budget=max(0, left), recompute=shape.policy.recompute), torch.device("cpu"))


def predicted(shape: Shape, plan: Schedule, *, gated: bool, backward: bool) -> dict[str, int]:
    """Bytes by component of `policy.predict`, and "peak", above the inputs."""
    first, end = plan.groups[0]
    parts = predict(sizes(shape, gated=gated, backward=backward), end - first, plan.kept)
    work = max(parts["forward"], parts["backward"] + parts["gradients"])
    return parts | {"peak": parts["outputs"] + parts["saved"] + work}


def fits_in(shape: Shape, total: int, *, gated: bool, backward: bool) -> bool:
    """Whether the prediction leaves the policy's reserve of so many bytes."""
    plan = planned(shape, gated=gated, backward=backward, total=total)
    peak = predicted(shape, plan, gated=gated, backward=backward)["peak"]
    return input_bytes(shape) + peak <= total * (1 - RESERVE)


class Measured:
    """The same call again and again: what it takes above its inputs."""

    def __init__(self, shape: Shape, backend: str, *, gated: bool, backward: bool) -> None:
        self.shape, self.backward = shape, backward
        self.inputs = shape.inputs()
        if not gated:
            del self.inputs["gate_weight"]
        self.attend = partial(nsa, **shape.options(), backend=backend)

    def call(self) -> None:
        """Forward, and backward with a do that counts."""
        if not self.backward:
            with torch.no_grad():
                self.attend(**self.inputs)
            return
        o = self.attend(**self.inputs)
        torch.autograd.grad(o, list(self.inputs.values()), torch.ones_like(o))

    def peaks(self) -> dict[str, int]:
        """The call's peak, after one that compiled; on a GPU that of each component too."""
        self.call()
        found = {"peak": peak_bytes(self.call, self.shape.device)}
        if self.shape.device.startswith("cuda"):
            found |= {name: peak for name, peak in peaks_by_component(self.call).items()}
        return found


def table(
    cases: list[Shape],
    backend: str,
    *,
    measured: bool,
    gated: bool,
    backward: bool,
    total: int | None = None,
) -> str:
    """A row for each shape: the plan, predictions by component, the measured peak; in GiB."""
    parts = ("outputs", "gradients", "saved", "forward", "backward", "peak")
    rows = []
    for shape in cases:
        plan = planned(shape, gated=gated, backward=backward, total=total)
        expected = predicted(shape, plan, gated=gated, backward=backward)
        groups = f"{len(plan.groups)}" + (f", {sum(plan.kept)} of 3" if backward else "")
        row = [f"{shape.T:,}", groups, _gib(input_bytes(shape)), *(_gib(expected[name]) for name in parts)]
        if measured:
            row += _measured_cells(shape, backend, expected["peak"], gated=gated, backward=backward)
        rows.append(row)
    header = ["T", "groups, kept", "q, k, v", *parts[:-1], "predicted peak"]
    return markdown(header + (["measured peak", "measured / predicted"] if measured else []), rows)


def _measured_cells(shape: Shape, backend: str, expected: int, **what: bool) -> list[str]:
    try:
        peak = Measured(shape, backend, **what).peaks()["peak"]
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        return ["out of memory", ""]
    return [_gib(peak), f"{peak / expected:.2f}"]


def component_table(shape: Shape, backend: str, **what: bool) -> str:
    """The measured peak inside each component of one shape on a GPU, above the inputs."""
    before = outside_allocator()
    peaks = Measured(shape, backend, **what).peaks()
    held = outside_allocator() - before
    rows = [[name, _gib(peak)] for name, peak in sorted(peaks.items(), key=lambda item: -item[1])]
    # Code is loaded when a kernel first runs, and stays.
    rows += [["compiled kernels, outside the allocator", _gib(max(0, held))]]
    rows += [["context and libraries, outside the allocator", _gib(before)]]
    return markdown([f"T={shape.T:,}: while in", "allocated (GiB)"], rows)


def find_longest(shape: Shape, backend: str, total: int, *, measure: bool, **what: bool) -> str:
    """The longest call that fits, by prediction, and by trying."""

    def fits(T: int) -> bool:
        return fits_in(shape.at(T), total, **what)

    def runs(T: int) -> bool:
        try:
            Measured(shape.at(T), backend, **what).call()
            torch.cuda.synchronize()
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            error.__traceback__ = None
            return False
        finally:
            torch.cuda.empty_cache()
        return True

    expected = longest(fits, guess=STEP, step=STEP)
    plan = planned(shape.at(max(expected, STEP)), total=total, **what)
    kind = "forward and backward" if what["backward"] else "forward"
    lines = [
        f"longest {kind} in {total / 2**30:.1f} GiB, to {STEP:,} tokens: predicted {expected:,} "
        f"({len(plan.groups)} groups of heads" + (f", {sum(plan.kept)} of 3 outputs kept)" if what["backward"] else ")")
    ]
    if measure:
        lines.append(f"measured: {longest(runs, guess=max(expected, STEP), step=STEP):,}")
    return "\n".join(lines)


def allocator_table(argv: list[str], shape: Shape) -> str:
    """Peaks with each of the allocator's settings, each in a process of its own."""
    rows = []
    for setting in ALLOCATORS:
        found = in_a_process_of_its_own(argv, allocator=setting)
        if "error" in found:
            rows.append([setting, found["error"], "", ""])
            continue
        allocated, reserved = found["allocated"], found["reserved"]
        rows.append([setting, _gib(allocated), _gib(reserved), f"{reserved / allocated - 1:.1%}"])
    return markdown([f"PYTORCH_ALLOC_CONF, T={shape.T:,}", "allocated (GiB)", "reserved (GiB)", "lost"], rows)


def _raw(shape: Shape, backend: str, **what: bool) -> str:
    """For a process that compares: the peaks of a call, its inputs included."""
    Measured(shape, backend, **what).call()
    torch.cuda.synchronize()
    return json.dumps(dict(allocated=torch.cuda.max_memory_allocated(), reserved=torch.cuda.max_memory_reserved()))


def _gib(size: int) -> str:
    return f"{size / 2**30:.3f}"


def main(argv: list[str]) -> int:
    """Run the command; 2 for bad arguments."""
    parser = _parser()
    given = parser.parse_args(argv)
    try:
        cases = shapes(given)
        backend = backend_of(cases[0], given.backend) if not given.no_measure else "cute"
        gpu = cases[0].device.startswith("cuda")
        if not gpu:
            for name in ("components", "allocators", "raw"):
                if getattr(given, name):
                    raise ValueError(f"--{name} needs a GPU, got --device {cases[0].device}")
            if given.longest and given.total is None:
                raise ValueError("--longest without a GPU needs --total, the GiB of one")
        if given.longest and not given.no_measure and not gpu:
            raise ValueError("--longest without a GPU needs --no-measure")
    except (ValueError, NotImplementedError) as error:
        print(f"memory: {error}", file=sys.stderr)
        return 2
    what = dict(gated=not given.ungated, backward=given.mode == "both")
    if given.raw:
        print(_raw(cases[-1], backend, **what))
        return 0
    total = int(given.total * 2**30) if given.total else torch.cuda.mem_get_info()[1] if gpu else None
    if given.longest:
        print(find_longest(cases[0], backend, total, measure=not given.no_measure, **what))
        return 0
    if given.components:
        print(component_table(cases[-1], backend, **what) + "\n")
    print(table(cases, backend, measured=not given.no_measure, total=total, **what))
    if given.allocators:
        torch.cuda.empty_cache()
        print("\n" + allocator_table([a for a in argv if a != "--allocators"], cases[-1]))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m nsa_layer memory",
        description="Peak memory of nsa above its inputs q, k and v. The prediction is that of the kernels' plan: "
        "groups of key/value heads one after the other, and outputs of branches kept or computed again. What is "
        "measured has workspace besides, and another plan with --backend eager. GiB are 2**30 bytes.",
    )
    add_shape_options(parser, seqlen=[1024, 2048] if not torch.cuda.is_available() else [8192, 65536])
    parser.add_argument("--mode", choices=("forward", "both"), default="both", help="both: backward too (default)")
    parser.add_argument("--ungated", action="store_true", help="without gate_weight: 1/3 of each branch")
    parser.add_argument("--no-measure", action="store_true", help="predict only; nothing is computed")
    parser.add_argument("--components", action="store_true", help="the peak inside each component, at the last length")
    parser.add_argument("--longest", action="store_true", help="find the longest call that fits")
    parser.add_argument("--total", type=float, metavar="GIB", help="memory to fit in (default: the GPU's)")
    parser.add_argument("--allocators", action="store_true", help="compare settings of PyTorch's allocator")
    parser.add_argument("--raw", action="store_true", help=argparse.SUPPRESS)
    return parser
