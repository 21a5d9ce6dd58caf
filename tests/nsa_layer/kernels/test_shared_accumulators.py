"""The gradient accumulators of the branches' backward calls: which of them are one, for each kind of call."""

# What runs in a worker is imported there, so nothing up here may ask for the kernels.
from __future__ import annotations

import torch
from fa_compile import Worker

from nsa_layer import NSAConfig

PACKED = (300, 1, 0, 513, 64, 129)
TILES = NSAConfig(q_tile=128)
DETERMINISTIC = TILES.replace(deterministic=True)


def accumulators(changes: dict) -> tuple[int, int, int]:
    """In a worker: the counts of accumulators of dq and of dk, and the rows of a tile of row sums."""
    from unittest.mock import patch

    from nsa_layer.cute import backward
    from nsa_layer.warm_up import lookup
    from nsa_tools.shape import Shape

    call = dict(B=2, T=1000, Hq=8, Hkv=2, D=128, dtype=torch.bfloat16, config=TILES) | changes
    if lengths := call.get("lengths"):
        call |= dict(T=sum(lengths), B=1)
    made, original = [], backward.backward_layouts

    def noted(*args: object, **options: object) -> object:
        made.append(original(*args, **options))
        return made[-1]

    with patch.object(backward, "backward_layouts", noted), lookup.lookups(lambda *asked: True):
        for _ in range(2):
            lookup.make_call(Shape(**dict(Dv=call["D"]) | call).signature())
    assert made[0] is made[1], "layouts are looked up where the same call came before"
    of_tokens = {x.dk and x.dk.layout_key for x in made[0][-2:]} - {None}
    return len({x.dq.layout_key for x in made[0]}), len(of_tokens), made[0][0].dq.start


ON_HOPPER = [
    ({}, (1, 1, 64)),
    (dict(D=64), (1, 1, 128)),
    (dict(config=TILES.replace(block_size=128)), (1, 1, 64)),
    (dict(config=DETERMINISTIC), (1, 1, 64)),
    (dict(config=DETERMINISTIC.replace(block_size=128)), (1, 1, 64)),
    (dict(lengths=PACKED), (1, 1, 64)),
    (dict(lengths=PACKED, D=64), (1, 1, 128)),
    (dict(Hq=4, Hkv=4), (1, 0, 64)),
    # The compressed branch's kernel has tiles of 80 queries, with registers the other way round.
    (dict(causal=False), (2, 1, 320)),
    (dict(T=40), (1, 1, 64)),
    (dict(D=96), (1, 1, 64)),
    (dict(D=192, Dv=128, config=NSAConfig.paper()), (1, 2, 64)),
    (dict(D=256, config=NSAConfig(), lengths=PACKED), (1, 2, 64)),
]
# Tiles read unions there, whose kernels of dk and dv add to no accumulator: those are of other keys.
ON_BLACKWELL = [(dict(D=64), (1, 2, 128)), ({}, (1, 2, 128)), (dict(lengths=PACKED), (1, 2, 128))]


def test_branches_share_accumulators(compiler: Worker) -> None:
    """All where the kernels pair CTAs alike, and none of dk without GQA, where each call stores its own."""
    cases = ON_HOPPER if compiler.arch == "sm_90" else ON_BLACKWELL
    found = [compiler.run(accumulators, changes) for changes, _ in cases]
    assert found == [expected for _, expected in cases]
