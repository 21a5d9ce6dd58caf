"""A model of context parallelism on more GPUs than were measured: bytes that each sends, and times of a step.

    python benchmarks/context_parallel_model.py [--measured FILE] [--network 50]

A step is forward and backward of one layer, 32 query heads, 8 key/value heads of 128, bf16. Attention takes
(a T + b T^2) / R, with a and b of two lengths that were measured on one GPU; beside exchanges it takes longer, by what
it took longer on two GPUs at the longer length. Messages run at the bandwidth of an all-to-all between two GPUs where
all ranks are in one host of 8, else at that of the network, in GB/s of each GPU, with nothing lost to latency or
to other traffic. Exchanges go head by head beside attention: those of the first heads before it and of the last ones
after it are not hidden, nor is what takes longer than attention, nor what the longest calls gather.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass
from pathlib import Path

from nsa_layer.context_parallel.gather_loop import OVERLAP_BELOW
from nsa_tools.report.tables import markdown

MEASURED = Path(__file__).parent / "results" / "context_parallel" / "two_h200.json"
HOST = 8  # GPUs
HQ, HKV, D, BYTES = 32, 8, 128, 2


@dataclass(frozen=True)
class Measured:
    """Seconds of a token and of a pair of tokens on one GPU, GB/s of exchanges, and how much longer than its share
    attention takes beside them, by mode."""

    a: float
    b: float
    rate: float
    beside: dict[str, float]

    @classmethod
    def read(cls, file: Path) -> Measured:
        found = json.loads(file.read_text())
        ms = {row["T"]: row["ms"] for row in found["layer"] if row["variant"] == "one GPU"}
        (short, long) = min(ms), max(ms)
        each = {T: ms[T] / 1e3 / T for T in (short, long)}
        b = (each[long] - each[short]) / (long - short)
        exchanges = [row for row in found["bandwidth"] if row["collective"] == "all-to-all"]
        rate = max(exchanges, key=lambda row: row["bytes"])["gb_per_s"]
        beside = {}
        for mode in ("heads", "gather"):
            rows = [row for row in found["layer"] if row["T"] == long and row["variant"] in (mode, f"{mode}, first")]
            best = min(rows, key=lambda row: row["ms"])
            beside[mode] = (best["ms"] - min(best["not_hidden_ms"])) / (ms[long] / found["ranks"])
        return cls(each[short] - b * short, b, rate, beside)

    def attention(self, T: int) -> float:
        """Seconds on one GPU."""
        return self.a * T + self.b * T**2


def sent(mode: str, T: int, ranks: int) -> float:
    """Bytes that each GPU sends in a step.

    "heads" sends q, k, v and o to other ranks, and their gradients back; "gather" sends k and v in forward and again in
    backward, and as many parts of their gradients, causal. Compressed keys are 1/64 of that, and are left out.
    """
    others = (ranks - 1) / ranks
    if mode == "heads":
        return 2 * (2 * HQ + 2 * HKV) * D * BYTES * T / ranks * others
    return 3 * 2 * HKV * D * BYTES * T * others


def step(mode: str, T: int, ranks: int, measured: Measured, network: float) -> dict[str, float]:
    """Bytes, and seconds of attention, of exchanges and of what of these is not hidden."""
    size = sent(mode, T, ranks)
    exchanged = size / (measured.rate if ranks <= HOST else network) / 1e9
    turns = HKV // ranks if mode == "heads" else HKV
    attention = measured.attention(T) / ranks * (measured.beside[mode] if turns > 1 else 1.0)
    outside = exchanged / turns
    beside = attention * (turns - 1) / turns
    if mode == "gather" and T >= OVERLAP_BELOW * (ranks - 1):
        beside = 0.0
    exposed = outside + max(0.0, exchanged - outside - beside)
    return dict(bytes=size, attention=attention, exchanged=exchanged, exposed=exposed)


def rows(measured: Measured, network: float) -> list[list[str]]:
    """A row for each number of ranks, length and mode that fits; the faster mode is marked."""
    table = []
    for ranks in (2, 8, 64):
        for T in (1 << 18, 1 << 20, 1 << 22, 1 << 24):
            modes = ["heads", "gather"] if HKV % ranks == 0 else ["gather"]
            found = {mode: step(mode, T, ranks, measured, network) for mode in modes}
            seconds = {mode: one["attention"] + one["exposed"] for mode, one in found.items()}
            for mode, one in found.items():
                name = f"**{mode}**" if seconds[mode] == min(seconds.values()) else mode
                ideal = f"{seconds[mode] * ranks / measured.attention(T):.2f}"
                ms = (f"{one[key] * 1e3:,.1f}" for key in ("attention", "exchanged", "exposed"))
                table.append([str(ranks), f"{T:,}", name, f"{one['bytes'] / 1e9:,.2f}", *ms, ideal])
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--measured", type=Path, default=MEASURED, help="what benchmarks/context_parallel.py wrote")
    parser.add_argument("--network", type=float, default=50.0, help="GB/s of a GPU between hosts, each way")
    given = parser.parse_args()
    header = ["ranks", "tokens", "mode", "GB sent", "attention ms", "exchanges ms", "not hidden ms", "over ideal"]
    print(markdown(header, rows(Measured.read(given.measured), given.network)))


if __name__ == "__main__":
    main()
