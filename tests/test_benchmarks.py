"""Host parts of the benchmark of block-sparse attention: which cases and kernels it has, and what its tables say."""

from __future__ import annotations

import os
import subprocess
import sys
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

FOLDER = Path(__file__).resolve().parents[1] / "benchmarks"
sys.path.append(str(FOLDER))  # scripts, whose modules find each other beside them

import block_sparse  # noqa: E402
import compare_trees as trees  # noqa: E402
import context_parallel as ranks  # noqa: E402
import head_dims  # noqa: E402
import index_layer  # noqa: E402
import kernels_alone  # noqa: E402
import layer_variants  # noqa: E402
import minimax_layer  # noqa: E402
import recall  # noqa: E402
import recall_pairs  # noqa: E402
import tree_calls  # noqa: E402


def test_keys_at_two_head_dimensions() -> None:
    cases = block_sparse.section_cases("keys", [65536])
    blocks = {(case.kind, case.head_dim): [] for case in cases}
    for case in cases:
        blocks[case.kind, case.head_dim].append((case.block_k, case.listed * case.block_k))
    assert blocks == dict.fromkeys((("random", 128), ("selected", 128), ("random", 64)), [(128, 2048), (64, 2048)])


RUN_EACH = """
import runpy, sys
for script in sys.argv[1:]:
    sys.argv = [script]
    sys.path.insert(0, script.rpartition("/")[0])
    try:
        runpy.run_path(script, run_name="__main__")
    except SystemExit as end:
        print(end)
"""


def test_without_a_gpu_they_say_so() -> None:
    names = ["block_sparse", "compare_trees", "compress_factor", "head_dims", "minimax_layer", "mixed_batch"]
    names += ["select_by_index", "upstream_faults"]
    command = [sys.executable, "-c", RUN_EACH, *(str(FOLDER / f"{name}.py") for name in names)]
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.stdout.splitlines() == [f"{name}.py measures on a GPU, and PyTorch finds none" for name in names]


def test_rates_of_head_dimensions() -> None:
    """A padded one is measured by its own products, and by the time of the native one."""
    medians = {
        f"{name} {dims}": ms
        for dims, ms in (((128, 128), 1.0), ((80, 64), 0.9), ((96, 96), 0.8))
        for name in ("forward", "both")
    }
    cells = head_dims.row((80, 64), medians, 1_000_000)
    assert cells["forward rate"] == f"{(80 + 64) / 256 / 0.9:.2f}" and cells["both padded"] == f"{0.9 / 0.8:.3f}"
    assert head_dims.row((128, 128), medians, 1_000_000)["both rate"] == "1.00"


def test_rates_of_branches_are_shares_of_dense_attention() -> None:
    """By their own pairs: each of 1,000 tokens sees 512 in the window at most, and up to 15 compressed keys of 64."""
    shape = head_dims.Shape(
        B=1, T=1000, Hq=4, Hkv=2, D=128, Dv=128, dtype=torch.bfloat16, device="cpu", config=head_dims.CONFIG
    )
    medians = {
        f"{name} {way} (96, 96)": 1.0 for name in ("dense", "compressed", "window") for way in ("forward", "both")
    }
    shares = {"dense": 1.0, "window": 1 - 488 * 489 / (1000 * 1001)}
    shares["compressed"] = 2 * sum((t + 1) // 64 for t in range(1000)) / (1000 * 1001)
    for name, share in shares.items():
        cells = head_dims.branch_row((96, 96), name, medians, shape)
        assert cells["forward of dense"] == cells["both of dense"] == f"{share:.2f}"


@pytest.mark.parametrize("kind", ["random, mask", "random, full", "random, both", "all causal, both"])
def test_lists_that_upstream_takes_too(kind: str) -> None:
    """Without the package's own helpers: each block once, in the list that the kind says."""
    where = kind.rpartition(", ")[2]
    case = tree_calls.Case(kind, 2048)
    mask, full = tree_calls.halves(case, "cpu")
    assert not (mask & full).any() and (mask | full).equal(tree_calls.listed_blocks(case, "cpu"))
    assert (bool(mask.any()), bool(full.any())) == (where != "full", where != "mask")
    for table in (mask, full, mask.T):
        counts, indices = tree_calls.compact(table)
        listed = torch.zeros_like(table)
        for row, (n, blocks) in enumerate(zip(counts[0, 0].tolist(), indices[0, 0].tolist())):
            listed[row, blocks[:n]] = True
        assert listed.equal(table) and counts.dtype == indices.dtype == torch.int32


def test_a_row_compares_medians() -> None:
    row = {"case": {"kind": "random, both", "T": 8192, "sequences": 4}, "way": "backward", "difference": 1e-3}
    timings = {"upstream": [2.0, 9.0, 1.0], "before": [2.004, 3.0, 1.0], "now": [3.0, 3.0, 1.0]}
    cells = trees.table_row(row | timings, "upstream", "before", "now")
    assert cells == ["8,192", "random, both", "4", "backward", "2.000", "1.0020", "1.5000", "1e-03"]
    assert "before / upstream" in trees.table([row | timings], "upstream", "before", "now")


def test_a_worker_that_imports_another_tree_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="imports"):
        trees.Worker(tmp_path, tmp_path / "log")


