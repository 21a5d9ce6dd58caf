"""Planted faults are found within their time, by the properties that name them, and only while they are planted."""

from __future__ import annotations

import itertools
import subprocess
import sys
from functools import reduce
from importlib import import_module
from inspect import signature
from pathlib import Path

import pytest
import torch

from fuzz import attention_lists
from fuzz.kinds import KINDS, listed
from fuzz.mutations import all_mutations, planted
from fuzz.prop import GPU, properties
from fuzz.properties import token_lists
from fuzz.run import Budget, check_one, parse_case, run_property
from nsa_layer import NSAConfig
from nsa_layer.kernels.union_lists import key_csr, unions
from nsa_layer.kernels.union_lists.key_csr import Pairs
from nsa_layer.kernels.union_lists.unions import Unions
from nsa_tools.testing.cases import Case

ALL = all_mutations()
HANGS = "codec hangs"  # for the watchdog, see test_pool
ON_A_CPU = [name for name, mutation in ALL.items() if not mutation.needs and name != HANGS]


def test_kernel_faults_have_kinds_to_show_in() -> None:
    """Kernels that wait for a semaphore value run only with the fault that is there for the watchdog."""
    for mutation in ALL.values():
        assert mutation.what and mutation.properties
        suiting = [kind for kind in KINDS if mutation.suits(kind)]
        assert suiting and all(mutation.waits or not (kind.deterministic or kind.plan) for kind in suiting)


@pytest.mark.parametrize("name", [name for name, m in ALL.items() if m.needs == GPU])
def test_kernel_faults_take_what_the_function_takes(name: str) -> None:
    """A fault of another signature would be found by a TypeError."""
    path, _, attribute = ALL[name].target.partition(":")
    original = reduce(getattr, attribute.split("."), import_module(path))
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


@pytest.mark.parametrize("name", ON_A_CPU)
def test_it_is_found(name: str) -> None:
    chosen = [prop for prop in properties().values() if prop.name.startswith(ALL[name].properties) and not prop.needs]
    assert chosen
    budget = Budget(examples=400, seconds=ALL[name].seconds / len(chosen), shrink=0.1, seed=1)
    with planted(name):
        failures = (run_property(prop, budget).failure for prop in chosen)
        failure = next((failure for failure in failures if failure is not None), None)
    assert failure is not None, f"none of {[prop.name for prop in chosen]} noticed"
    case = parse_case(failure.case)
    assert repr(case) == failure.case
    assert check_one(properties()[failure.property], case) is None, "it fails without the fault as well"


BY_TOKEN = NSAConfig(q_tile=1, block_counts=5)
LISTS = [
    Case(T=300, Hq=6, causal=False, config=BY_TOKEN),
    Case(lengths=(130, 0, 1, 200), Hq=8, config=BY_TOKEN),
    Case(B=2, T=70, Hq=2, config=BY_TOKEN),
]


def unions_of(case: Case, listed: list[torch.Tensor]) -> Unions:
    """In PyTorch, of lists of any length."""
    G, found = case.Hq // case.Hkv, []
    R = max(own.shape[2] for own in listed)
    for own in listed:
        M = -(-len(own) * G // 128)
        counts, blocks = torch.zeros(case.Hkv, M).int(), torch.full((case.Hkv, M, R), -7).int()
        bits = torch.zeros(case.Hkv, M, R, 4).int()
        for h, m in itertools.product(range(case.Hkv), range(M)):
            first = 128 * m // G
            tokens = own[first : (128 * m + 127) // G + 1, h]
            union = tokens.any(0).nonzero().flatten()
            counts[h, m], blocks[h, m, : len(union)] = len(union), union.int()
            for r, j in tokens[:, union].T.nonzero().tolist():
                bits[h, m, r, j // 32] |= torch.tensor(1 << j % 32).int()
        found.append((counts, blocks, bits))
    packed = case.lengths is not None
    return Unions(*(torch.cat(parts, 1) if packed else torch.stack(parts) for parts in zip(*found)))


def pairs_of(case: Case, listed: list[torch.Tensor]) -> Pairs:
    """In PyTorch: an item for each block."""
    rows = [[own[:, h, j] for own in listed for j in range(own.shape[2])] for h in range(case.Hkv)]
    if case.lengths is None:
        rows = [[own[:, h, j] for h in range(case.Hkv) for j in range(own.shape[2])] for own in listed]
    tokens = [row.nonzero().flatten() for of in rows for row in of]
    ends = [*itertools.accumulate(map(len, tokens), initial=0)]
    items = torch.tensor([(row, *pair, -1) for row, pair in enumerate(itertools.pairwise(ends))])
    return Pairs(torch.tensor(ends), torch.cat(tokens).int(), items.int(), torch.arange(len(items) + 1))


@pytest.mark.parametrize("case", LISTS, ids=repr)
def test_faults_of_lists_by_token_are_seen(case: Case) -> None:
    """Right ones, which PyTorch makes here, pass; those that the faults make of them do not."""
    listed = token_lists.listed_pairs(case, token_lists.drawn_lists(case))
    made = {"union_lists": unions_of(case, listed), "pairs_by_block": pairs_of(case, listed)}

    def check(name: str, lists: Unions | Pairs) -> None:
        if name == "union_lists":
            token_lists.assert_unions(case, listed, lists)
        else:
            token_lists.assert_pairs(case, listed, lists.tokens, lists.items, lists.row_items)

    faults = [(m.change, m.target.split(":")[1]) for m in ALL.values() if m.properties == ("layer.lists by token",)]
    assert {name for _, name in faults} == set(made)
    for change, name in faults:
        check(name, made[name])
        with pytest.raises(AssertionError, match="other pairs|a token behind|other tokens"):
            check(name, change(lambda name=name: made[name])())


@pytest.mark.parametrize("case", LISTS, ids=repr)
def test_lists_by_token_are_asked_for_as_the_layer_does(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a GPU: nothing is launched, and the shapes are those of lists that PyTorch makes."""
    for module in (unions, key_csr):
        monkeypatch.setattr(module, "launch", lambda *_: None)
    lists = token_lists.drawn_lists(case)
    of_queries, pairs = token_lists.made_lists(case, lists)
    listed = token_lists.listed_pairs(case, lists)
    expected, by_block = unions_of(case, listed), pairs_of(case, listed)
    assert of_queries[0].shape == expected.counts.shape and of_queries[2].shape[:-1] == of_queries[1].shape
    assert pairs[1].shape[1] == 4 and len(pairs[2]) == len(by_block.row_items) and len(pairs[0]) >= by_block.starts[-1]


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
    from flash_attn.cute.bwd_dq_sm90 import interface as bwd_dq_interface
    from flash_attn.cute.cache_utils import JITCache

    for function in (interface._flash_attn_fwd, interface._flash_attn_bwd, bwd_dq_interface._compiled):
        monkeypatch.setattr(function, "compile_cache", JITCache())  # never on disk
    (prop,) = [each for each in properties().values() if each.name.startswith(ALL[name].properties)]
    suiting = [i for i, kind in enumerate(prop.kinds) if ALL[name].suits(kind)]
    with planted(name):
        outcomes = (run_property(prop, Budget(examples=15, shrink=0), kind=i) for i in suiting)
        assert any(outcome.failure is not None for outcome in outcomes)
