"""What real scripts do, at several ranks, against the same training in one process."""

import warnings

import numpy as np
import pytest

import mpicomp
from mpicomp.errors import ClosedError, ConfigurationError, DisagreementError, LaunchError, NonFiniteError

torch = pytest.importorskip("torch")

from replicas import Reference, assert_replicas, assert_same, batch  # noqa: E402

torch.set_num_threads(1)

SMALL = 256  # bytes of a bucket, so that there are several


def network(seed=0):
    torch.manual_seed(seed)
    layers = [torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2)]
    return torch.nn.Sequential(*layers)


def sgd(model, **more):
    return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1, momentum=0.9, **more)


def distribute(model, comm, optimizer=None, compressor="dense", collective="allreduce", **settings):
    settings = {"bucket_bytes": SMALL, "overlap": True} | settings
    return mpicomp.torch.DistributedOptimizer(
        optimizer or sgd(model), model.named_parameters(), compressor, collective, comm=comm, **settings
    )


def square(model, step, rank):
    return model(batch(step, rank)).square().mean()


@pytest.mark.mpi
@pytest.mark.parametrize("overlap", [True, False])
def test_it_is_training_on_one_large_batch(comm, overlap):
    model = network()
    reference = Reference(model, sgd, comm.size)
    optimizer = distribute(model, comm, overlap=overlap)
    for step in range(8):
        optimizer.zero_grad()
        square(model, step, comm.rank).backward()
        optimizer.step()
        reference.step(lambda m, r, s=step: square(m, s, r))
    assert len(optimizer.reducer.last_step.buckets) > 2
    assert_same(model, reference)
    assert_replicas(model, comm)
    optimizer.close()


@pytest.mark.mpi
@pytest.mark.parametrize(
    ("compressor", "collective"),
    [(mpicomp.TopK(ratio=0.1), "allgather"), (mpicomp.TopK(ratio=0.1), "oktopk"), ("sidco", "star-topk"),
     ("dense", "ring"), ("randomk", "allreduce"), (mpicomp.DGC(0.1, momentum=0.9), "gtopk")],
    ids=str,
)  # fmt: skip
def test_overlap_changes_no_bit(comm, compressor, collective):
    runs = []
    for overlap in (False, True):
        model = network()
        plain = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer = distribute(model, comm, plain, compressor, collective, overlap=overlap)
        for step in range(6):
            optimizer.zero_grad()
            square(model, step, comm.rank).backward()
            optimizer.step()
        runs.append((model, optimizer.state_dict()["mpicomp"]["residuals"]))
        optimizer.close()
    (one, kept), (two, also) = runs
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), two.parameters(), strict=True))
    assert kept.keys() == also.keys()
    assert all(np.array_equal(kept[name], also[name]) for name in kept)


@pytest.mark.mpi(min_size=2)
def test_buckets_are_under_way_before_backward_ends(comm):
    model = network()
    optimizer = distribute(model, comm)
    gradients = optimizer._mpicomp_gradients
    square(model, 0, comm.rank).backward()
    optimizer.step()
    optimizer.zero_grad()
    seen = []
    # The first layer's gradient comes last.
    model[0].weight.register_post_accumulate_grad_hook(lambda _: seen.append(len(gradients._stream._jobs)))
    square(model, 1, comm.rank).backward()
    assert seen[0] > 2
    optimizer.step()
    optimizer.close()


