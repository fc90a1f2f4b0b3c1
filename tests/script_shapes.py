"""Two training scripts of the shapes that public ones have; what an exchange needs is one call, ``distribute``."""

import hashlib
import shutil
import types
import warnings
from functools import partial
from pathlib import Path

import torch
from torch.nn import functional
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def images(comm, folder, distribute, epochs, resume=False):
    """Train as imagenet of pytorch/examples: epochs, a scheduler, validation, a checkpoint an epoch, the best one."""
    torch.manual_seed(0)
    random = torch.Generator().manual_seed(0)
    inputs, targets = torch.randn(50, 3, 6, 6, generator=random), torch.randint(5, (50,), generator=random)
    data = TensorDataset(inputs.double(), targets)
    convolution = torch.nn.Conv2d(3, 4, 3, bias=False), torch.nn.BatchNorm2d(4), torch.nn.ReLU()
    model = torch.nn.Sequential(*convolution, torch.nn.Flatten(), torch.nn.Linear(64, 5)).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4)
    optimizer = distribute(optimizer, model)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    start, best = 0, torch.tensor(0.0)
    file = Path(folder) / f"checkpoint-{comm.rank}.pth.tar"
    if resume:
        checkpoint = torch.load(file)
        start, best = checkpoint["epoch"], checkpoint["best"]
        model.load_state_dict(checkpoint["state_dict"])
        optimizer.load_state_dict(checkpoint["optimizer"])
        scheduler.load_state_dict(checkpoint["scheduler"])
    sampler = DistributedSampler(data, comm.size, comm.rank)
    loader = DataLoader(data, batch_size=5, sampler=sampler)
    for epoch in range(start, epochs):
        sampler.set_epoch(epoch)
        model.train()
        for batch, labels in loader:
            loss = functional.cross_entropy(model(batch), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        model.eval()
        with torch.no_grad():
            right = sum((model(batch).argmax(1) == labels).sum().item() for batch, labels in loader)
        accuracy = torch.tensor(comm.allreduce(right) / len(data))
        scheduler.step()
        is_best, best = accuracy > best, torch.maximum(accuracy, best)
        states = {"state_dict": model.state_dict(), "optimizer": optimizer.state_dict()}
        torch.save({"epoch": epoch + 1, "best": best, "scheduler": scheduler.state_dict(), **states}, file)
        if is_best:
            shutil.copyfile(file, file.with_name(f"model_best-{comm.rank}.pth.tar"))
    return model, optimizer


class Module(torch.nn.Module):
    """A model that brings its optimizer, as Lightning's do."""

    def __init__(self, distribute):
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1)).double()
        self.distribute = distribute

    def training_step(self, batch):
        inputs, targets = batch
        return functional.mse_loss(self.layers(inputs), targets)

    def configure_optimizers(self):
        optimizer = self.distribute(torch.optim.AdamW(self.parameters(), lr=0.01), self)
        return optimizer, torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)


class ClosureTrainer:
    """Lightning's loop: the optimizer is stepped with a closure that runs model, zero_grad, backward and clipping."""

    def __init__(self, file, epochs, window, clip):
        self.file, self.epochs, self.window, self.clip = file, epochs, window, clip

    def fit(self, module, loader, resume):
        """Train, resume from the file if ``resume``, and write it after each epoch."""
        self.optimizer, scheduler = module.configure_optimizers()
        start = 0
        if resume:
            saved = torch.load(self.file)
            start = saved["epoch"]
            module.load_state_dict(saved["state_dict"])
            self.optimizer.load_state_dict(saved["optimizer_states"][0])
            scheduler.load_state_dict(saved["lr_schedulers"][0])
        for epoch in range(start, self.epochs):
            loader.sampler.set_epoch(epoch)
            for index, batch in enumerate(loader):
                last = (index + 1) % self.window == 0 or index + 1 == len(loader)
                closure = partial(self._closure, module, batch, index % self.window == 0, last)
                if last:
                    self.optimizer.step(closure=closure)
                else:
                    closure()
            scheduler.step()
            states = {"optimizer_states": [self.optimizer.state_dict()], "lr_schedulers": [scheduler.state_dict()]}
            torch.save({"epoch": epoch + 1, "state_dict": module.state_dict(), **states}, self.file)

    def _closure(self, module, batch, first, last):
        loss = module.training_step(batch) / self.window
        if first:
            self.optimizer.zero_grad()
        loss.backward()
        if last:
            torch.nn.utils.clip_grad_norm_(module.parameters(), self.clip)
        return loss


def closures(comm, folder, distribute, epochs, resume=False):
    """Train with a `ClosureTrainer`, which clips and accumulates."""
    torch.manual_seed(0)
    inputs = torch.randn(60, 8, generator=torch.Generator().manual_seed(1)).double()
    data = TensorDataset(inputs, inputs[:, :1] * inputs[:, 1:2])
    loader = DataLoader(data, batch_size=4, sampler=DistributedSampler(data, comm.size, comm.rank))
    module = Module(distribute)
    trainer = ClosureTrainer(Path(folder) / f"last-{comm.rank}.ckpt", epochs, window=2, clip=0.05)
    trainer.fit(module, loader, resume)
    return module, trainer.optimizer


SCRIPTS = {script.__name__: script for script in (images, closures)}
CLIPPING = {"closures"}
"""Scripts that write to gradients between backward and step, which an exchange during backward does not allow."""


def by_hand(comm, optimizer, model):
    """Have an optimizer average gradients when it steps, after its closure, in the slow and obvious way."""
    plain = optimizer.step

    def step(self, closure=None):
        value = None if closure is None else closure()
        rows = comm.allgather([parameter.grad for parameter in model.parameters()])
        for parameter, gradients in zip(model.parameters(), zip(*rows, strict=True), strict=True):
            parameter.grad = sum(gradients) / comm.size
        plain()
        return value

    optimizer.step = types.MethodType(step, optimizer)
    return optimizer


def exchanging(comm, settings, optimizer, model):
    """Have an optimizer average gradients with mpicomp: the three lines."""
    import mpicomp.torch

    mpicomp.torch.broadcast_parameters(model, comm=comm)
    return mpicomp.torch.DistributedOptimizer(optimizer, model.named_parameters(), comm=comm, **settings)


def stopped_and_resumed(script, comm, folder, settings, epochs=3, stop=1):
    """Run a script whole, and stopped and resumed.

    Return for both the model, whether gradients were exchanged during backward in the end, and this rank's warnings.
    """
    runs = []
    for last, resume in ((epochs, False), (stop, False), (epochs, True)):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            model, optimizer = script(comm, folder, partial(exchanging, comm, settings), last, resume)
        runs.append((model, optimizer.overlaps, [str(warning.message) for warning in caught]))
        optimizer.close()
    return runs[0], runs[2]


def bits(model):
    """Return a digest of the bits of a model's parameters."""
    values = [parameter.detach().contiguous().view(-1).view(torch.uint8) for parameter in model.parameters()]
    return hashlib.sha1(torch.cat(values).numpy().tobytes()).hexdigest()
