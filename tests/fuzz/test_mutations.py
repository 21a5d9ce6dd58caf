"""Properties hold, and find planted faults within their time, those that name them, and only while they are planted."""

from __future__ import annotations

import subprocess
import sys
from inspect import signature
from pathlib import Path
from pkgutil import resolve_name

import pytest

from fuzz import attention_lists
from fuzz.kinds import KINDS, listed
from fuzz.mutations import all_mutations, planted
from fuzz.prop import GPU, properties
from fuzz.run import Budget, check_one, parse_case, run_property

PROPERTIES, ALL = properties(), all_mutations()
HANGS = "codec hangs"  # for the watchdog, see test_run
ON_A_CPU = [name for name, mutation in ALL.items() if not mutation.needs and name != HANGS]


def assert_holds(name: str, kind: int, budget: Budget) -> None:
    outcome = run_property(PROPERTIES[name], budget, kind=kind)
    assert outcome.failure is None, f"{outcome.failure.case}\n{outcome.failure.error}\n{outcome.failure.trace}"
    assert outcome.examples, "no example ran"


@pytest.mark.parametrize("name", [name for name, prop in PROPERTIES.items() if not prop.needs])
def test_it_holds(name: str) -> None:
    assert_holds(name, 0, Budget(examples=PROPERTIES[name].pr, seconds=30, shrink=10))


# Some kinds of kernels of each property: compiling them all takes minutes. `python -m fuzz` takes all.
KERNELS = [
    (name, kind) for name, prop in PROPERTIES.items() if prop.needs == GPU for kind in range(0, len(prop.kinds), 6)
]


@pytest.mark.gpu
@pytest.mark.parametrize(("name", "kind"), KERNELS)
def test_it_holds_for_kernels(name: str, kind: int) -> None:
    assert_holds(name, kind, Budget(examples=8, seconds=20, shrink=10))


def test_kernel_faults_have_kinds_to_show_in() -> None:
    """Kernels that wait for a semaphore value run only with the fault that is there for the watchdog."""
    for mutation in ALL.values():
        assert mutation.what and mutation.properties
        suiting = [kind for kind in KINDS if mutation.suits(kind)]
        assert suiting and all(mutation.waits or not (kind.deterministic or kind.plan) for kind in suiting)


@pytest.mark.parametrize("name", [name for name, m in ALL.items() if m.needs == GPU])
def test_kernel_faults_take_what_the_function_takes(name: str) -> None:
    """A fault of another signature would be found by a TypeError."""
    original = resolve_name(ALL[name].target)
    takes = signature(getattr(original, "__func__", original)).parameters.values()
    positional = [p.name for p in takes if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    by_name = {p.name: None for p in takes if p.kind is p.KEYWORD_ONLY}
    signature(ALL[name].change(original)).bind(*positional, **by_name)


def test_a_semaphore_value_that_never_comes() -> None:
    """The fault for the watchdog leaves no entry that may add first."""
    case = listed(deterministic=True, passes=1, T_q=300, T_k=300, pattern="full")
    assert (attention_lists.backward_lists(case, device="cpu").dq_write_order == 0).any()
    with planted("kernel: hangs"):
        assert (attention_lists.backward_lists(case, device="cpu").dq_write_order[..., :1] > 0).all()


LONG_SEARCHES = ("options refused alone", "padding counted in front", "overlap counted once", "leaking query")
LONG_SEARCHES += ("shared page written", "classes not compared", "a line lost", "parametrized ignored")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.sweep if name in LONG_SEARCHES else ()) for name in ON_A_CPU]
)
def test_it_is_found(name: str) -> None:
    chosen = [prop for prop in PROPERTIES.values() if prop.name.startswith(ALL[name].properties) and not prop.needs]
    assert chosen
    budget = Budget(examples=400, seconds=ALL[name].seconds / len(chosen), shrink=0.1, seed=1)
    with planted(name):
        failures = (run_property(prop, budget).failure for prop in chosen)
        failure = next((failure for failure in failures if failure is not None), None)
    assert failure is not None, f"none of {[prop.name for prop in chosen]} noticed"
    case = parse_case(failure.case)
    assert repr(case) == failure.case
    assert check_one(PROPERTIES[failure.property], case) is None, "it fails without the fault as well"


@pytest.mark.sweep
def test_what_is_imported_within_does_not_keep_a_fault() -> None:
    """Kernels import their modules when they are compiled, which a fault may be there for."""
    program = """
from fuzz.mutations import planted
from flash_attn.cute.lists import rows as list_rows
own = list_rows.find_row
with planted("kernel: first sequence's rows"):
    from flash_attn.cute import block_sparse_utils
    assert block_sparse_utils.find_row is list_rows.find_row is not own
assert block_sparse_utils.find_row is list_rows.find_row is own
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=300)


def test_kernels_with_a_fault_stay_out_of_the_cache_on_disk(tmp_path: Path) -> None:
    from flash_attn.cute.cache_utils import JITPersistentCache

    class Kernel:
        def export_to_c(self, object_file_path: str, function_name: str) -> None:
            Path(object_file_path).write_text("a kernel")

    cache = JITPersistentCache(tmp_path)
    with planted("kernel: first sequence's rows"):
        cache["wrong",] = Kernel()
    assert not [*tmp_path.glob("*.o")]
    cache["right",] = Kernel()
    assert len([*tmp_path.glob("*.o")]) == 1


@pytest.mark.gpu
@pytest.mark.parametrize("name", [name for name, m in ALL.items() if m.needs == GPU and not m.waits])
def test_it_is_found_in_kernels(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from flash_attn.cute import interface
    from flash_attn.cute.bwd_dq import interface as bwd_dq_interface
    from flash_attn.cute.cache_utils import JITCache

    for function in (interface._flash_attn_fwd, interface._flash_attn_bwd, bwd_dq_interface._compiled):
        monkeypatch.setattr(function, "compile_cache", JITCache())  # never on disk
    (prop,) = [each for each in PROPERTIES.values() if each.name.startswith(ALL[name].properties)]
    suiting = [i for i, kind in enumerate(prop.kinds) if ALL[name].suits(kind)]
    with planted(name):
        outcomes = (run_property(prop, Budget(examples=15, shrink=0), kind=i) for i in suiting)
        assert any(outcome.failure is not None for outcome in outcomes)
