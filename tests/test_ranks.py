"""Several processes: gradients, bytes, prediction and evaluation are those of one process; what cannot work is refused."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

import patchbayes as pb
from patchbayes.errors import PatchbayesError
from patchbayes.objective import share_gradients_
from patchbayes.patching.network import network_of
from patchbayes.prediction import predict_on_ranks
from patchbayes.ranks import exchanged, part_of, rank_and_number, summed
from two_processes import on_processes


def network(sites="norm+output", method=None):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = nn.Sequential(
            nn.Linear(4, 8), nn.LayerNorm(8), nn.ReLU(), nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 3)
        )
    pb.patch_(model, method or pb.EMP(3, jitter=0.3), sites)
    return model


def batch(rows=11):
    generator = torch.Generator().manual_seed(1)
    return torch.randn(rows, 4, generator=generator), torch.randint(3, (rows,), generator=generator)


def gradients(model, inputs, targets, rows, whole):
    """Of the sum over some rows divided by the size of the whole batch."""
    model.zero_grad()
    loss = nn.functional.cross_entropy(model(inputs[rows]), targets[rows], reduction="sum") / whole
    loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters()}


def gradients_on_ranks(same_draws, share):
    """By DDP, on this process's rows; then shared among components, once."""
    rank, ranks = rank_and_number()
    model = network()
    network_of(model).same_draws = same_draws
    wrapped = nn.parallel.DistributedDataParallel(model)
    inputs, targets = batch(12)
    rows = part_of(12, rank, ranks)
    loss = nn.functional.cross_entropy(
        wrapped(inputs[list(rows)]), targets[list(rows)]
    )  # equal parts: DDP takes the mean
    loss.backward()
    if share:
        share_gradients_(model, share)
    return {name: p.grad.flatten().tolist() for name, p in model.named_parameters()}


def exchanges():
    rank, ranks = rank_and_number()
    mine = torch.full((rank + 1, 2), float(rank))
    return [
        [part.tolist() for part in exchanged(mine)],
        summed(torch.tensor([1.0, rank])).tolist(),
        [list(part_of(7, part, 3)) for part in range(3)],
        ranks,
    ]


def predictions(over, rows, kind):
    method = {"emp": None, "dropout": pb.Dropout(0.3), "ecmp": pb.ECMP(3, jitter=0.3)}[kind]
    model, (inputs, _) = network(method=method), batch(rows)
    found = predict_on_ranks(model, inputs, 10, over=over, keep_draws=True)
    named = ("probs", "mutual_information", "standard_error", "draw_probs", "weights")
    return {name: getattr(found, name).tolist() for name in named} | {"num_draws": found.num_draws}


def several():
    """Everything that the fast tests ask of two processes, in one launch."""
    return {
        "exchanges": exchanges(),
        "own": gradients_on_ranks(False, 0),
        "same": gradients_on_ranks(True, 0),
        "shared": gradients_on_ranks(False, 0.5),
        **{
            f"{over},{rows},{kind}": predictions(over, rows, kind)
            for over, rows, kind in [
                ("auto", 11, "emp"),
                ("draws", 5, "emp"),
                ("auto", 1, "ecmp"),
                ("inputs", 7, "dropout"),
                ("draws", 3, "dropout"),
            ]
        },
    }


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    return on_processes(tmp_path_factory.mktemp("two"), "test_ranks", "several")


def test_what_processes_exchange(found):
    expected = [[[[0.0, 0.0]], [[1.0, 1.0]] * 2], [2.0, 1.0], [[0, 1], [2, 3], [4, 5, 6]], 2]
    assert [one["exchanges"] for one in found] == [expected, expected]


def test_with_the_same_draws_gradients_are_those_of_the_joined_batch(found):
    model, (inputs, targets) = network(), batch(12)
    expected = gradients(model, inputs, targets, slice(None), 12)
    for one in found:
        for name, value in one["same"].items():
            torch.testing.assert_close(torch.tensor(value), expected[name].flatten(), rtol=1e-4, atol=1e-6)


def test_with_own_draws_gradients_are_the_mean_of_both(found):
    expected = {}
    for rank, rows in enumerate((slice(0, 6), slice(6, 12))):
        model, (inputs, targets) = network(), batch(12)
        with pytest.MonkeyPatch.context() as patching:
            patching.setattr("patchbayes.patching.network._rank", lambda rank=rank: rank)
            for name, value in gradients(model, inputs, targets, rows, 12).items():
                expected[name] = expected.get(name, 0) + value
    joined = gradients(network(), *batch(12), slice(None), 12)
    assert any(not torch.allclose(joined[name], value) for name, value in expected.items())  # another draw on rank 1
    for one in found:
        for name, value in one["own"].items():
            torch.testing.assert_close(torch.tensor(value), expected[name].flatten(), rtol=1e-4, atol=1e-6)


