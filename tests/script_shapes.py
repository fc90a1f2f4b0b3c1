"""A training script of the shape that public ones have; what an exchange needs is one call, ``distribute``."""

import hashlib
import shutil
import types
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


def stopped_and_resumed(comm, folder, settings, epochs=3, stop=1):
    """Run the script whole, and stopped and resumed; return both models."""
    models = []
    for last, resume in ((epochs, False), (stop, False), (epochs, True)):
        model, optimizer = images(comm, folder, partial(exchanging, comm, settings), last, resume)
        models.append(model)
        optimizer.close()
    return models[0], models[2]


def bits(model):
    """Return a digest of the bits of a model's parameters."""
    values = [parameter.detach().contiguous().view(-1).view(torch.uint8) for parameter in model.parameters()]
    return hashlib.sha1(torch.cat(values).numpy().tobytes()).hexdigest()
