import os
from pathlib import Path

import pytest
import torch

os.environ.setdefault("OMP_NUM_THREADS", "1")  # for the processes that tests start: two of them share two cores


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
