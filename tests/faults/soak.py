"""Soak: random plans, shapes and faults for thousands of steps, and everything looked at that must not change.

    mpiexec -n 4 python tests/faults/soak.py [--steps 20000] [--seed 0] [--episode 0]

An episode is a reducer with random settings, on all ranks or in two groups. Its steps have random arrays, and now and
then a fault on one rank, or a checkpoint that another reducer continues from. In every step nothing may be lost
(gradient + residual before = ranks x mean + residual after, summed over ranks), means have the same bits on all ranks,
and an error is one on all ranks that leaves residuals unchanged. The first episodes take every compressor with every
collective that carries it, and every policy: each loads its kernels, and MPI fills its pools. 50 later, memory, file
descriptors, threads, communicators and requests may no longer grow, those in pools up to a limit.

``--seed S --episode E``, which a failure names, begins with the episode that failed.
"""

import argparse
import collections
import ctypes
import faulthandler
import hashlib
import os
import shutil
import sys
import tempfile
import time
import warnings
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

if __name__ == "__main__":
    # One heap for all threads, those of libraries too: of heaps of their own malloc_trim gives nothing back above what
    # is in use last, so that they stay as large as the largest step has made them. -8 is M_ARENA_MAX of malloc.h.
    ctypes.CDLL(None).mallopt(-8, 1)

import numpy as np
from faults.growth import CommunicatorCount, held_by_process, verdict
from mpi4py import MPI
from schemes import OWN, UNBIASED, USERS

import mpicomp
from mpicomp.errors import MpicompError, NonFiniteError, UnknownNameError
from mpicomp.mpi.comm import COUNT_LIMIT, MPITransport
from mpicomp.mpi.pool import _SETS_BEFORE_GC as MANY
from mpicomp.mpi.pool import pools
from mpicomp.mpi.thread import ProgressThread
from mpicomp.mpi.transport import wait
from mpicomp.testing import pairs

PAIRS = pairs(OWN) + pairs(UNBIASED) + pairs(USERS)
FIRST = [(*pair, True) for pair in PAIRS] + [(*pair, False) for pair in pairs(OWN)]  # whether with feedback
LONG = {next(place for place, pair in enumerate(PAIRS) if pair[1] == each) for _, each in PAIRS}  # a pair a collective
CHOOSING = [  # settings with which decisions are due every few steps
    {"compressor": {"id": "topk", "ratio": 0.05}, "policy": {"id": "gravac", "window": 3, "every": 2}},
    {"compressor": "topk", "policy": {"id": "lgreco", "first": 2, "every": 3}},
    {"compressor": {"id": "powersgd", "rank": 1}, "policy": {"id": "lgreco", "first": 2, "every": 3}},
    {"compressor": "topk", "policy": {"id": "accordion", "every": 3}},
    {"compressor": "sidco", "policy": {"id": "flexible", "every": 4}},
    {"compressor": "dgc", "policy": {"id": "schedule", "steps": 10}},
    {"compressor": "topk", "policy": {"warmup": 3}},
    {"compressor": "sidco", "policy": {"warmup": "ramp:5"}},
    {"policy": {"id": "auto"}},
    {"compressor": "topk", "policy": {"id": "static"}},
]
MORE = 50  # episodes after the first ones, by when every group of ranks, and what else is rare, has come a few times
DTYPES = [np.float32, np.float32, np.float64, np.float16]
SIZES = [0, 1, 1, 2, 7, 64, 300, 1000, 5000, 20_000]
PARTS = {2: [[0, 1]], 3: [[0, 0, 1], [0, 1, 0]], 4: [[0, 0, 1, 1], [0, 1, 1, 1], [0, 1, 0, 1]]}  # groups of ranks
LAYOUTS = {3: [[0, 0, 1]], 4: [[0, 0, 1, 1], [0, 1, 1, 1]]}  # hosts of ranks, as if there were several
MOST = 10  # arrays, each a bucket of its own, where policies are taken first: what they know of plans is of each bucket
FAULTS = ["shape", "dtype", "text", "lr", "missing", "nan", "inf"]
LOOK = 4  # episodes from one look at what is held to the next
LIMIT_S = 300  # seconds of an episode, after which every rank prints its stacks and ends
EPS = {"float16": 2.0**-11, "float32": 1e-6, "float64": 1e-6}
"""Rounding of a delivered mean relative to the largest number of its array, and of the sums that it comes from."""
MOST_GROWTH = 0.01  # of memory, once it is warm


