"""Static options of the kernel, and how tokens, heads, keys and blocks lie over its threads."""

from dataclasses import dataclass

KEYS = 64  # compressed keys of a step
MOST_COLUMNS = 128  # (token, head) pairs of a CTA
STAGES = 2  # of keys in shared memory
THREADS, WARPS, WARP = 128, 4, 32  # of each of a CTA's two warpgroups
SCORES_READ, SCORES_WRITTEN, PRODUCTS_DONE = 1, 2, 3  # named barriers
QUAD = 4  # lanes that share a key's scores
FOUR = 4  # scores in one read
CHUNK = 16  # blocks that a lane adds to its candidates together
HALF_OF_SHARED = 113 * 1024  # bytes for each of a multiprocessor's two CTAs
NONNEGATIVE = 1 << 30  # what stands for a score of 0, where 31 bits order as scores of any sign
SPARE = 12  # the most candidates of a lane that it has capacity for beyond its share of the best and a chunk


@dataclass(frozen=True)
class TokenTopKSpec:
    """Static options of the kernel.

    Attributes:
        n: blocks of a list, the forced ones included.
        init, local: forced blocks at the sequence's begin, and up to a token's own.
        block_size, size, stride, offset: tokens of a block and of a compressed key, tokens between the starts of
            compressed keys, and the offset of their mask.
        use_mma_sync: how products are made (`flash_attn.cute.mma.product`).
    """

    D: int
    G: int
    n: int
    causal: bool
    init: int
    local: int
    packed: bool
    block_size: int
    size: int
    stride: int
    offset: int
    use_mma_sync: bool

    @property
    def columns(self) -> int:
        """(token, head) pairs of a CTA; fewer for small groups, whose many lists need shared memory."""
        return MOST_COLUMNS if self.G > 3 else MOST_COLUMNS // 2

    @property
    def own_columns(self) -> int:
        """(token, head) pairs of a thread."""
        return self.columns // QUAD

    @property
    def share(self) -> int:
        """Lanes that share a key's scores of one token."""
        return -(-self.G // self.own_columns) if self.G <= 2 * self.own_columns else QUAD

    @property
    def heads(self) -> int:
        """Heads of a token in one thread."""
        return -(-self.G // self.share)

    @property
    def tokens_a_warp(self) -> int:
        """Tokens whose lists a warp keeps."""
        return self.own_columns // self.heads if self.share == 1 else 1

    @property
    def tokens(self) -> int:
        """Tokens of a CTA."""
        return QUAD // self.share * self.tokens_a_warp

    @property
    def lanes(self) -> int:
        """Lanes that keep a token's candidates."""
        return WARP >> (self.tokens_a_warp - 1).bit_length()

    @property
    def keys_a_block(self) -> int:
        """Compressed keys that start in a block."""
        return self.block_size // self.stride

    @property
    def halo(self) -> int:
        """Compressed keys that start before a block and reach into it."""
        return self.size // self.stride - 1

    @property
    def weights(self) -> tuple[int, ...]:
        """Weights of the keys from ``block * keys_a_block - halo`` on: strides in which each overlaps the block."""
        r, m = self.keys_a_block, self.halo + 1
        starts = range(-self.halo, r)
        return tuple(min(start + m, r) - max(start, 0) for start in starts)

    @property
    def blocks_a_step(self) -> int:
        return (KEYS - self.halo) // self.keys_a_block

    @property
    def values(self) -> int:
        """Blocks of a step that a lane scores for its token."""
        return -(-self.blocks_a_step // self.lanes)

    @property
    def in_fours(self) -> bool:
        """A lane reads the scores of four blocks at once."""
        return len(self.weights) == 1 and self.values % FOUR == 0

    def position(self, key: int) -> int:
        """Index of a step's key in a token's scores in shared memory, where four blocks of a lane are neighbours."""
        if not self.in_fours:
            return key
        fours, rest = key // (FOUR * self.lanes), key % (FOUR * self.lanes)
        return FOUR * (fours * self.lanes + rest % self.lanes) + rest // self.lanes

    @property
    def most_wanted(self) -> int:
        """The most entries of a list that are left for candidates."""
        least = self.forced if self.causal else max(self.init, min(1, self.local))
        return max(0, self.n - least)

    @property
    def forced(self) -> int:
        """The most forced blocks of a token; may exceed n."""
        return self.init + self.local

    @property
    def own_is_candidate(self) -> bool:
        """True if a token's own block, though incomplete, is a candidate: no block is forced."""
        return not self.forced

    @property
    def score_threads(self) -> int:
        """Threads that write scores."""
        return THREADS

    @property
    def depth(self) -> int:
        """Best scores that a lane keeps: those of a token's lanes are at least `most_wanted` together."""
        return max(1, -(-self.most_wanted // self.lanes))

    @property
    def slots(self) -> int:
        """Candidates up to which a lane is not pruned; more than its share of the best."""
        return -(-min(3 * self.depth + 8, self.depth + SPARE) // 4) * 4

    @property
    def capacity(self) -> int:
        """Capacity of a lane for candidates: `slots` and a chunk."""
        return self.slots + -(-min(CHUNK, self.values) // 4) * 4

    @property
    def token_words(self) -> int:
        """Stride in shared memory between the scores of a warp's tokens, free of bank conflicts."""
        if len(self.weights) > 1:
            return KEYS + 1
        return KEYS + (4 * self.lanes if self.lanes < 8 else 0)

    @property
    def warp_words(self) -> int:
        """Stride in shared memory between the scores of neighbouring warps."""
        words = self.tokens_a_warp * self.token_words
        return words + (8 - words) % WARP

    @property
    def shared_bytes(self) -> int:
        """Shared memory of a CTA at most."""
        operands = 2 * self.D * (self.columns + STAGES * KEYS) + 4 * self.columns
        lists = 8 * (self.capacity * WARP + self.n * (WARP // self.lanes)) * WARPS
        return 1024 + operands + 4 * self.warp_words * WARPS + lists

    @property
    def resident(self) -> int:
        """CTAs of a multiprocessor."""
        return 2 if self.shared_bytes <= HALF_OF_SHARED else 1

    @property
    def registers(self) -> tuple[int, int] | None:
        """Registers of a thread of the first and of the second warpgroup; None: the launch's for both."""
        return (176, 80) if self.columns == MOST_COLUMNS and self.resident > 1 else None
