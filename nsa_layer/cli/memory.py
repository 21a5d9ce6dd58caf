"""`python -m nsa_layer memory`: peak memory of `nsa`, predicted and measured, and the longest call that fits."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from functools import partial

import torch

from nsa_layer.api import nsa
from nsa_layer.cli.arguments import output_file
from nsa_layer.cli.peaks import in_a_process_of_its_own, longest, outside_allocator, peaks_by_component
from nsa_layer.cli.results import MEASURED, NO_MEMORY, SCHEMA, command_line, environment, without_paths, write
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

    def parts(self) -> dict[str, int]:
        """What the call takes on a GPU, as `policy.predict` names it: "saved", "forward" and "backward".

        They are what is held after forward beside o, what forward's peak is above that, and what backward's is above
        that and the gradients.
        """
        begin, _ = _held_and_peak()
        with torch.set_grad_enabled(self.backward):
            o = self.attend(**self.inputs)
        after, peak = _held_and_peak()
        found = dict(saved=after - begin - o.nbytes, forward=peak - after)
        if self.backward:
            do = torch.ones_like(o)
            begin, _ = _held_and_peak()
            gradients = torch.autograd.grad(o, list(self.inputs.values()), do)
            found["backward"] = _held_and_peak()[1] - begin - sum(gradient.nbytes for gradient in gradients)
        return found

    def peaks(self) -> dict[str, int]:
        """The call's peak, after one that compiled; on a GPU that of each component too."""
        self.call()
        found = {"peak": peak_bytes(self.call, self.shape.device)}
        if self.shape.device.startswith("cuda"):
            found |= {name: peak for name, peak in peaks_by_component(self.call).items()}
        return found


def _held_and_peak() -> tuple[int, int]:
    """Bytes that are allocated on the GPU, and the most since this was last asked."""
    torch.cuda.synchronize()
    found = torch.cuda.memory_allocated(), torch.cuda.max_memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    return found


def measurements(
    cases: list[Shape],
    backend: str,
    *,
    measured: bool,
    gated: bool,
    backward: bool,
    total: int | None = None,
) -> list[dict]:
    """For each shape the plan, bytes that are predicted by component, and the measured peak.

    Each has "T", "groups", "kept" (outputs that are saved, None without backward), "inputs", "predicted" (by component,
    with "peak"), "peak" (None: not measured, or out of memory), "measured" (by component, on a GPU) and "status".
    """
    found = []
    for shape in cases:
        plan = planned(shape, gated=gated, backward=backward, total=total)
        expected = predicted(shape, plan, gated=gated, backward=backward)
        peak, parts = _measured(shape, backend, gated=gated, backward=backward) if measured else (None, None)
        status = "not measured" if not measured else NO_MEMORY if peak is None else MEASURED
        kept = sum(plan.kept) if backward else None
        row = dict(T=shape.T, groups=len(plan.groups), kept=kept, inputs=input_bytes(shape), predicted=expected)
        found.append(row | dict(peak=peak, measured=parts, status=status))
    return found


def table(found: list[dict]) -> str:
    """`measurements` in GiB."""
    parts = ("outputs", "gradients", "saved", "forward", "backward", "peak")
    measured, rows = any(one["status"] != "not measured" for one in found), []
    for one in found:
        groups = f"{one['groups']}" + ("" if one["kept"] is None else f", {one['kept']} of 3")
        expected = one["predicted"]
        row = [f"{one['T']:,}", groups, _gib(one["inputs"]), *(_gib(expected[name]) for name in parts)]
        if measured:
            peak = one["peak"]
            row += [one["status"], ""] if peak is None else [_gib(peak), f"{peak / expected['peak']:.2f}"]
        rows.append(row)
    header = ["T", "groups, kept", "q, k, v", *parts[:-1], "predicted peak"]
    return markdown(header + (["measured peak", "measured / predicted"] if measured else []), rows)


def part_table(found: list[dict]) -> str:
    """Predicted and measured components of `measurements` in GiB; nothing where none was measured."""
    names, rows = ("saved", "forward", "backward"), []
    for one in found:
        if measured := one["measured"]:
            cells = (_gib(of[name]) if name in of else "" for name in names for of in (one["predicted"], measured))
            rows.append([f"{one['T']:,}", *cells])
    header = ["T", *(text for name in names for text in (f"{name}, predicted", "measured"))]
    return "\n\n" + markdown(header, rows) if rows else ""


def _measured(shape: Shape, backend: str, **what: bool) -> tuple[int | None, dict[str, int] | None]:
    """The peak of a call, and on a GPU its parts; None where it does not fit."""
    try:
        calls = Measured(shape, backend, **what)
        peak = calls.peaks()["peak"]
        return peak, calls.parts() if shape.device.startswith("cuda") else None
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        return None, None


def components(shape: Shape, backend: str, **what: bool) -> dict:
    """Bytes of one shape on a GPU: "allocated" above the inputs, by component; "kernels", "context" outside of it."""
    before = outside_allocator()
    allocated = Measured(shape, backend, **what).peaks()
    # Code is loaded when a kernel first runs, and stays.
    held = max(0, outside_allocator() - before)
    return dict(T=shape.T, allocated=allocated, kernels=held, context=before)


