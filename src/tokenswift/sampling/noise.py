"""The noise of a choice: Gumbel noise keyed by seed, position and token.

Noise is the library's only source of randomness: one Gumbel value for each (seed, position, token),
and one uniform number for each (seed, position). It is a pure function of that key, so there is no
generator state to store, resume or move between devices, and every strategy sees the same noise at
the same position.

*Integers.* Two rounds of the splitmix64 finalizer (Steele, Lea and Flood 2014; constants of
Stafford's "Mix 13") in wrapping 64-bit arithmetic, one for the key of (seed, position) and one for
the token. They are the same on every device. At one position the map from token to integer is a
bijection, so no two tokens ever share an integer.

*Floats.* The upper 53 bits give w in (0, 1) on the grid (j + 1/2) / 2^53, and the noise is
g = -log(-log1p(-w)) in float64, rounded once to float32. Large noise, which decides the winner,
belongs to small w, where the grid is fine relative to w: among V tokens the winner has w near 1/V,
so 53 bits leave about 2^53 / V values below it (a 24-bit uniform leaves about 100 at V = 150,000).
The logarithms may differ between devices in the last bit of float64; after the rounding to
float32 that is seen about once in 10^8 values.
"""

from __future__ import annotations

import math
from collections import OrderedDict

import torch
from jaxtyping import Float, Int
from torch import Tensor

_WORD = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15  # 2^64 ÷ golden ratio, odd: token -> token * _GOLDEN is a bijection
_MIX_1 = 0xBF58476D1CE4E5B9
_MIX_2 = 0x94D049BB133111EB
_POSITION = 0xD1342543DE82EF95  # odd, unrelated to _GOLDEN: keeps positions and tokens apart
_MEMO = 64  # positions whose noise is kept


def _signed(word: int) -> int:
    """The two's-complement value of a 64-bit word, as torch's int64 holds it."""
    return word - (1 << 64) if word >> 63 else word


def mix64(word: int) -> int:
    """The splitmix64 finalizer on Python integers (a bijection of 64-bit words)."""
    word &= _WORD
    word = ((word ^ (word >> 30)) * _MIX_1) & _WORD
    word = ((word ^ (word >> 27)) * _MIX_2) & _WORD
    return word ^ (word >> 31)


def position_key(seed: int, position: int) -> int:
    """The 64-bit key of a position: the noise of a token comes from ``mix64(key + token *
    _GOLDEN)``."""
    return mix64(mix64(seed + _GOLDEN) + position * _POSITION)


def gumbel(key: int, token: int) -> float:
    """Noise of one token from its position's key, float64; on the host, for a few tokens."""
    w = ((mix64(token * _GOLDEN + key) >> 11) + 0.5) * 2.0**-53
    return -math.log(-math.log1p(-w)) if w < 1 else -math.inf


def uniform(seed: int, position: int) -> float:
    """A number in (0, 1) of a position, independent of the noise of all tokens there: what token -1
    would have, which is in no vocabulary."""
    word = mix64(position_key(seed, position) - _GOLDEN)
    return ((word >> 11) + 0.5) * 2.0**-53


def _mix_(words: Int[Tensor, " *s"]) -> Int[Tensor, " *s"]:
    """:func:`mix64` on a tensor of int64 words, in place."""
    shifted = torch.empty_like(words)
    for shift, factor in ((30, _MIX_1), (27, _MIX_2), (31, None)):
        torch.bitwise_right_shift(words, shift, out=shifted)
        shifted.bitwise_and_((1 << (64 - shift)) - 1)  # torch shifts arithmetically: no sign bits
        words.bitwise_xor_(shifted)
        if factor is not None:
            words.mul_(_signed(factor))
    return words


def noise_bits(seed: int, position: int, tokens: Int[Tensor, " *s"]) -> Int[Tensor, " *s"]:
    """The 64 random bits of each (seed, position, token), as int64; the same on every device.

    Args:
        seed: at least 0 (taken modulo 2^64).
        position: absolute position of the token to choose, counted from 0 at the text's start.
        tokens: token ids, int64, any shape.
    """
    words = tokens.mul(_signed(_GOLDEN))
    words.add_(_signed(position_key(seed, position)))
    return _mix_(words)


def uniforms_(bits: Int[Tensor, " *s"]) -> Float[Tensor, " *s"]:
    """float64 uniforms in (0, 1) on the grid (j + 1/2) / 2^53 from the upper bits (overwritten)."""
    bits.bitwise_right_shift_(11).bitwise_and_((1 << 53) - 1)
    return bits.to(torch.float64).add_(0.5).mul_(2.0**-53)


def gumbels_(bits: Int[Tensor, " *s"]) -> Float[Tensor, " *s"]:
    """float32 standard Gumbel noise from random bits (overwritten)."""
    # At j = 2^53 - 1 the sum rounds to 2^53, hence w = 1 and noise -inf: one value in 2^53, which a
    # clamp would hide at the price of one more pass; -inf only says that this token does not win.
    w = uniforms_(bits)
    return torch.log1p(w.neg_(), out=w).neg_().log_().neg_().to(torch.float32)


def gumbels_of(seed: int, position: int, tokens: Int[Tensor, " *s"]) -> Float[Tensor, " *s"]:
    """Noise of some tokens at a position, float32."""
    return gumbels_(noise_bits(seed, position, tokens))


class Noise:
    """The noise of one seed over one vocabulary, on one device.

    The vectors of the 64 most recently used positions are kept: drafting asks for a position first,
    and the target's choice asks again.

    Args:
        seed: from 0 to 2^63 - 1.
        vocab_size: V.
        device: where the noise is computed and returned.
    """

    def __init__(self, seed: int, vocab_size: int, device: torch.device | str = "cpu") -> None:
        self.seed = seed
        self._tokens = torch.arange(vocab_size, device=device).mul_(_signed(_GOLDEN))
        self._memo: OrderedDict[int, Tensor] = OrderedDict()

    def at(self, position: int) -> Float[Tensor, " V"]:
        """The Gumbel noise of every token at an absolute position, (V,) float32. Do not modify
        it."""
        vector = self._memo.get(position)
        if vector is not None:
            self._memo.move_to_end(position)
            return vector
        vector = gumbels_(_mix_(self._tokens + _signed(position_key(self.seed, position))))
        self._memo[position] = vector
        if len(self._memo) > _MEMO:
            self._memo.popitem(last=False)
        return vector
