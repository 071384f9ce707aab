"""What methods compute under fixed seeds is what version 0.1.0 computed: outputs, gradients, KL and draws."""

import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

GATE = Path(__file__).parent / "gate"
sys.path.insert(0, str(GATE))

from recording import methods, networks, record  # noqa: E402

OLD = load_file(GATE / "version_0_1_0.safetensors")


@pytest.fixture(scope="module")
def new() -> dict[str, torch.Tensor]:
    with torch.random.fork_rng():
        return record()


def test_the_recording_holds_the_same_entries(new):
    assert new.keys() == OLD.keys()
    recorded = {tuple(key.split(".")[:2]) for key in OLD}
    assert {network for network, _ in recorded} == set(networks())
    assert {method for _, method in recorded} == set(methods())
    for kind in ("own", "kl", "given", "probs", "mutual_information", "sampled.indices", "stratified.keys", "grad."):
        assert sum(f".{kind}" in key for key in OLD) >= len(recorded)


@pytest.mark.parametrize("name", sorted(name for name, value in OLD.items() if not value.is_floating_point()))
def test_draws_and_their_keys_are_equal_to_the_bit(name, new):
    assert new[name].dtype == OLD[name].dtype
    assert torch.equal(new[name], OLD[name])


@pytest.mark.parametrize("name", sorted({".".join(key.split(".")[:2]) for key in OLD}))
def test_outputs_gradients_and_kl_are_equal_to_rounding(name, new):
    """Bits depend on the machine. Gradients that cancel (a bias before batch norm) are compared on the scale of all."""
    found = [key for key in OLD if key.startswith(f"{name}.") and OLD[key].is_floating_point()]
    assert found
    for key in found:
        old = OLD[key]
        scale = max(float(OLD[other].abs().max()) for other in found if other.split(".")[2] == key.split(".")[2])
        torch.testing.assert_close(
            new[key], old, rtol=2e-6, atol=2e-6 * scale, msg=lambda text, key=key: f"{key}: {text}"
        )
