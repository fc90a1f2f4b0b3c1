"""Kernels that are timed in turns."""

from mpicomp.bench.measure.interleaved import Kernel, take_turns


def test_slow_kernels_are_repeated_less():
    class Nap(Kernel):
        def run(self):
            for _ in range(1 if self.name == "quick" else 100_000):
                pass

    quick, slow, copy = Nap("quick"), Nap("slow"), Nap("quick")
    take_turns([quick, slow], copy, 16)
    assert (len(quick.seconds), len(slow.seconds), len(copy.seconds)) == (16, 4, 20)
