import faulthandler
import os
from pathlib import Path

import pytest
import torch

os.environ.setdefault("OMP_NUM_THREADS", "1")  # for the processes that tests start: two of them share two cores

_STANDARD_ERROR = pytest.StashKey[int]()
_GRACE = 60.0  # seconds that a test has to end after its time limit


def pytest_configure(config: pytest.Config) -> None:
    config.stash[_STANDARD_ERROR] = os.dup(2)  # before pytest takes it for itself


def pytest_unconfigure(config: pytest.Config) -> None:
    os.close(config.stash[_STANDARD_ERROR])


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item):
    """A test that its time limit cannot end, since it hangs in C code or waits for its threads, ends its process.

    The stacks of all threads are written to standard error, xdist calls the test failed and goes on with the others.
    """
    limit = float(item.config.getini("timeout")) + _GRACE
    faulthandler.dump_traceback_later(limit, exit=True, file=item.config.stash[_STANDARD_ERROR])
    try:
        return (yield)
    finally:
        faulthandler.cancel_dump_traceback_later()


@pytest.fixture(autouse=True)
def _one_thread_and_untouched_random_state():
    """Small networks run fastest on one thread; and no test may lean on, or disturb, the global random state."""
    torch.set_num_threads(1)
    with torch.random.fork_rng():
        torch.manual_seed(1234)
        yield


@pytest.fixture
def generator() -> torch.Generator:
    return torch.Generator().manual_seed(7)


@pytest.fixture(scope="session")
def data_dir() -> Path:
    """Real data sets, where the environment variable PATCHBAYES_DATA points to them."""
    folder = os.environ.get("PATCHBAYES_DATA")
    if not folder or not Path(folder).is_dir():
        pytest.skip("PATCHBAYES_DATA does not name a folder with the data sets")
    return Path(folder)


@pytest.fixture(autouse=True)
def _gradients_stay_on():
    """What a test runs leaves gradients on, as it found them."""
    yield
    left_on = torch.is_grad_enabled() and not torch.is_inference_mode_enabled()
    torch.set_grad_enabled(True)
    assert left_on