class Branches(torch.nn.Module):
    """Two branches that are entered in whatever order is asked for, or left out."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.trunk = torch.nn.Linear(6, 6)
        self.branches = torch.nn.ModuleList([torch.nn.Linear(6, 6) for _ in range(4)])

    def forward(self, inputs, order):
        hidden = self.trunk(inputs)
        for place in order:
            hidden = torch.tanh(self.branches[place](hidden))
        return hidden


@pytest.mark.mpi
def test_whatever_order_backward_takes_on_each_rank(comm):
    def loss(model, rank, step):
        return model(batch(step, rank), np.random.default_rng((7, rank, step)).permutation(4)).square().mean()

    model = Branches()
    reference = Reference(model, sgd, comm.size)
    optimizer = distribute(model, comm)
    for step in range(6):
        optimizer.zero_grad()
        loss(model, comm.rank, step).backward()
        optimizer.step()
        reference.step(lambda m, r, s=step: loss(m, r, s))
    assert_same(model, reference)
    optimizer.close()


@pytest.mark.mpi
@pytest.mark.parametrize("overlap", [True, False])
def test_parameters_that_some_or_all_ranks_do_not_use(comm, overlap):
    """With momentum and decay a parameter that nobody used has to stay as it is; one that somebody used does not."""

    def order(rank, step):
        return [place for place in range(4) if (step + place) % 3 and (rank + step * place) % 2]

    def loss(model, rank, step):
        return model(batch(step, rank), order(rank, step)).square().mean()

    def make(model):
        return sgd(model, weight_decay=0.1)

    model = Branches()
    reference = Reference(model, make, comm.size)
    optimizer = distribute(model, comm, make(model), overlap=overlap)
    for step in range(12):
        optimizer.zero_grad()
        loss(model, comm.rank, step).backward()
        optimizer.step()
        reference.step(lambda m, r, s=step: loss(m, r, s))
        used = {name for name, p in reference.model.named_parameters() if p.grad is not None}
        assert {name for name, p in model.named_parameters() if p.grad is not None} == used
    assert_same(model, reference)
    assert_replicas(model, comm)
    assert not optimizer.reducer.last_step.agreed  # what is known to be left out now and then costs no agreement
    optimizer.close()


@pytest.mark.mpi
def test_what_was_kept_back_is_delivered_to_parameters_that_nobody_uses_any_more(comm):
    model = Branches()
    optimizer = distribute(model, comm, torch.optim.SGD(model.parameters(), lr=0.1), mpicomp.TopK(0.3), "allgather")
    model(batch(0, comm.rank), range(4)).square().mean().backward()
    optimizer.step()
    kept = [optimizer.reducer.residual(f"branches.{place}.weight") for place in range(4)]
    assert any(residual.any() for residual in kept)
    delivered = False
    for step in range(8):
        optimizer.zero_grad()
        model(batch(step, comm.rank), []).square().mean().backward()
        optimizer.step()
        delivered |= any(branch.weight.grad is not None for branch in model.branches)
    assert delivered
    assert_replicas(model, comm)
    optimizer.close()


@pytest.mark.mpi
@pytest.mark.parametrize("overlap", [True, False])
def test_accumulation_with_a_short_last_window(comm, overlap):
    model = network()
    reference = Reference(model, sgd, comm.size)
    optimizer = distribute(model, comm, overlap=overlap)
    window, pieces = 3, 8
    for piece in range(pieces):
        last = piece % window == window - 1 or piece == pieces - 1
        if last:
            square(model, piece, comm.rank).backward()
            before = optimizer.reducer.last_step
            optimizer.step()
            assert optimizer.reducer.last_step is not before
            optimizer.zero_grad()
            start = piece - piece % window
            reference.step(lambda m, r, a=start, b=piece: [square(m, s, r) for s in range(a, b + 1)])
        else:
            with optimizer.accumulate():
                square(model, piece, comm.rank).backward()
    # All backward passes inside: nothing was under way when step() comes.
    with optimizer.accumulate():
        square(model, 99, comm.rank).backward()
    optimizer.step()
    reference.step(lambda m, r: square(m, 99, r))
    assert_same(model, reference)
    optimizer.close()


@pytest.mark.mpi
def test_shared_parameters(comm):
    def make():
        model = network()
        model[2].weight = torch.nn.Parameter(torch.randn(8, 8, generator=torch.Generator().manual_seed(1)))
        model.append(torch.nn.Linear(2, 8))
        model.append(torch.nn.Linear(8, 8))
        model[6].weight = model[2].weight
        return model

    model = make()
    reference = Reference(model, sgd, comm.size)
    optimizer = distribute(model, comm)
    for step in range(5):
        optimizer.zero_grad()
        square(model, step, comm.rank).backward()
        optimizer.step()
        reference.step(lambda m, r, s=step: square(m, s, r))
    assert_same(model, reference)
    optimizer.close()


@pytest.mark.mpi
def test_frozen_then_unfrozen_and_a_group_added_later(comm):
    def freeze(model):
        for parameter in model[0].parameters():
            parameter.requires_grad_(False)
        return model

    def make(model):
        return torch.optim.SGD([*model[0].parameters(), *model[2].parameters()], lr=0.1, momentum=0.9)

    model = freeze(network())
    model[4].requires_grad_(False)
    reference = Reference(model, make, comm.size)
    optimizer = distribute(model, comm, make(model))
    for step in range(9):
        for each, own in ((model, optimizer), (reference.model, reference.optimizer)):
            if step == 3:
                each[0].requires_grad_(True)
            if step == 5:
                each[4].requires_grad_(True)
                own.add_param_group({"params": list(each[4].parameters()), "lr": 0.01})
            if step == 7:
                each[2].requires_grad_(False)
        optimizer.zero_grad()
        square(model, step, comm.rank).backward()
        optimizer.step()
        reference.step(lambda m, r, s=step: square(m, s, r))
        assert_same(model, reference)
    with pytest.raises(ConfigurationError, match="a parameter of the new group has no name"):
        optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(2))]})
    assert len(optimizer.param_groups) == 2
    optimizer.close()


@pytest.mark.mpi
def test_clipping_of_the_mean(comm):
    def clip(model):
        return torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)

    model = network()
    reference = Reference(model, sgd, comm.size)
    optimizer = distribute(model, comm)
    for step in range(5):
        optimizer.zero_grad()
        square(model, step, comm.rank).backward()
        optimizer.synchronize()
        norm = clip(model)
        assert norm > 0.05
        optimizer.step()
        reference.step(lambda m, r, s=step: square(m, s, r), clip)
    assert_same(model, reference)
    optimizer.close()


@pytest.mark.mpi
@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("unscale", [True, False])
def test_a_gradient_scaler_and_an_overflow_on_one_rank(comm, overlap, unscale):
    model = network()
    reference = Reference(model, sgd, comm.size)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=4)
    optimizer = distribute(model, comm, scaler=scaler, overlap=overlap)
    bad = comm.size - 1
    for step in range(10):
        optimizer.zero_grad()
        loss = square(model, step, comm.rank)
        if step == 5 and comm.rank == bad:
            loss = loss * torch.inf
        scaler.scale(loss).backward()
        if unscale:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        if step != 5:
            reference.step(lambda m, r, s=step: square(m, s, r))
        assert_same(model, reference)
    scales = comm.allgather(scaler.get_scale())
    assert scales == [2048.0] * comm.size  # doubled after four steps, halved by the overflow, doubled again
    optimizer.close()


@pytest.mark.mpi
def test_residuals_are_in_units_of_the_unscaled_gradient(comm):
    """Whatever the scaler does to the scale, the run is the one without a scaler."""
    runs = []
    for scaled in (False, True):
        model = network()
        scaler = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=2, enabled=scaled)
        plain = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer = distribute(
            model, comm, plain, mpicomp.TopK(ratio=0.1), "allgather", scaler=scaler if scaled else None
        )
        for step in range(8):
            optimizer.zero_grad()
            scaler.scale(square(model, step, comm.rank)).backward()
            scaler.step(optimizer)
            scaler.update()
        runs.append(model)
        optimizer.close()
    for one, two in zip(*(model.parameters() for model in runs), strict=True):
        torch.testing.assert_close(one, two, rtol=1e-6, atol=1e-7)


@pytest.mark.mpi
def test_parameters_of_sixteen_bits(comm):
    model = network().to(torch.bfloat16)

    def loss(m, step, rank):
        return m(batch(step, rank).to(torch.bfloat16)).float().square().mean()

    reference = Reference(model, sgd, comm.size)
    optimizer = distribute(model, comm)
    for step in range(4):
        optimizer.zero_grad()
        loss(model, step, comm.rank).backward()
        assert model[0].weight.grad.dtype == torch.bfloat16
        optimizer.step()
        reference.step(lambda m, r, s=step: loss(m, s, r))
    assert_same(model, reference, rtol=0.05, atol=0.01)
    assert_replicas(model, comm)
    optimizer.close()


class Words(torch.nn.Module):
    def __init__(self, sparse):
        super().__init__()
        torch.manual_seed(5)
        self.words = torch.nn.Embedding(50, 3, sparse=sparse)
        self.head = torch.nn.Linear(3, 1)

    def forward(self, tokens):
        return self.head(self.words(tokens).mean(1))


@pytest.mark.mpi
def test_sparse_gradients_go_row_by_row(comm):
    def loss(model, step, rank):
        rng = np.random.default_rng((step, rank))
        if step == 3 and rank == 0:
            return model.head(torch.ones(1, 3)).square().sum()  # this rank touches no word
        return model(torch.from_numpy(rng.integers(0, 50, (4, 5)))).square().sum()

    def make(model):
        return torch.optim.SGD(model.parameters(), lr=0.1)

    model, dense = Words(sparse=True), Words(sparse=False)
    reference = Reference(dense, make, comm.size)
    optimizer = distribute(model, comm, make(model), mpicomp.TopK(ratio=1.0), "allgather")
    for step in range(6):
        optimizer.zero_grad()
        loss(model, step, comm.rank).backward()
        optimizer.step()
        reference.step(lambda m, r, s=step: loss(m, s, r))
        gradient = model.words.weight.grad
        if comm.size == 1 and step == 3:
            assert gradient is None
            continue
        assert gradient.is_sparse
        touched = reference.model.words.weight.grad.abs().sum(1).nonzero()[:, 0]
        assert set(touched.tolist()) <= set(gradient.indices()[0].tolist())
        assert gradient.is_coalesced()
    assert_same(model, reference)
    assert_replicas(model, comm)
    optimizer.close()


@pytest.mark.mpi
def test_gradients_that_are_not_contiguous(comm):
    def make_model():
        torch.manual_seed(2)
        model = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.Flatten(), torch.nn.Linear(64, 2))
        return model.to(memory_format=torch.channels_last)

    def loss(model, step, rank):
        images = torch.from_numpy(np.random.default_rng((step, rank)).normal(size=(2, 3, 6, 6)).astype(np.float32))
        return model(images.to(memory_format=torch.channels_last)).square().mean()

    model = make_model()
    reference = Reference(model, sgd, comm.size)
    optimizer = distribute(model, comm)
    for step in range(4):
        optimizer.zero_grad()
        loss(model, step, comm.rank).backward()
        assert not model[0].weight.grad.is_contiguous()
        optimizer.step()
        reference.step(lambda m, r, s=step: loss(m, s, r))
    assert_same(model, reference)
    optimizer.close()


@pytest.mark.mpi
@pytest.mark.parametrize("set_to_none", [True, False])
def test_zero_grad(comm, set_to_none):
    model = network()
    reference = Reference(model, sgd, comm.size)
    optimizer = distribute(model, comm)
    for step in range(4):
        square(model, step, comm.rank).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=set_to_none)
        assert all((p.grad is None) == set_to_none for p in model.parameters())
        reference.step(lambda m, r, s=step: square(m, s, r))
    assert_same(model, reference)
    optimizer.close()


@pytest.mark.mpi
@pytest.mark.parametrize("overlap", [True, False])
def test_a_mean_that_was_not_used(comm, overlap):
    """Whoever averages and then does not step has not averaged what backward brings next."""
    model = network()
    reference = Reference(model, sgd, comm.size)
    optimizer = distribute(model, comm, overlap=overlap)
    square(model, 0, comm.rank).backward()
    optimizer.synchronize()
    model.zero_grad()
    square(model, 1, comm.rank).backward()
    optimizer.step()
    reference.step(lambda m, r: square(m, 1, r))
    assert_same(model, reference)
    optimizer.close()


@pytest.mark.mpi
def test_several_models_and_optimizers_in_one_script(comm):
    """As a GAN has them: each backward goes through both, one optimizer steps."""

    def adam(model):
        return torch.optim.Adam(model.parameters(), lr=0.01)

    one, two = network(1), torch.nn.Linear(2, 1)
    torch.nn.init.constant_(two.weight, 0.3)
    torch.nn.init.zeros_(two.bias)
    references = [Reference(one, sgd, comm.size), Reference(two, adam, comm.size)]
    optimizers = [distribute(one, comm), distribute(two, comm, adam(two))]

    def first(model, other, step, rank):
        return other(model(batch(step, rank))).square().mean()

    for step in range(5):
        for optimizer in optimizers:
            optimizer.zero_grad()
        two.requires_grad_(False)
        first(one, two, step, comm.rank).backward()
        optimizers[0].step()
        two.requires_grad_(True)
        references[0].step(lambda m, r, s=step: first(m, references[1].model, s, r))
        with torch.no_grad():
            hidden = one(batch(step, comm.rank))
        (two(hidden) - 1).square().mean().backward()
        optimizers[1].step()
        references[1].step(lambda m, r, s=step: (m(references[0].model(batch(s, r)).detach()) - 1).square().mean())
    assert_same(one, references[0])
    assert_same(two, references[1])
    for optimizer in optimizers:
        optimizer.close()


@pytest.mark.mpi
def test_a_compiled_model(comm):
    model = network()
    reference = Reference(model, sgd, comm.size)
    compiled = torch.compile(model, backend="aot_eager")
    optimizer = distribute(model, comm)
    for step in range(4):
        optimizer.zero_grad()
        square(compiled, step, comm.rank).backward()
        optimizer.step()
        reference.step(lambda m, r, s=step: square(m, s, r))
    assert_same(model, reference)
    optimizer.close()


@pytest.mark.mpi
def test_learning_rates_change_with_a_residual_in_hand(comm):
    """Residuals are of gradients: a rate applies to what is delivered, whenever it was held back."""
    model = torch.nn.Linear(6, 1, bias=False)
    torch.nn.init.constant_(model.weight, 0.5)
    optimizer = distribute(
        model, comm, torch.optim.SGD(model.parameters(), lr=1.0), mpicomp.TopK(ratio=0.34), "allgather"
    )
    weight, residuals = np.full(6, 0.5), np.zeros((comm.size, 6))
    for step in range(12):
        lr = 0.1 / (1 + step % 4)
        optimizer.param_groups[0]["lr"] = lr
        optimizer.zero_grad()
        model(batch(step, comm.rank)).sum().backward()
        optimizer.step()
        mean = np.zeros(6)
        for rank in range(comm.size):
            residuals[rank] += batch(step, rank).sum(0).numpy()
            top = np.argsort(-np.abs(residuals[rank]))[:2]
            mean[top] += residuals[rank][top] / comm.size
            residuals[rank][top] = 0
        weight -= lr * mean
    np.testing.assert_allclose(model.weight.detach().numpy()[0], weight, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(optimizer.reducer.residual("weight")[0], residuals[comm.rank], rtol=1e-4, atol=1e-5)
    optimizer.close()


@pytest.mark.mpi
def test_a_run_that_is_resumed_is_the_same_run_bit_for_bit(comm):
    def run(model, optimizer, steps):
        for step in steps:
            optimizer.zero_grad()
            square(model, step, comm.rank).backward()
            optimizer.step()

    def make():
        model = network()
        adam = torch.optim.Adam(model.parameters(), lr=0.01)
        return model, distribute(model, comm, adam, mpicomp.SIDCo(ratio=0.1), "allgather")

    whole, optimizer = make()
    run(whole, optimizer, range(8))
    optimizer.close()
    first, optimizer = make()
    run(first, optimizer, range(4))
    model_state, state = first.state_dict(), optimizer.state_dict()
    optimizer.close()
    second, optimizer = make()
    second.load_state_dict(model_state)
    optimizer.load_state_dict(state)
    assert optimizer.reducer.state_dict()["step"] == 4
    run(second, optimizer, range(4, 8))
    assert all(torch.equal(a, b) for a, b in zip(whole.parameters(), second.parameters(), strict=True))
    optimizer.close()


def test_the_state_of_another_model():
    from mpicomp.transport import LocalWorld

    ends = [LocalWorld(1).transports[0] for _ in range(2)]
    model, other = network(), torch.nn.Sequential(torch.nn.Linear(6, 9))
    optimizer = distribute(model, ends[0], compressor="topk", collective="allgather")
    square(model, 0, 0).backward()
    optimizer.step()
    before = optimizer.state_dict()
    strange = distribute(other, ends[1], compressor="topk", collective="allgather")
    square(other, 0, 0).backward()
    strange.step()
    with pytest.raises(
        ConfigurationError, match=r"of another model: .*\(9,\) for '0.bias', and this model has shape \(8,\)"
    ):
        optimizer.load_state_dict(strange.state_dict())
    after = optimizer.state_dict()
    assert all(np.array_equal(before["mpicomp"]["residuals"][n], r) for n, r in after["mpicomp"]["residuals"].items())
    optimizer.load_state_dict({key: value for key, value in before.items() if key != "mpicomp"})


@pytest.mark.mpi(min_size=2)
def test_parameters_that_differ_at_the_start(comm):
    model = network()
    if comm.rank == comm.size - 1:
        with torch.no_grad():
            model[2].bias[3] += 1
    optimizer = distribute(model, comm)
    square(model, 0, comm.rank).backward()
    with pytest.raises(DisagreementError, match=rf"'2.bias' has other values on rank {comm.size - 1} than on rank 0"):
        optimizer.step()
    optimizer.close()


@pytest.mark.mpi(min_size=2)
def test_a_second_backward_before_the_step(comm):
    model = network()
    optimizer = distribute(model, comm)
    square(model, 0, comm.rank).backward()
    with pytest.raises(
        ConfigurationError, match=r"backward has come to '4.\w+' twice .* `with optimizer.accumulate\(\)"
    ):
        square(model, 1, comm.rank).backward()
    optimizer.close()


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("steps", [0, 1])
def test_gradients_that_are_changed_while_they_are_exchanged(comm, steps):
    model = network()
    optimizer = distribute(model, comm)
    for step in range(steps):
        square(model, step, comm.rank).backward()
        optimizer.step()
        optimizer.zero_grad()
    square(model, 9, comm.rank).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
    with pytest.raises(
        ConfigurationError, match=r"was changed between backward\(\) and step\(\), .*synchronize\(\) first"
    ):
        optimizer.step()
    optimizer.close()


@pytest.mark.mpi(min_size=2)
def test_zero_grad_while_gradients_are_exchanged(comm):
    model = network()
    optimizer = distribute(model, comm)
    square(model, 0, comm.rank).backward()
    with pytest.raises(ConfigurationError, match=r"zero_grad\(\) came between backward\(\) and step"):
        optimizer.zero_grad()
    optimizer.step()
    optimizer.close()


@pytest.mark.mpi
def test_after_close(comm):
    model = network()
    optimizer = distribute(model, comm)
    square(model, 0, comm.rank).backward()
    optimizer.step()
    optimizer.close()
    optimizer.close()
    square(model, 0, comm.rank).backward()
    with pytest.raises(ClosedError, match="it was closed"):
        optimizer.step()


@pytest.mark.mpi
@pytest.mark.parametrize("sparse", [True, False])
def test_what_is_not_finite_on_one_rank_ends_the_step_on_all(comm, sparse):
    """Of the sparse model the embedding's gradient alone is not finite, which no bucket holds."""

    def loss(model, spoil):
        hidden = model.words(torch.arange(10).reshape(2, 5))
        if spoil:
            hidden.register_hook(lambda gradient: gradient * torch.nan)
        return model.head(hidden.mean(1)).sum()

    model = Words(sparse)
    optimizer = distribute(
        model, comm, torch.optim.SGD(model.parameters(), lr=0.1), mpicomp.TopK(ratio=0.2), "allgather"
    )
    loss(model, spoil=False).backward()
    optimizer.step()
    kept = optimizer.state_dict()["mpicomp"]["residuals"]
    for _ in range(2):
        model.zero_grad()
        loss(model, spoil=comm.rank == comm.size - 1).backward()
        with pytest.raises(NonFiniteError, match="gradients must be finite"):
            optimizer.step()
        after = optimizer.state_dict()["mpicomp"]["residuals"]
        assert all(np.array_equal(kept[name], after[name]) for name in kept)
    model.zero_grad()
    loss(model, spoil=False).backward()
    optimizer.step()
    optimizer.close()