def first_episodes(ranks):
    return len(FIRST) + len(CHOOSING) * (1 + len(LAYOUTS.get(ranks, [])))


class Episode:
    """A reducer with random settings, and its steps; ``worst`` is the largest error of the law, of what is allowed."""

    def __init__(self, seed, number, opened, folder, counts):
        self.key = [seed, number]
        world = MPI.COMM_WORLD
        rng = np.random.default_rng(self.key)
        self.counts, self.folder, self.worst = counts, folder, 0.0
        self.first = number < first_episodes(world.size)
        self.chooses = self.first and number >= len(FIRST)  # with one of the policies
        self.long = self.chooses or (self.first and number in LONG)  # with arrays for which MPI fills its pools
        self.length = int(rng.integers(5, 60)) if not self.first else 20 if self.chooses else 4
        parts = PARTS.get(world.size, [[0] * world.size])
        parted = not self.first and rng.random() < 0.25
        self.colour = parts[int(rng.integers(len(parts)))][world.rank] if parted else 0
        self.comm = world.Split(self.colour) if parted else world.Dup()
        if parted:
            opened.watch(self.comm)
        self.key.append(self.colour)
        self.settings = self._settings(number)
        self.overlap = self.shared("overlap").random() < 0.4 and MPI.Query_thread() == MPI.THREAD_MULTIPLE
        self.shapes = self._shapes()
        self._transport = self.thread = None
        self._open()

    def shared(self, *what):
        """Return random numbers that are the same on the ranks of this group."""
        return np.random.default_rng(
            [*self.key, *(w if isinstance(w, int) else int.from_bytes(w.encode()[:4]) for w in what)]
        )

    def _settings(self, number):
        rng = self.shared("settings")
        policy = {"warmup": 0}
        settings = {"nonfinite": str(rng.choice(["raise", "raise", "skip", "pass"]))}
        settings |= {"bucket_bytes": int(rng.choice([1, 2000, 100_000, 32 << 20])), "seed": int(rng.integers(100))}
        if number < len(FIRST) or (not self.first and rng.random() < 0.6):
            compressor, collective, kept = FIRST[number if self.first else int(rng.integers(len(PAIRS)))]
            decided = rng.random() > 0.9 and not self.first  # by seconds
            settings |= {"compressor": compressor, "collective": "auto" if decided else collective}
            feedback = compressor in OWN and (kept if self.first else rng.random() < 0.9)
            settings |= {"feedback": feedback}
        else:
            feedback = True
            choice = number - len(FIRST) if self.first else int(rng.integers(len(CHOOSING)))
            chosen = CHOOSING[choice % len(CHOOSING)]
            settings |= chosen
            policy |= chosen["policy"]
        settings["policy"] = policy
        if feedback and not self.first and rng.random() < 0.2:
            settings["feedback_decay"] = 0.9
        self.limit, self.layout = COUNT_LIMIT, None
        if self.chooses:
            settings["bucket_bytes"] = 1
            self.layout = [None, *LAYOUTS.get(self.comm.size, [])][choice // len(CHOOSING)]
        if not self.first and self.comm.size == MPI.COMM_WORLD.size:
            self.limit = int(rng.choice([COUNT_LIMIT, COUNT_LIMIT, 1000]))
            layouts = [None, None, *LAYOUTS.get(self.comm.size, [])]
            self.layout = layouts[int(rng.integers(len(layouts)))]
        return settings

    def _shapes(self):
        rng = self.shared("shapes")
        shapes = {}
        for place in range(MOST if self.chooses else 4 if self.first else int(rng.integers(1, 9))):
            numel = int(rng.choice(SIZES[5:] if self.first else SIZES))
            rows = int(rng.choice([1, 2, 10])) if numel >= 300 else 1
            shape = (rows, numel // rows) if rows > 1 else [(numel,), ()][numel == 1 and rng.random() < 0.5]
            dtype = DTYPES[place % 4] if self.first else DTYPES[int(rng.integers(len(DTYPES)))]
            shapes[f"{place}"] = (shape, np.dtype(dtype))
        often_cut = self.limit != COUNT_LIMIT  # by MPI's limit, lowered: a long array would take minutes
        if self.long or (not self.first and rng.random() < 0.02 and not often_cut):
            shapes["large"] = ((300_000,), np.dtype(np.float32))  # messages of several segments
        if self.long:
            shapes["wide"] = ((100_000,), np.dtype(np.float64))
        return shapes

    def _open(self):
        comm = self.comm
        if self.limit != COUNT_LIMIT or self.layout is not None:
            comm = self._transport = MPITransport(self.comm, self.limit, self.layout)
        self.reducer = mpicomp.Reducer(**self.settings, comm=comm)
        if self.overlap:
            self.thread = ProgressThread(self.reducer.transport).start()

    def _close(self):
        if self.thread is not None:
            self.thread.stop()
            self.thread = None
        self.reducer.close()
        if self._transport is not None:
            self._transport.close()
            self._transport = None

    def end(self):
        self._close()
        self.comm.Free()

    def gradients(self, step):
        """Return this rank's gradients of a step: some transposed, backwards or zero."""
        rng = np.random.default_rng([*self.key, step, 7, self.comm.rank])
        loud = float(self.shared("loud", step).choice([1e-2, 1, 1, 1, 100]))
        found = {}
        for name, (shape, dtype) in self.shapes.items():
            kind = int(rng.integers(10))
            array = np.asarray(loud * rng.normal(size=shape[::-1] if kind == 0 else shape)).astype(dtype)
            found[name] = np.asarray(
                array.T if kind == 0 else array[::-1] if kind == 1 and shape else array * dtype.type(kind > 2)
            )
        return found

    def residuals(self, names):
        found = {}
        for name in names:
            try:
                found[name] = self.reducer.residual(name).astype(np.float64)
            except UnknownNameError:
                found[name] = np.zeros(self.shapes[name][0])
        return found

    def step(self, step):
        """Make a step of a random kind, and check it."""
        rng = self.shared("step", step)
        kind = rng.choice(
            ["plain", "fault", "absent", "other arrays", "reload", "reopen", "back"],
            p=[0.66, 0.12, 0.08, 0.04, 0.03, 0.05, 0.02],
        )
        kind = "plain" if self.first else str(kind)
        self.counts[kind] += 1
        culprit = int(rng.integers(self.comm.size))
        gradients, absent, lr, fault = self.gradients(step), [], 0.1, None
        match kind:
            case "fault":
                fault = str(rng.choice(FAULTS))
                gradients, lr, fault = self._spoil(gradients, fault, culprit, rng)
                self.counts[str(fault)] += 1
            case "absent":
                everywhere = rng.random() < 0.3
                name = str(rng.choice(list(gradients)))
                if everywhere or self.comm.rank == culprit:
                    absent = [name]
                    gradients[name] = np.zeros_like(gradients[name])
            case "other arrays":
                if rng.random() < 0.5 and len(gradients) > 1:
                    del gradients[str(rng.choice(list(gradients)))]
                else:
                    self.shapes[f"new {step}"] = ((int(rng.integers(1, 500)),), np.dtype(np.float32))
                    gradients = self.gradients(step)
            case "reload":
                self._reload(step)
            case "reopen":
                state = self.reducer.state_dict()
                if rng.random() < 0.8:
                    self._close()  # else it is dropped without a word
                elif self.thread is not None:
                    self.thread.stop()
                self._open()
                self.reducer.load_state_dict(state)
            case "back":
                self.reducer.load_state_dict(self.reducer.state_dict())
        before = self.residuals(gradients)
        means, error = self._reduce(gradients, absent, lr, step)
        self._check(gradients, before, means, error, fault)

    def _reload(self, step):
        """Write a checkpoint, and go on from it with another reducer."""
        folder = self.folder / f"{self.colour}"
        mpicomp.save_checkpoint(folder, {"step": step, "reducer": self.reducer.state_dict()}, self.comm, keep=2)
        self._close()
        state = mpicomp.load_checkpoint(folder, self.comm)
        assert state["step"] == step
        self._open()
        self.reducer.load_state_dict(state["reducer"])

    def _spoil(self, gradients, fault, culprit, rng):
        """Return gradients and learning rate, on one rank with a fault in them, and the name of the fault."""
        name = str(rng.choice(list(gradients)))
        numel = int(np.prod(self.shapes[name][0]))
        if (self.comm.size == 1 and fault in ("shape", "missing")) or (fault in ("nan", "inf") and numel == 0):
            fault = "text"
        if self.comm.rank != culprit:
            return gradients, 0.1, fault
        match fault:
            case "shape":
                gradients[name] = np.zeros(numel + 1, gradients[name].dtype)
            case "dtype":
                gradients[name] = np.zeros(self.shapes[name][0], np.int32)
            case "text":
                gradients[name] = "text"
            case "lr":
                return gradients, "fast", fault
            case "missing":
                del gradients[name]
            case "nan" | "inf":
                bad = np.array(gradients[name])
                bad.flat[int(rng.integers(numel))] = float(fault)
                gradients[name] = bad
        return gradients, 0.1, fault

    def _reduce(self, gradients, absent, lr, step):
        """Return the means and None, or None and the error."""
        try:
            stream = None if self.thread is None else self.reducer.stream(self.thread)
            if stream is None:
                return self.reducer.reduce(gradients, lr, absent=absent), None
            self.counts["overlapped"] += 1
            order = list(self.shapes)
            self.shared("order", step).shuffle(order)
            for name in order:
                if name in gradients and not isinstance(gradients[name], str) and name not in absent:
                    stream.put(name, gradients[name])
            return stream.finish(gradients, lr, absent), None
        except MpicompError as error:
            return None, error

    def _check(self, gradients, before, means, error, fault):
        comm, counts = self.comm, self.counts
        said = f"{type(error).__name__}: {error}" if error is not None else ""
        digest = hashlib.blake2b(said.encode(), digest_size=8)
        for name in sorted(means or ()):
            digest.update(name.encode())
            digest.update(means[name].tobytes())
        everyones = np.empty((comm.size, 8), np.uint8)
        wait(comm.Iallgather(np.frombuffer(digest.digest(), np.uint8), everyones).Test)
        assert (everyones == everyones[0]).all(), f"ranks differ in their means or errors; here: {said or 'means'}"
        nonfinite = fault in ("nan", "inf")
        mode = self.settings["nonfinite"]
        undone = fault is not None and (not nonfinite or mode != "pass")
        assert (error is not None) == (undone and not (nonfinite and mode == "skip")), f"{fault}, {mode}: {said}"
        if nonfinite and error is not None:
            assert isinstance(error, NonFiniteError), said
        counts["errors"] += error is not None
        after = self.residuals(before)
        if undone:
            assert all(after[name].tobytes() == before[name].tobytes() for name in before), "an undone step left traces"
            assert not any(mean.any() for mean in (means or {}).values())
            return
        assert all(np.isfinite(array).all() for array in after.values()), "a residual is not finite"
        exact = self.settings.get("compressor") == mpicomp.Dense()
        if nonfinite or not (self.reducer.feedback or exact):
            return
        self._check_law(gradients, before, after, means)

    def _check_law(self, gradients, before, after, means):
        """Check that gradient + residual before is ranks x mean + residual after, undecayed, summed over ranks."""
        decay = self.settings.get("feedback_decay", 1.0)
        if not gradients:
            return
        put_in = [gradients[name].astype(np.float64) + before[name] - after[name] / decay for name in gradients]
        parts = ([gradients[name], before[name], after[name]] for name in gradients)
        largest = [max(float(np.abs(item).max(initial=0)) for item in part) for part in parts]
        local, sizes = np.concatenate([array.reshape(-1) for array in put_in]), np.array(largest)
        total, most = np.empty_like(local), np.empty_like(sizes)
        for request in (self.comm.Iallreduce(local, total), self.comm.Iallreduce(sizes, most, MPI.MAX)):
            wait(request.Test)  # with naps, as ranks may share cores
        start = 0
        for name, array, size in zip(gradients, put_in, most.tolist(), strict=True):
            entered, start = total[start : start + array.size], start + array.size
            mean = means.get(name)
            delivered = np.zeros(array.size) if mean is None else self.comm.size * mean.astype(np.float64).reshape(-1)
            scale = max(1e-3, size, np.abs(delivered).max(initial=0), np.abs(entered).max(initial=0))
            allowed = 4 * EPS[str(gradients[name].dtype)] * scale
            off = float(np.abs(delivered - entered).max(initial=0)) / allowed
            assert off <= 1, f"'{name}': {off:.3g} of the rounding that is allowed is lost or gained"
            self.worst = max(self.worst, off)
        self.counts["laws"] += 1


def soak(steps, seed, number, say):
    """Run episodes until so many steps are made, and return what was seen on this rank."""
    world, opened, counts = MPI.COMM_WORLD, CommunicatorCount(), collections.Counter()
    folder = Path(world.bcast(tempfile.mkdtemp(prefix="mpicomp-soak-") if world.rank == 0 else None))
    done, worst, began, seen = 0, 0.0, time.monotonic(), []
    episode = None
    while done < steps:
        faulthandler.dump_traceback_later(LIMIT_S, exit=True)
        step = -1
        try:
            episode = Episode(seed, number, opened, folder, counts)
            for step in range(min(episode.length, steps - done)):
                episode.step(step)
                done += 1
            step = -1
            episode.end()
        except BaseException as error:
            about = {} if episode is None else vars(episode)
            names = ("settings", "overlap", "limit", "layout", "colour", "shapes")
            settings = {name: about.get(name) for name in names}
            error.add_note(f"soak: --seed {seed} --episode {number}, its step {step}, rank {world.rank}: {settings}")
            raise
        worst = max(worst, episode.worst)
        episode = None
        number += 1
        if number % LOOK == 0:
            value = held_by_process(opened)
            say(f"{done} steps, {number} episodes, {time.monotonic() - began:.0f} s, {value}")
            for ranks, pool in pools.items():
                assert len(pool._sets) <= MANY, f"the pool of {ranks} keeps {len(pool._sets)} sets of channels"
            if number >= first_episodes(world.size) + MORE:
                seen.append((done, value))
    faulthandler.cancel_dump_traceback_later()
    world.Barrier()
    if world.rank == 0:
        shutil.rmtree(folder, ignore_errors=True)
    return {"steps": done, "episodes": number, "worst": worst, "seen": seen, "counts": dict(counts)}


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--episode", type=int, default=0, help="the first one")
    arguments = parser.parse_args()
    world = MPI.COMM_WORLD

    def say(text):
        if world.rank == 0:
            print(f"soak: {text}", flush=True)

    for name, limit in (("MPICOMP_STALL", "20"), ("MPICOMP_STALL_END", "60")):
        os.environ.setdefault(name, limit)  # a longer wait is reported, and ends the job
    warnings.simplefilter("error", RuntimeWarning)  # of NumPy, which ends a step in its middle where a user has it so
    say(f"{world.size} ranks, {MPI.get_vendor()}, seed {arguments.seed}, {len(PAIRS)} pairs")
    everyones = world.allgather(soak(arguments.steps, arguments.seed, arguments.episode, say))
    growths, grown = zip(*(verdict(values["seen"]) for values in everyones), strict=True)
    judged = all(growth is not None for growth in growths)
    first = everyones[0]
    say(f"{first['steps']} steps, {first['episodes']} episodes; counts: {first['counts']}")
    say(f"largest error of the law: {max(each['worst'] for each in everyones):.3f} of what rounding is allowed")
    if judged:
        say(f"growth of memory, by rank: {', '.join(f'{100 * growth:+.2f} %' for growth in growths)}")
        say(f"held at the end, by rank: {[each['seen'][-1][1] for each in everyones]}")
        for rank, names in enumerate(grown):
            if names:
                say(f"rank {rank} holds more and more {', '.join(names)}")
    return 1 if judged and (max(growths) > MOST_GROWTH or any(grown)) else 0


if __name__ == "__main__":
    sys.exit(main())
