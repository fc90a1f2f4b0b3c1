"""Scripts of the shapes that public ones have are trained, saved, loaded and resumed, on one host."""

import importlib.util
from functools import partial

import pytest

import mpicomp

torch = pytest.importorskip("torch")

from replicas import assert_replicas, distribute, network, square  # noqa: E402
from script_shapes import CLIPPING, SCRIPTS, bits, by_hand, exchanging, stopped_and_resumed  # noqa: E402

SETTINGS = {
    "dense": {"compressor": "dense", "collective": "allreduce"},
    "topk": {"compressor": "topk", "collective": "allgather", "warmup": 0},
}


@pytest.mark.mpi(max_size=3)
@pytest.mark.parametrize("compressor", SETTINGS)
@pytest.mark.parametrize("name", SCRIPTS)
def test_resumed_script_equals_whole_run(comm, tmp_path, name, compressor):
    settings = {"overlap": name not in CLIPPING} | SETTINGS[compressor]
    (whole, _, _), (resumed, _, _) = stopped_and_resumed(SCRIPTS[name], comm, tmp_path, settings)
    assert_replicas(whole, comm)
    assert bits(resumed) == bits(whole)


@pytest.mark.mpi(max_size=3)
@pytest.mark.parametrize("name", SCRIPTS)
def test_script_averages_gradients_as_by_hand(comm, tmp_path, name):
    script = SCRIPTS[name]
    reference, _ = script(comm, tmp_path, partial(by_hand, comm), epochs=2)
    model, optimizer = script(comm, tmp_path, partial(exchanging, comm, SETTINGS["dense"]), epochs=2)
    optimizer.close()
    torch.testing.assert_close(
        dict(model.named_parameters()), dict(reference.named_parameters()), rtol=1e-9, atol=1e-12
    )


@pytest.mark.mpi(max_size=3)
@pytest.mark.skipif(importlib.util.find_spec("lightning") is None, reason="lightning is not installed")
@pytest.mark.filterwarnings("ignore")  # Lightning's
def test_lightning_resumes_from_its_own_checkpoint(comm, tmp_path):
    import lightning
    from lightning.pytorch.plugins.environments import LightningEnvironment

    class Lit(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.layers = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))

        def training_step(self, batch, index):
            return self.layers(batch[0]).square().mean()

        def configure_optimizers(self):
            optimizer = exchanging(comm, SETTINGS["topk"], torch.optim.AdamW(self.parameters(), lr=0.01), self)
            return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)]

    data = torch.utils.data.TensorDataset(torch.randn(20, 8, generator=torch.Generator().manual_seed(comm.rank)))
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}

    def fit(epochs, **more):
        module, settings = Lit(), {"accelerator": "cpu", "devices": 1, "plugins": [LightningEnvironment()]}
        clipping = {"gradient_clip_val": 0.05, "accumulate_grad_batches": 2}
        trainer = lightning.Trainer(max_epochs=epochs, default_root_dir=tmp_path, **settings, **quiet, **clipping)
        trainer.fit(module, torch.utils.data.DataLoader(data, batch_size=4), **more)
        file = tmp_path / "last.ckpt"
        trainer.save_checkpoint(file)
        module.trainer.optimizers[0].close()
        return module, file

    whole, _ = fit(3)
    _, file = fit(1)
    resumed, _ = fit(3, ckpt_path=file)
    assert_replicas(whole, comm)
    assert bits(resumed) == bits(whole)


@pytest.mark.mpi(max_size=3)
@pytest.mark.parametrize("overlap", [True, False])
def test_closure_that_synchronizes_exchanges_once(comm, overlap):
    """Lightning calls the clipping of docs/examples/with_lightning.py inside the optimizer's closure."""
    models = []
    for inside in (True, False):
        model = network()
        optimizer = distribute(model, comm, None, mpicomp.TopK(ratio=0.1), "allgather", overlap=overlap)

        def clipped(step, model=model, optimizer=optimizer):
            optimizer.zero_grad()
            loss = square(model, step, comm.rank)
            loss.backward()
            optimizer.synchronize()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)
            return loss

        for step in range(4):
            if inside:
                optimizer.step(partial(clipped, step))
            else:
                clipped(step)
                optimizer.step()
        assert optimizer.reducer.last_step.step == 3
        models.append(bits(model))
    assert models[0] == models[1]
