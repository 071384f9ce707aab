"""Where newcomers stumbled: wrong arguments and batches are named, and what is printed adds up."""

import pytest
import torch
from torch import nn

import patchbayes as pb
from patchbayes.runs import TrainingConfig, train


def network() -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(4, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 3)).eval()


def examples() -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randn(300, 4, generator=torch.Generator().manual_seed(0))
    return x, (x[:, 0] > 0).long() + (x[:, 1] > 0).long()


X, Y = examples()


@pytest.mark.parametrize(
    ("call", "given"),
    [
        (lambda: pb.predict(X, network()), "got a Tensor"),
        (lambda: pb.save("file", network()), "got a str"),
        (lambda: pb.calibrate_([(X, Y)], network()), "got a list"),
        (lambda: pb.objective.parameter_groups(network().parameters(), lr=1e-3), "got a generator"),
        (lambda: pb.patch_(torch.optim.Adam(network().parameters()), pb.mixed()), "got an Adam"),
    ],
)
def test_what_is_no_network_is_refused(call, given):
    with pytest.raises(pb.PatchbayesError, match=f"torch.nn.Module.*{given}"):
        call()


@pytest.mark.parametrize(
    "call",
    [
        lambda: pb.bayesianize_(network(), [{"image": X, "target": Y}], select=None),
        lambda: pb.predict(network(), {"image": X}),
    ],
)
def test_a_mapping_that_forward_does_not_take(call):
    with pytest.raises(
        pb.PatchbayesError, match=r"(?s)the keys image.*Sequential cannot be called.*select=lambda batch"
    ):
        call()


def test_an_error_inside_of_forward_stays_what_it_is():
    class Broken(nn.Linear):
        def forward(self, input):
            raise TypeError("no such thing")

    with pytest.raises(TypeError, match="no such thing"):
        pb.predict(Broken(4, 3), {"input": X})


def test_parameters_that_are_not_finite_are_named():
    net = network()
    with torch.no_grad():
        net[0].weight[0, 0] = float("nan")
    with pytest.raises(pb.PatchbayesError, match=r'the parameter "0\.weight" holds NaN'):
        pb.bayesianize_(net, [(X, Y)])


@pytest.mark.parametrize(
    ("held_out", "text"),
    [
        ([], "no example"),
        ([(X, Y + 0.5)], "expected class numbers"),
        ([(X * float("nan"), Y)], "NaN, in 1200 of the 1200 values of its inputs"),
        ([{"image": X, "target": Y}], "the keys image"),
    ],
)
def test_warm_up_refuses_wrong_batches_before_the_first_epoch(held_out, text):
    net = network()
    pb.patch_(net, pb.mixed())
    with pytest.raises(pb.PatchbayesError, match=text):
        pb.warm_up_(net, held_out)
    assert pb.warm_up_(net, [(X, Y)]) == 0


def test_a_temperature_alone_adds_nothing_to_the_state_dict(tmp_path):
    net = network()
    report = pb.calibrate_(net, [(X, Y)])
    assert net.state_dict().keys() == network().state_dict().keys()
    pb.save(net, tmp_path / "patch.safetensors")
    again = network()
    pb.load_(again, tmp_path / "patch.safetensors")
    assert pb.predict(again, X).temperature == pytest.approx(report.temperature)


def test_a_prediction_says_which_of_its_numbers_are_before_temperatures():
    net = network()
    assert "before temperatures" not in str(pb.predict(net, X))
    pb.calibrate_(net, [(X, Y)])
    text = str(pb.predict(net, X))
    assert (
        text.index("entropy") < text.index("; before temperatures expected entropy") < text.index("mutual information")
    )


def test_a_run_whose_last_checkpoint_is_gone_is_not_begun_again(tmp_path):
    config = TrainingConfig(data="digits", model="mlp", method="vanilla", epochs=1)
    train(config, tmp_path / "run", quiet=True)
    metrics = (tmp_path / "run" / "metrics.jsonl").read_bytes()
    (tmp_path / "run" / "last.safetensors").unlink()
    with pytest.raises(pb.PatchbayesError, match=r"last\.safetensors is missing"):
        train(config, tmp_path / "run", resume=True, quiet=True)
    assert (tmp_path / "run" / "metrics.jsonl").read_bytes() == metrics


def test_answers_no_better_than_guessing_are_named():
    x = torch.randn(400, 4, generator=torch.Generator().manual_seed(3))
    net = network()
    with torch.no_grad():
        best = net.eval()(x).argmax(-1)
    report = pb.calibrate_(network(), [(x, (best + torch.arange(400) % 3) % 3)])
    assert "no better than guessing" in str(report)
    some_right = torch.where(torch.arange(400) % 5 < 3, best, (best + 1) % 3)
    assert "no better than guessing" not in str(pb.calibrate_(network(), [(x, some_right)]))


def test_a_patch_for_another_architecture_is_refused_by_what_is_missing(tmp_path):
    net = network()
    pb.patch_(net, pb.ECMP(3), "output")
    pb.save(net, tmp_path / "patch.safetensors")
    wider = nn.Sequential(*list(network())[:-1], nn.Identity())
    other = nn.Sequential(nn.Linear(4, 4), *list(network()))
    for wrong in (wider, other):
        with pytest.raises(pb.PatchbayesError) as error:
            pb.load_(wrong, tmp_path / "patch.safetensors")
        assert "the network's own weights" not in str(error.value)


def test_export_says_how_to_write_one_pass(tmp_path):
    net = network()
    pb.patch_(net, pb.ECMP(3), "output")
    with pytest.raises(pb.PatchbayesError, match=r"(?s)export\(draws='mean'\).*unpatch_\(model, keep=\"mean\""):
        pb.export(net, tmp_path / "m.onnx", draws="mean", example_input=X)
    assert not (tmp_path / "m.onnx").exists()