def test_gradients_are_shared_once_after_the_processes_have_exchanged_them(found):
    model = network()
    for name, parameter in model.named_parameters():
        parameter.grad = torch.tensor(found[0]["own"][name]).view(parameter.shape)
    share_gradients_(model, 0.5)
    for one in found:
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(
                torch.tensor(one["shared"][name]), parameter.grad.flatten(), rtol=1e-4, atol=1e-6
            )


@pytest.mark.parametrize("case", ["auto,11,emp", "draws,5,emp", "auto,1,ecmp", "inputs,7,dropout", "draws,3,dropout"])
def test_predictions_are_those_of_one_process(found, case):
    """No input is lost or counted twice where numbers do not divide, nor is a draw."""
    over, rows, kind = case.split(",")
    expected = predictions(over, int(rows), kind)
    for one in found:
        assert one[case]["num_draws"] == expected["num_draws"]
        for name, value in expected.items():
            if name != "num_draws":
                torch.testing.assert_close(torch.tensor(one[case][name]), torch.tensor(value), rtol=1e-4, atol=1e-5)


def test_without_other_processes_it_is_predict():
    model, (inputs, _) = network(), batch()
    assert torch.equal(predict_on_ranks(model, inputs, 10).probs, pb.predict(model, inputs, 10).probs)
    with pytest.raises(PatchbayesError, match='expected "auto", "inputs" or "draws"'):
        predict_on_ranks(model, inputs, over="rows")


def bytes_of_step(learned):
    """Bytes that DDP exchanges in a step, for a network of which some parameters rest."""
    model = network("norm")
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(learned == "all" or "patchbayes" in name)
    wrapped = nn.parallel.DistributedDataParallel(model)
    sent = []

    def count(_state, bucket):
        sent.append(bucket.buffer().numel() * bucket.buffer().element_size())
        return (
            dist.all_reduce(bucket.buffer(), async_op=True)
            .get_future()
            .then(lambda f: f.value()[0] / dist.get_world_size())
        )

    wrapped.register_comm_hook(None, count)
    inputs, targets = batch()
    nn.functional.cross_entropy(wrapped(inputs), targets).backward()
    patched = sum(p.numel() for name, p in model.named_parameters() if "patchbayes" in name)
    return [sum(sent), 4 * patched, 4 * sum(p.numel() for p in model.parameters())]


@pytest.mark.slow
def test_patches_alone_exchange_patches_alone(tmp_path):
    for sent, patched, _ in on_processes(tmp_path, "test_ranks", "bytes_of_step", "patches"):
        assert sent == patched
    for sent, _, everything in on_processes(tmp_path, "test_ranks", "bytes_of_step", "all"):
        assert sent == everything


@pytest.mark.slow
def test_fifty_launches_end_cleanly(tmp_path):
    for _ in range(50):
        assert on_processes(tmp_path, "test_ranks", "exchanges")[1][3] == 2


def test_copies_of_a_patched_network_for_threads_are_refused():
    """`nn.DataParallel` makes them in every forward pass; it needs GPUs, the refusal does not."""
    model = network()
    for module in (model, model[1]):
        with pytest.raises(PatchbayesError, match="DataParallel"):
            module._replicate_for_data_parallel()
    plain = nn.Linear(2, 2)
    assert isinstance(plain._replicate_for_data_parallel(), nn.Linear)


def sharded():
    """fully_shard of the whole network: loss, KL and gradients of one process; of single layers, and FSDP1: refused."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

    mesh, (inputs, targets) = init_device_mesh("cpu", (dist.get_world_size(),)), batch()
    plain, whole, single, old = (network() for _ in range(4))
    for model in (plain, whole):
        network_of(model).same_draws = True
    fully_shard(whole, mesh=mesh)
    apart = []
    for model in (plain, whole):
        (nn.functional.cross_entropy(model(inputs), targets) + pb.kl(model) / 100).backward()
    for one, other in zip(plain.parameters(), whole.parameters(), strict=True):
        apart.append(float((one.grad - other.grad.full_tensor()).abs().max()))
    refused = []
    for layer in single:
        if list(layer.parameters()):
            fully_shard(layer, mesh=mesh)
    fully_shard(single, mesh=mesh)
    wrapped = FullyShardedDataParallel(old, device_id=torch.device("cpu"), use_orig_params=True)
    for model, called in ((single, single), (old, wrapped)):
        called(inputs)
        for function in (pb.kl, lambda m: pb.predict(m, inputs, 3)):
            try:
                function(model)
            except PatchbayesError as error:
                refused.append(str(error))
    return [max(apart), refused]


@pytest.mark.slow
def test_a_network_sharded_as_a_whole_works_and_other_sharding_is_refused(tmp_path):
    for apart, refused in on_processes(tmp_path, "test_ranks", "sharded"):
        assert apart < 1e-5
        assert [text.partition(":")[0] for text in refused] == ["kl", "predict"] * 2
        assert all("no component" in " ".join(text.split()) for text in refused)
        assert "FullyShardedDataParallel" in refused[2]