def test_trained_lists_are_of_earlier_blocks_and_alike_among_neighbours() -> None:
    T, size, n = 3000, kernels_alone.CONFIG.block_size, kernels_alone.CONFIG.block_counts
    lists = kernels_alone.trained_lists(T, 1, device="cpu")
    own = torch.arange(T) // size
    assert lists.shape == (1, T, 1, n) and torch.equal((lists[0, :, 0] >= 0).sum(-1), (own + 1).clamp(max=n))
    assert ((lists[..., 1:] > lists[..., :-1]) | (lists[..., 1:] < 0)).all() and (lists[0, :, 0].amax(-1) == own).all()
    known = torch.zeros(T, 2 + T // size).scatter_(1, (lists[0, :, 0] + 1).long(), 1.0)[2000:, 1:]
    next_one, far = ((known[m:] * known[:-m]).sum(-1).mean() / n for m in (1, 500))
    assert next_one > 0.9 and far < 0.5


def test_pairs_are_asked_for_by_their_keys() -> None:
    """Each value stands behind its key, at an even position, and is asked for four times in the last quarter."""
    T, pairs, size = 1024, 48, recall_pairs.SYMBOLS
    for sequence, wanted in zip(*recall_pairs.draw(T, 3, pairs, torch.Generator().manual_seed(0))):
        slots = (sequence[: T * 3 // 4] < size).nonzero().flatten()
        assert len(slots) == pairs and not (slots % 2).any()
        values = dict(zip(sequence[slots].tolist(), sequence[slots + 1].tolist()))
        asked = (wanted >= 0).nonzero().flatten()
        assert len(values) == pairs and len(asked) == 4 * pairs and asked.min() >= T * 3 // 4
        assert [values[key] for key in sequence[asked].tolist()] == wanted[asked].tolist()
        assert ((sequence >= 2 * size).sum() == T - 6 * pairs) and sequence.max() < 3 * size


def test_recall_asks_for_each_pair_once() -> None:
    tokens, asked = recall.draw(128, 3, torch.Generator().manual_seed(0), "cpu")
    for sequence, answers in zip(tokens.tolist(), asked.tolist()):
        pairs = {key: value for key, value in zip(sequence[:64], sequence[1:65]) if key < recall.SYMBOLS}
        questions = {sequence[i]: answer for i, answer in enumerate(answers) if answer != -100}
        assert len(pairs) == 16 and questions == pairs
        assert all(i >= 64 for i, answer in enumerate(answers) if answer != -100)


def test_recall_counts_what_a_model_finds(capsys: pytest.CaptureFixture[str]) -> None:
    recall.main(["--lengths", "16", "--steps", "2", "--seeds", "1", "--tokens", "32", "--device", "cpu"])
    shown = capsys.readouterr().out
    assert all(name in shown for name in recall.SHOWN) and "16 tokens" in shown
    with pytest.raises(SystemExit):
        recall.main(["--lengths", "12"])


@pytest.fixture
def options(one_rank: None, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Namespace]:
    """Options of the benchmark of ranks, which is on a CPU with small heads, and has one."""
    small = dict(CUDA=False, DEVICE="cpu", HEADS=dict(Hq=2, Hkv=1, D=8, Dv=8), ROW_MS=1.0)
    for name, value in small.items():
        monkeypatch.setattr(ranks, name, value)
    ranks.group_of.cache_clear()
    return ranks.options


@pytest.mark.parametrize("rule", ["nsa", "index"])
def test_ranks_are_timed_beside_ranks_alone(options: Callable[..., Namespace], rule: str) -> None:
    arguments = ["layer", "--tokens", "64", "--variants", "heads", "--groups", "own", "alone", "--repeats", "2"]
    given = options([*arguments, "--rule", rule, "--index-dim", "4", "--check-tokens", "1024"])
    rows = list(ranks.layer(given))
    assert [row["variant"] for row in rows] == [ranks.ONE, "heads", "heads, alone"]
    assert rows[0]["of_one"] == 1 and all(row["each_ms"] == [row["ms"]] for row in rows)
    assert all(len(row["timings_ms"]) == 2 and row["in_a_row"] == 1 for row in rows)
    assert "heads, alone" in ranks.table(rows)
    given.groups = ["own"]
    compared = [row["tensor"] for row in ranks.check(given) if row["error"] < 1e-5]
    of_rule = ("dq_index", "dk_index", "index loss") if rule == "index" else ("dgate_weight",)
    assert sorted(compared) == sorted(2 * ("o", "dq", "dk", "dv", *of_rule))  # a batch, and packed
    count = []
    assert ranks.in_a_row(lambda: count.append(0), 5)[0] > 0 and len(count) == 5


def test_a_block_is_trained_on_what_it_returns() -> None:
    with torch.device("meta"):
        block, x = layer_variants.Block(), torch.empty(1, 128, layer_variants.DIM, requires_grad=True)
        o = block(x)
    assert o.shape == x.shape
    assert len(torch.autograd.grad(o, [x, *block.parameters()], torch.empty_like(o))) == 12


def test_the_index_is_timed_beside_dense_attention_and_the_default() -> None:
    sizes = dict(T=128, Hq=4, Hkv=2, D=16, Dv=16, dtype=torch.float32, device="cpu")
    names = ("dense", "default", "Di 16", "Di 16, no loss")
    rows = index_layer.operators(sizes, names, 2)
    assert [row["operator"] for row in rows] == [*names] and all(len(row["forward+backward"]) == 2 for row in rows)
    dense, default, index, _ = index_layer.table(rows)
    assert dense["forward"].endswith(")") and "(1.0x" in dense["forward"] and ", 1.000)" in default["forward"]
    assert index["heads"] == "4/2" and index["GiB"] > 0
    for name, step in index_layer.steps_of(sizes, names[2:]):
        assert step.sets[0]["k_index"].shape == (1, 128, 2, 16)
        with torch.no_grad():
            assert isinstance(step.attend(**step.sets[0]), torch.Tensor)
        assert isinstance(step.attend(**step.sets[0]), tuple) == (name == "Di 16")


def test_a_layer_of_minimax_is_timed_beside_those_of_transformers() -> None:
    sizes = dict(hidden_size=32, num_attention_heads=4, num_key_value_heads=2, head_dim=8, index_n_heads=2)
    sizes |= dict(index_head_dim=8, index_topk_blocks=3, index_block_size=16)
    layers = {name: minimax_layer.layer(name, "cpu", torch.float64, **sizes) for name in minimax_layer.KINDS}
    own, sdpa, dense = minimax_layer.measure(128, layers, 2)
    assert [len(row["forward"]) for row in (own, sdpa, dense)] == [2, 2, 2] and own["differs"] < 1e-12
    q = [layer.q_proj.weight for layer in layers.values()]
    assert torch.equal(q[0], q[1]) and torch.equal(q[0], q[2]) and layers["dense"].indexer is None
