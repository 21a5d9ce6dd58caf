"""Does block-sparse backward compute the right gradients with pairs of CTAs on Blackwell? Run it and see.

    python tests/flash_attn/two_cta_lists.py

Pairs of CTAs share the tensor core's work on two key tiles, so both have to walk the same list:
upstream could not (pull request 2433 turned pairs off where there are lists), and does since 2661 where
a block of keys is an even number of tiles; issue 2011, which asks for this backward, is open. On a
Blackwell GPU each case below runs and is compared with dense attention under the same mask, in fp64;
on any other machine it is compiled for one, and the line says so. The exit code is 1 if one fails.
"""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
sys.path.insert(0, str(FOLDER))  # before the package is imported: it looks at the architecture once

PAIRED, SINGLE = (256, 256), (256, 128)


@dataclass(frozen=True)
class Verdict:
    said: str
    good: bool


def cases() -> list[tuple[object, bool]]:
    """Cases, and whether pairs of CTAs work on them."""
    from fa_cases import Case

    big = {"T_q": 1500, "T_k": 1500, "lists": "both"}
    return [
        (Case(D=128, **big, block=PAIRED), True),
        (Case(D=128, **big, block=PAIRED, causal=True, list_heads=2), True),
        (Case(D=128, **big, block=PAIRED, mask_mod="thirds", Hkv=4, list_heads=4), True),
        (Case(D=128, T_q=300, T_k=129, lists="full", block=PAIRED, Hkv=1), True),
        (Case(D=128, **big, block=SINGLE, causal=True), False),
        (Case(D=128, **big, block=SINGLE, mask_mod="thirds", list_heads=2), False),
        (Case(D=64, **big, block=PAIRED, causal=True), False),
    ]


@contextmanager
def recorded_pairs():
    """Whether each SM100 backward kernel that is built in the body uses pairs of CTAs."""
    from flash_attn.cute.flash_bwd_sm100 import FlashAttentionBackwardSm100 as Kernel

    pairs, original = [], Kernel.__init__

    def build(self, *args, **kwargs):
        original(self, *args, **kwargs)
        pairs.append(bool(kwargs["use_2cta_instrs"]))

    Kernel.__init__ = build
    try:
        yield pairs
    finally:
        Kernel.__init__ = original


def compile_anew(case) -> None:
    """Compile a case whose backward may have been compiled before."""
    from fa_cases import compile_case

    from flash_attn.cute import interface

    interface._flash_attn_bwd.compile_cache.clear()
    compile_case(case)


def judge(case, expected: bool, on_gpu: bool) -> Verdict:
    from fa_reference import assert_case

    try:
        with recorded_pairs() as pairs:
            if on_gpu:
                assert_case(case)
            else:
                compile_anew(case)
    except Exception as error:
        return Verdict(f"FAIL      {type(error).__name__}: {error}", False)
    if set(pairs) != {expected} and (pairs or not on_gpu):  # a kernel that was compiled before says nothing
        return Verdict(f"FAIL      pairs of CTAs: {pairs}, expected {expected}", False)
    return Verdict("pass" if on_gpu else "compiled", True)


def is_blackwell() -> bool:
    import torch

    return torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 10


def main() -> int:
    on_gpu = is_blackwell()
    if not on_gpu and os.environ.get("FLASH_ATTENTION_ARCH") != "sm_100":
        target = {"FLASH_ATTENTION_ARCH": "sm_100", "CUTE_DSL_ARCH": "sm_100a", "FLASH_ATTENTION_NUM_SMS": "148"}
        return subprocess.call([sys.executable, __file__], env=os.environ | target | {"CUDA_VISIBLE_DEVICES": ""})
    print("on this GPU" if on_gpu else "no datacenter Blackwell GPU here: kernels are compiled for sm_100a, not run")
    if on_gpu:
        verdicts = [show(case, expected, True) for case, expected in cases()]
    else:
        from torch._subclasses.fake_tensor import FakeTensorMode

        with FakeTensorMode():
            verdicts = [show(case, expected, False) for case, expected in cases()]
    return 0 if all(verdict.good for verdict in verdicts) else 1


def show(case, expected: bool, on_gpu: bool) -> Verdict:
    verdict = judge(case, expected, on_gpu)
    print(f"{'2 CTAs' if expected else '1 CTA':<8}{case}: {verdict.said}", flush=True)
    return verdict


if __name__ == "__main__":
    sys.exit(main())
