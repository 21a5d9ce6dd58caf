"""The examples in docstrings of public names run, and every public name has one."""

from __future__ import annotations

import dataclasses
import doctest
import importlib

import pytest
import torch
import transformers

import nsa_layer
from nsa_layer.integrations import hf

MODULES = ("nsa_layer", "nsa_layer.integrations.hf", "nsa_tools.index_training")
METHODS = ("replace", "paper", "seed", "from_dict")  # of NSAConfig
PUBLIC = [(module, name) for module in MODULES for name in importlib.import_module(module).__all__]
PUBLIC += [("nsa_layer", f"NSAConfig.{name}") for name in METHODS]


@pytest.mark.xdist_group("hf")
@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize(("module", "name"), PUBLIC)
def test_every_public_name_has_an_example_that_runs(module: str, name: str) -> None:
    thing = importlib.import_module(module)
    if name == "use_nsa_kernels" and hf.minimax.modeling is None:
        pytest.skip("transformers without minimax_m3_vl")
    names = vars(nsa_layer) | vars(hf) | vars(thing)
    names |= dict(torch=torch, dataclasses=dataclasses, transformers=transformers)
    for part in name.split("."):
        thing = getattr(thing, part)
    example = doctest.DocTestParser().get_doctest(thing.__doc__, names, name, None, None)
    assert 1 <= len(example.examples) <= 6
    torch.manual_seed(0)
    said: list[str] = []
    assert not doctest.DocTestRunner(verbose=False).run(example, out=said.append).failed, "".join(said)