@pytest.mark.mpi
def test_a_step_that_is_skipped_delivers_rows_of_zeros(comm):
    model = Words(sparse=True)
    optimizer = distribute(model, comm, torch.optim.SGD(model.parameters(), lr=0.1), nonfinite="skip")
    hidden = model.words(torch.arange(10).reshape(2, 5))
    if comm.rank == comm.size - 1:
        hidden.register_hook(lambda gradient: gradient * torch.nan)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    model.head(hidden.mean(1)).sum().backward()
    optimizer.step()
    assert optimizer.reducer.last_step.skipped
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    optimizer.close()


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize(
    ("layout", "cores", "wanted", "expected"),
    [
        ("one host", 1.0, None, False),
        ("one host", 1.0, True, True),
        ("one host", 2.0, None, True),
        ("one host", 2.0, False, False),
        ("two hosts", 1.0, None, True),
    ],
)
def test_a_thread_is_worth_it_where_something_is_waited_for_or_a_core_is_free(comm, layout, cores, wanted, expected):
    """On one host rank 1 alone is short of cores: its threads are two more than the others'."""
    from mpicomp.transport.mpi import MPITransport

    hosts = [0] * comm.size if layout == "one host" else [rank % 2 for rank in range(comm.size)]
    transport = MPITransport(comm, layout=hosts)
    threads = torch.get_num_threads()
    transport.cores = cores + 2
    torch.set_num_threads(3 if comm.rank == 1 else 1)
    try:
        model = network()
        optimizer = distribute(model, transport, overlap=wanted)
        assert optimizer.overlaps == expected
        square(model, 0, comm.rank).backward()
        optimizer.step()
        assert_replicas(model, comm)
        optimizer.close()
    finally:
        torch.set_num_threads(threads)
        transport.close()


@pytest.mark.mpi(min_size=2)
def test_a_thread_level_that_is_too_low_on_some_rank(comm, monkeypatch):
    from mpicomp.transport.mpi import MPITransport

    def check(self, alone):
        if self.group.rank == 1:
            raise LaunchError("mpi: this MPI provides MPI_THREAD_FUNNELED")

    monkeypatch.setattr(MPITransport, "check_threads", check)
    model = network()
    reference = Reference(model, sgd, comm.size)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        optimizer = distribute(model, comm)
    assert len(caught) == (comm.rank == 0)
    assert not optimizer.overlaps
    for step in range(3):
        optimizer.zero_grad()
        square(model, step, comm.rank).backward()
        optimizer.step()
        reference.step(lambda m, r, s=step: square(m, s, r))
    assert_same(model, reference)
    optimizer.close()
