"""Head dimensions that a kernel takes without a word and gets wrong."""

ACCUMULATED = 32  # the accumulators of backward hold head dimensions rounded up to this


def refuse_padded_accumulators(arch: int, head_dim: int, head_dim_v: int, packed: bool) -> None:
    """Refuse packed SM90 backward where a head dimension is padded: dq (under GQA dk and dv too) are wrong there.

    Seen on an H200 with head dimensions 72 and 80, plain causal, errors of the size of the gradients; 64 and 96 are
    right. `docs/upstream-findings.md` has the measurement.

    Raises:
        NotImplementedError: before any launch.
    """
    if arch // 10 == 9 and packed and (head_dim % ACCUMULATED or head_dim_v % ACCUMULATED):
        raise NotImplementedError(
            f"sm_{arch}: backward of packed sequences (cu_seqlens_q, cu_seqlens_k) needs head dimensions that are "
            f"multiples of {ACCUMULATED}, got head_dim={head_dim}, head_dim_v={head_dim_v}; pad q, k and v with zeros"
        )
