"""Block selection by top-k: which key blocks each tile of queries attends to, in two launches.

1. `pooled_queries`: the mean query of each tile, and all compressed keys, as rows of split fp16 (hi + lo) so that
   tensor cores multiply them with 22 bits.
2. `kernel`: a CTA holds 128 rows, the pooled queries of a few tiles for all heads of one key/value head, and
   streams the compressed keys past them, 128 at a time. Two passes over K: ascending for each row's softmax
   denominator (`online_softmax`), descending for the top-k; the last tile is reused. Probabilities are summed over the
   heads of a group; each of two warps keeps a tile's best blocks in registers (`register_topk`). With one head a group,
   the order of scores is that of probabilities, and one pass is enough.
3. The `epilogue` merges the two warps' lists and the forced blocks by rank, and writes them ascending.

`spec` says what the kernel is compiled for, `query_tiles` which blocks are candidates and forced for a tile, and
`split_fp16.split_gemm` multiplies split rows. Source: section 3.3 of arXiv:2502.11089, by query tile, not by query;
`nsa_layer.eager.select_blocks` defines the result in PyTorch.
"""
