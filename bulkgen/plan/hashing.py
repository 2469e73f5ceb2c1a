"""Hashes of the prefixes of many prompts at once: 64 bits, and a prefix of any length in one step."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Hashes = npt.NDArray[np.uint64]
Counts = npt.NDArray[np.int64]

# The increment and the finalizer of SplitMix64: Steele, Lea, Flood, "Fast splittable pseudorandom number generators",
# OOPSLA 2014, with the constants of Stafford's variant 13.
_STEP = np.uint64(0x9E3779B97F4A7C15)
_ROUNDS = (
    (np.uint64(30), np.uint64(0xBF58476D1CE4E5B9)),
    (np.uint64(27), np.uint64(0x94D049BB133111EB)),
)
_LAST_SHIFT = np.uint64(31)


def mixed(values: Hashes) -> Hashes:
    """Each value as 64 bits of which none tells another: equal for equal values, unlike for unlike ones."""
    bits = values * _STEP
    scratch = np.empty_like(bits)
    for shift, factor in _ROUNDS:
        bits ^= np.right_shift(bits, shift, out=scratch)
        bits *= factor
    bits ^= np.right_shift(bits, _LAST_SHIFT, out=scratch)
    return bits


@dataclass(frozen=True, slots=True)
class PromptHashes:
    """Some prompts, as running sums over a hash of each token and its place.

    The hash of a prefix is the sum over its tokens, so that it is a difference of two running sums (Zobrist, "A new
    hashing method with application for game playing", University of Wisconsin 1970, combines such hashes by exclusive
    or). Two different prefixes have the same one with a probability of 2^-64; some two among n do with n² / 2^65 (of 10
    million: 3 in a million). It keeps nobody out who makes up such prompts on purpose.

    `lengths`: tokens of each prompt. `starts`: where each begins in `sums`, which has one element more than tokens.
    """

    lengths: Counts
    starts: Counts
    sums: Hashes

    @classmethod
    def of(cls, tokens: npt.NDArray[np.int32], offsets: npt.NDArray[np.int32]) -> "PromptHashes":
        """Of prompts that stand one behind the other; prompt i is tokens[offsets[i] : offsets[i + 1]]."""
        bounds = offsets.astype(np.int64) - int(offsets[0])
        starts, lengths = bounds[:-1], np.diff(bounds)
        flat = tokens[int(offsets[0]) : int(offsets[-1])]
        places = np.arange(len(flat), dtype=np.uint64)
        places -= np.repeat(starts.astype(np.uint64), lengths)
        places <<= np.uint64(32)
        places |= flat.astype(np.uint64)
        sums = np.zeros(len(flat) + 1, np.uint64)
        np.cumsum(mixed(places), out=sums[1:])
        return cls(lengths, starts, sums)

    def only(self, prompts: npt.NDArray[np.bool_]) -> "PromptHashes":
        """Those of some of the prompts."""
        return PromptHashes(self.lengths[prompts], self.starts[prompts], self.sums)

    def prefixes(self, prompts: Counts, lengths: Counts) -> Hashes:
        """Hash of the first lengths[i] tokens of prompt number prompts[i]."""
        starts = self.starts[prompts]
        return mixed(self.sums[starts + lengths] - self.sums[starts] + lengths.astype(np.uint64) * _STEP)

    def whole(self) -> Hashes:
        """Hash of each prompt."""
        return self.prefixes(np.arange(len(self.lengths)), self.lengths)
