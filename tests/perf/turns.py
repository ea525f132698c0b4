"""In which order versions take turns."""

import numpy as np


def in_turns(count, rounds):
    """
    Return numbers below `count`, each once a round, in a random order that is the same on all ranks.

    Clocks sink with load, and rise while a device waits. In a fixed order each version would come after the same one,
    and gain by it if that one is slow.
    """
    order = np.random.default_rng(7)
    return [int(at) for _ in range(rounds) for at in order.permutation(count)]
