"""Hugging Face's Trainer on as many processes as `mpiexec` starts: each is a single one to it."""

import torch
import transformers
from mpi4py import MPI

import mpicomp.torch


class Model(torch.nn.Module):
    def __init__(self, width=32):
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(8, width), torch.nn.ReLU(), torch.nn.Linear(width, 1))

    def forward(self, inputs, labels):
        outputs = self.layers(inputs)
        return {"loss": torch.nn.functional.mse_loss(outputs, labels), "outputs": outputs}


class Trainer(transformers.Trainer):
    """A Trainer whose optimizer averages gradients over ranks."""

    def create_optimizer(self, model=None):
        super().create_optimizer(model)
        if not hasattr(self.optimizer, "reducer"):
            self.exchanging = mpicomp.torch.DistributedOptimizer(self.optimizer, self.model.named_parameters())
        return self.optimizer

    def log(self, logs, *args, **kwargs):
        scalars = self.exchanging.reducer.last_step.scalars() if "loss" in logs else {}  # else it is the summary
        super().log(logs | scalars, *args, **kwargs)


class Clipping(transformers.TrainerCallback):
    """Clips the mean; the Trainer's own max_grad_norm would clip each rank's gradients before they are averaged."""

    def on_pre_optimizer_step(self, args, state, control, model, optimizer, **kwargs):
        optimizer.optimizer.synchronize()  # accelerate's wrapper holds ours
        torch.nn.utils.clip_grad_norm_(model.parameters(), 5.0)


def main(folder, epochs=4):
    rank, ranks = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size
    random = torch.Generator().manual_seed(0)
    inputs = torch.randn(512, 8, generator=random)
    rows = [{"inputs": row, "labels": row[:1] * row[1:2]} for row in inputs]

    model = Model()
    mpicomp.torch.broadcast_parameters(model)
    # Not with use_cpu=True: under a launcher of MPI that starts torch.distributed.
    arguments = transformers.TrainingArguments(
        output_dir=folder,
        per_device_train_batch_size=16,
        num_train_epochs=epochs,
        learning_rate=0.3,
        optim="sgd",
        max_grad_norm=0,  # see Clipping
        logging_steps=1,
        report_to=["tensorboard"] if rank == 0 else [],  # which writes all of these arguments down, too
        save_strategy="no",  # mpicomp.save_checkpoint saves what all ranks have
        disable_tqdm=True,
    )
    trainer = Trainer(model, arguments, train_dataset=rows[rank::ranks], callbacks=[Clipping()])
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return losses[-1], model


if __name__ == "__main__":
    print("loss:", main("runs")[0])
