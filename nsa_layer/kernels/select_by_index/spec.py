"""Static options of the kernel."""

from dataclasses import dataclass

from nsa_layer.kernels.select_by_token.spec import THREADS, WARP, WARPS, TokenTopKSpec

KEYS = 128  # index keys of a product
BLOCKS = 64  # blocks whose maxima are handed over together
ROWS = 64  # tokens of a warpgroup
SHARED = 226 * 1024  # bytes of a CTA at most
LISTS_OF_TWO = 32  # the longest lists with which two warpgroups' tokens fit in shared memory


@dataclass(frozen=True)
class IndexTopKSpec(TokenTopKSpec):
    """Options of `TokenTopKSpec` with one score, so one key, for each block. D is the index' dimension.

    Attributes:
        one_key: all lists read the same keys.
        unrolled: products of a warpgroup between two waits for all of them, an even number.
    """

    one_key: bool = False
    unrolled: int = 16

    @classmethod
    def of(cls, D: int, n: int, init: int, local: int, packed: bool, size: int, use_mma_sync: bool, one_key: bool):
        return cls(D, 1, n, True, init, local, packed, size, 1, size, 0, use_mma_sync, one_key)

    @property
    def groups(self) -> int:
        """Warpgroups that multiply."""
        return 2 if self.n <= LISTS_OF_TWO else 1

    @property
    def tokens(self) -> int:
        return ROWS * self.groups

    @property
    def tokens_a_warp(self) -> int:
        return self.tokens // WARPS

    @property
    def lanes(self) -> int:
        return WARP // self.tokens_a_warp

    @property
    def score_threads(self) -> int:
        return THREADS * self.groups

    @property
    def registers(self) -> tuple[int, int, int] | None:
        """Registers of a thread that multiplies, keeps lists, loads; None: the launch's for all."""
        return (168, 144, 24) if self.groups > 1 else None

    @property
    def own_is_candidate(self) -> bool:
        return True

    @property
    def weights(self) -> tuple[int, ...]:
        return (1,)

    @property
    def halo(self) -> int:
        return 0

    @property
    def keys_a_block(self) -> int:
        return 1

    @property
    def blocks_a_step(self) -> int:
        return BLOCKS

    @property
    def stages(self) -> int:
        """Stages of keys in shared memory."""
        stage = 2 * self.D * KEYS
        lists = 8 * (self.capacity * WARP + self.n * self.tokens_a_warp) * WARPS + 4 * self.warp_words * WARPS
        return min(4, (SHARED - 2048 - 2 * self.D * self.tokens - lists) // stage)

    @property
    def blocks_a_product(self) -> int:
        return KEYS // self.block_size

    @property
    def products_a_step(self) -> int:
        """Products whose maxima are handed over together."""
        return BLOCKS // self.blocks_a_product
