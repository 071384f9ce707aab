"""SplitMix64 (Steele, Lea and Flood, 2014) with Python's unbounded integers."""

MASK = 2**64 - 1
GOLDEN = 0x9E3779B97F4A7C15


def splitmix64(seed: int, count: int) -> list[int]:
    """The first `count` outputs of the generator whose state starts at `seed`."""
    return [_finalize((seed + (i + 1) * GOLDEN) & MASK) for i in range(count)]


def _finalize(z: int) -> int:
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
    return z ^ (z >> 31)
