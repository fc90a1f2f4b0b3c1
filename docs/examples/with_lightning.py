"""Lightning on as many processes as `mpiexec` starts: each trains by itself, and its optimizer averages gradients."""

import lightning
import torch
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.plugins.environments import LightningEnvironment
from mpi4py import MPI

import mpicomp.torch


class Model(lightning.LightningModule):
    def __init__(self, lr=0.05, width=32):
        super().__init__()
        self.save_hyperparameters()  # the logger writes them down
        self.layers = torch.nn.Sequential(torch.nn.Linear(8, width), torch.nn.ReLU(), torch.nn.Linear(width, 1))

    def training_step(self, batch, index):
        inputs, targets = batch
        loss = torch.nn.functional.mse_loss(self.layers(inputs), targets)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=self.hparams.lr, momentum=0.9)
        return mpicomp.torch.DistributedOptimizer(optimizer, self.named_parameters())

    def configure_gradient_clipping(self, optimizer, gradient_clip_val, gradient_clip_algorithm=None):
        if gradient_clip_val:
            optimizer.synchronize()  # what is clipped is the mean
            self.clip_gradients(optimizer, gradient_clip_val, gradient_clip_algorithm)

    def on_train_batch_end(self, outputs, batch, index):
        optimizer = self.optimizers(use_pl_optimizer=False)
        self.log_dict(optimizer.reducer.last_step.scalars())


def main(folder, epochs=4):
    rank, ranks = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size
    random = torch.Generator().manual_seed(0)
    inputs = torch.randn(512, 8, generator=random)
    dataset = torch.utils.data.TensorDataset(inputs, inputs[:, :1] * inputs[:, 1:2])
    share = torch.utils.data.Subset(dataset, range(rank, len(dataset), ranks))  # of this rank

    model = Model()
    mpicomp.torch.broadcast_parameters(model)
    trainer = lightning.Trainer(
        accelerator="cpu",  # or "gpu", with devices=[mpicomp.local_device()]
        devices=1,
        plugins=[LightningEnvironment()],  # processes are not Lightning's, whatever the launcher has set
        max_epochs=epochs,
        gradient_clip_val=5.0,
        logger=TensorBoardLogger(folder) if rank == 0 else False,
        log_every_n_steps=1,
        enable_checkpointing=False,  # mpicomp.save_checkpoint saves what all ranks have
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(model, torch.utils.data.DataLoader(share, batch_size=16, shuffle=True))
    return float(trainer.callback_metrics["loss"]), model


if __name__ == "__main__":
    print("loss:", main("runs")[0])