def component_table(found: dict) -> str:
    """`components` in GiB, the largest first."""
    rows = [[name, _gib(peak)] for name, peak in sorted(found["allocated"].items(), key=lambda item: -item[1])]
    rows += [["compiled kernels, outside the allocator", _gib(found["kernels"])]]
    rows += [["context and libraries, outside the allocator", _gib(found["context"])]]
    return markdown([f"T={found['T']:,}: while in", "allocated (GiB)"], rows)


def find_longest(shape: Shape, backend: str, total: int, *, measure: bool, **what: bool) -> dict:
    """The longest call that fits, by prediction, and by trying: "predicted", its plan, and "measured" or None."""

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
    kept = sum(plan.kept) if what["backward"] else None
    tried = longest(runs, guess=max(expected, STEP), step=STEP) if measure else None
    return dict(total=total, predicted=expected, groups=len(plan.groups), kept=kept, measured=tried)


def as_text(found: dict) -> str:
    """What `find_longest` found."""
    kept = "" if found["kept"] is None else f", {found['kept']} of 3 outputs kept"
    kind = "forward" if found["kept"] is None else "forward and backward"
    lines = [
        f"longest {kind} in {found['total'] / 2**30:.1f} GiB, to {STEP:,} tokens: predicted {found['predicted']:,} "
        f"({found['groups']} groups of heads{kept})"
    ]
    if found["measured"] is not None:
        lines.append(f"measured: {found['measured']:,}")
    return "\n".join(lines)


def allocators(argv: list[str]) -> dict[str, dict]:
    """Peaks with each of the allocator's settings, each in a process of its own."""
    return {setting: in_a_process_of_its_own(argv, allocator=setting) for setting in ALLOCATORS}


def allocator_table(found: dict[str, dict], T: int) -> str:
    """`allocators` in GiB."""
    rows = []
    for setting, one in found.items():
        if "error" in one:
            rows.append([setting, one["error"], "", ""])
            continue
        allocated, reserved = one["allocated"], one["reserved"]
        rows.append([setting, _gib(allocated), _gib(reserved), f"{reserved / allocated - 1:.1%}"])
    return markdown([f"PYTORCH_ALLOC_CONF, T={T:,}", "allocated (GiB)", "reserved (GiB)", "lost"], rows)


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
    if given.no_measure and given.dtype is None:
        given.dtype = "bf16"  # predictions are of the kernels, which take no fp32
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
    document = dict(
        schema=SCHEMA,
        command=command_line("memory", argv),
        environment=environment(cases[0].device),
        **(what | dict(shape=cases[-1].describe(), rows=[], components=None, longest=None, allocators=None)),
    )
    for part, found, text in _parts(given, cases, backend, total, argv, what):
        document[part] = found
        print(text, flush=True)
        if given.json:
            write(given.json, document)
    return 0


def _parts(
    given: argparse.Namespace, cases: list[Shape], backend: str, total: int | None, argv: list[str], what: dict
) -> Iterator[tuple[str, object, str]]:
    """Name, finding and text of each part that was asked for, one after the other."""
    if given.longest:
        found = find_longest(cases[0], backend, total, measure=not given.no_measure, **what)
        yield "longest", found, as_text(found)
        return
    if given.components:
        found = components(cases[-1], backend, **what)
        yield "components", found, component_table(found) + "\n"
    found = measurements(cases, backend, measured=not given.no_measure, total=total, **what)
    yield "rows", found, table(found) + part_table(found)
    if given.allocators:
        torch.cuda.empty_cache()
        found = allocators([a for a in without_paths(argv) if a != "--allocators"])
        yield "allocators", found, "\n" + allocator_table(found, cases[-1].T)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m nsa_layer memory",
        allow_abbrev=False,
        description="Peak memory of nsa above its inputs q, k and v. The prediction is that of the kernels' plan: "
        "groups of key/value heads one after the other, and outputs of branches kept or computed again. What is "
        "measured has workspace besides, and another plan with --backend eager. GiB are 2**30 bytes.",
    )
    add_shape_options(parser, seqlen=[1024, 2048] if not torch.cuda.is_available() else [8192, 65536])
    parser.add_argument("--mode", choices=("forward", "both"), default="both", help="both: backward too (default)")
    parser.add_argument("--ungated", action="store_true", help="without gate_weight: 1/3 of each branch")
    parser.add_argument("--no-measure", action="store_true", help="predict only, of bf16 unless --dtype says otherwise")
    parser.add_argument("--components", action="store_true", help="the peak inside each component, at the last length")
    parser.add_argument("--longest", action="store_true", help="find the longest call that fits")
    parser.add_argument("--total", type=float, metavar="GIB", help="memory to fit in (default: the GPU's)")
    parser.add_argument("--allocators", action="store_true", help="compare settings of PyTorch's allocator")
    parser.add_argument("--json", type=output_file, help="also write what was found to this file, in bytes")
    parser.add_argument("--raw", action="store_true", help=argparse.SUPPRESS)
    return parser
