"""Turns: so many threads in the block at a time, first come, first served, and nobody is left waiting."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import patchbayes as pb
from patchbayes.prediction import turns
from patchbayes.prediction.turns import Turns


@pytest.mark.parametrize("places", [1, 3])
def test_at_most_so_many_are_in_the_block(places):
    gate, lock, inside, most = Turns(places), threading.Lock(), 0, 0

    def work(_):
        nonlocal inside, most
        with gate:
            with lock:
                inside += 1
                most = max(most, inside)
            time.sleep(0.002)
            with lock:
                inside -= 1

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(work, range(40)))
    assert (inside, most) == (0, places)
    assert gate._free == places
    assert not gate._waiting


def test_the_longest_waiting_comes_first():
    gate, order = Turns(1), []

    def work(number):
        with gate:
            order.append(number)

    with gate:
        threads = []
        for number in range(5):
            threads.append(threading.Thread(target=work, args=(number,)))
            threads[-1].start()
            while len(gate._waiting) <= number:
                time.sleep(0.001)
    for thread in threads:
        thread.join(10)
    assert order == [0, 1, 2, 3, 4]


def test_an_error_in_the_block_frees_the_place():
    gate = Turns(1)
    with pytest.raises(ZeroDivisionError), gate:
        _ = 1 / 0
    with gate:
        pass


def test_whoever_gives_up_waiting_leaves_the_queue(monkeypatch):
    """Ctrl-C while waiting: the place is not lost, whether it had been handed over already or not."""

    class Interrupted:
        def __init__(self, before=lambda: None):
            self.calls, self.before = 0, before

        def acquire(self):
            self.calls += 1
            if self.calls == 2:
                self.before()
                raise KeyboardInterrupt

        def release(self):
            pass

    for handed_over in (False, True):
        gate = Turns(1)
        gate.__enter__()
        leave = (lambda gate=gate: gate.__exit__(None, None, None)) if handed_over else (lambda: None)
        with monkeypatch.context() as patched:
            patched.setattr(turns.threading, "Lock", lambda leave=leave: Interrupted(leave))
            with pytest.raises(KeyboardInterrupt):
                gate.__enter__()
        assert not gate._waiting
        assert gate._free == int(handed_over)
        if not handed_over:
            gate.__exit__(None, None, None)
        assert gate._free == 1


def test_places_follow_the_cores_and_the_threads_of_torch(monkeypatch):
    monkeypatch.setattr(turns.os, "sched_getaffinity", lambda _: set(range(6)), raising=False)
    for threads, expected in ((1, 6), (2, 3), (4, 1), (8, 1)):
        monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
        assert turns.places() == expected


def test_a_predictor_with_one_place_gives_the_serial_answers_to_eight_threads():
    torch.manual_seed(0)
    layers = torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.ReLU(), torch.nn.Linear(8, 3)
    model = torch.nn.Sequential(*layers)
    pb.patch_(model, pb.ECMP(3, jitter=0.3), "norm+output")
    predictor = pb.Predictor(model, 8)
    predictor._kept.turns = Turns(1)
    inputs = [torch.randn(size, 4) for size in (1, 2, 3, 5) * 10]
    serial = [predictor(x) for x in inputs]
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(predictor, inputs))
    assert all(torch.equal(a, b) for a, b in zip(found, serial, strict=True))
