"""A picture of the tokens that each query sees through each branch, from the blocks that a trained layer chose."""

from __future__ import annotations

import torch
from matplotlib.colors import LinearSegmentedColormap

from nsa_layer.call import Aux
from nsa_layer.config import NSAConfig
from nsa_tools.demo.model import ByteModel
from nsa_tools.report.figures import INK, MUTED, clean_axes, new_figure, to_png

# Pixels of a panel each way: rows are sampled queries, columns are ranges of tokens.
PIXELS = 1024
PALE = 0.35
NSA_COLOUR = "#2a78d6"
BRANCHES = ("compressed", "selected", "sliding window")


def compressed_visible(queries: torch.Tensor, T: int, *, config: NSAConfig) -> torch.Tensor:
    """bool [queries, T]: tokens of the blocks whose mean the query sees."""
    ends = torch.arange(config.compressed_length(T)) * config.stride
    covered = torch.zeros(len(queries), T + 1, dtype=torch.int32)
    if len(ends):
        seen = (ends + config.offset <= queries[:, None]).to(torch.int32)
        # +1 where a block starts and -1 behind its end: the running sum counts the blocks over each token.
        covered.index_add_(1, ends, seen)
        covered.index_add_(1, ends + config.span, -seen)
    return covered.cumsum(1)[:, :T] > 0


def selected_visible(queries: torch.Tensor, T: int, lists: torch.Tensor, *, config: NSAConfig) -> torch.Tensor:
    """bool [queries, T]: tokens up to the query in the blocks listed for its tile; lists: [M, n] of one head."""
    listed = torch.zeros(len(lists), config.num_blocks(T) + 1, dtype=torch.bool)
    # The padding, -1, goes to a column of its own.
    listed.scatter_(1, lists.long() % listed.shape[1], True)
    token = torch.arange(T)
    return listed[queries // config.q_tile][:, token // config.block_size] & (token <= queries[:, None])


def window_visible(queries: torch.Tensor, T: int, *, config: NSAConfig) -> torch.Tensor:
    """bool [queries, T]: the last ``window_size`` tokens up to the query."""
    distance = queries[:, None] - torch.arange(T)
    return (distance >= 0) & (distance < config.window_size)


@torch.no_grad()
def visibility_figure(model: ByteModel, tokens: torch.Tensor, *, config: NSAConfig) -> bytes:
    """A row for the first and for the last layer: compressed, selected (two heads), sliding window.

    Args:
        model: the sparse model.
        tokens: int64 [T].
    """
    layers: list[Aux] = []
    model.eval()
    model(tokens[None], seen=layers)
    shown = sorted({0, len(layers) - 1})
    heads = range(min(2, layers[0].block_indices.shape[2]))
    panels = 2 + len(heads)
    figure = new_figure(3.1 * panels, 3.5 * len(shown) + 0.4)
    grid = figure.subplots(len(shown), panels, squeeze=False)
    for row, layer in zip(grid, shown):
        _draw_layer(row, layers[layer], f"layer {layer + 1} of {len(layers)}", heads, len(tokens), config)
    title = "Tokens that each query sees, per branch (pale: as part of a block's mean); in brackets its mean gate"
    figure.suptitle(title, color=INK, fontsize=11, x=0.01, ha="left")
    return to_png(figure)


def _draw_layer(row: object, aux: Aux, name: str, heads: range, T: int, config: NSAConfig) -> None:
    queries = torch.linspace(0, T - 1, min(T, PIXELS), dtype=torch.float64).long()
    lists = aux.block_indices[0].cpu()
    gates = dict(zip(BRANCHES, aux.gates[0].float().mean((0, 1)).tolist()))
    panels = [("compressed", f", means of {config.span}", compressed_visible(queries, T, config=config))]
    for head in heads:
        visible = selected_visible(queries, T, lists[:, head], config=config)
        panels.append(("selected", f", list of head {head}", visible))
    panels += [("sliding window", "", window_visible(queries, T, config=config))]
    for axes, (branch, which, visible) in zip(row, panels):
        # What is seen only as part of a mean is paler than what is seen itself.
        _draw_panel(axes, visible * (PALE if branch == "compressed" else 1.0), T)
        axes.set_title(f"{name}\n{branch}{which} ({gates[branch]:.2f})", color=INK, fontsize=9.5, loc="left")
    row[0].set_ylabel("query (token)", color=MUTED)


def _draw_panel(axes: object, strength: torch.Tensor, T: int) -> None:
    clean_axes(axes)
    axes.grid(False)
    # A column stands for a range of tokens, and is coloured by the share of them that the query sees.
    share = torch.nn.functional.adaptive_avg_pool1d(strength, min(T, PIXELS))
    ramp = LinearSegmentedColormap.from_list("seen", ["white", NSA_COLOUR])
    axes.imshow(share.numpy(), cmap=ramp, vmin=0, vmax=1, extent=(0, T, T, 0), interpolation="antialiased")
    axes.plot((0, T), (0, T), color=MUTED, linewidth=0.6)
    axes.set_xlabel("token seen", color=MUTED)
    axes.locator_params(nbins=5)
