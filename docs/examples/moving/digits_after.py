import torch
from mpi4py import MPI
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset, random_split

import mpicomp.torch


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 32, 3, 1)
        self.conv2 = nn.Conv2d(32, 64, 3, 1)
        self.dropout = nn.Dropout(0.25)
        self.fc1 = nn.Linear(256, 128)
        self.fc2 = nn.Linear(128, 10)

    def forward(self, x):
        x = functional.relu(self.conv1(x))
        x = functional.max_pool2d(functional.relu(self.conv2(x)), 2)
        x = self.dropout(torch.flatten(x, 1))
        return functional.log_softmax(self.fc2(functional.relu(self.fc1(x))), dim=1)


def train(model, loader, optimizer):
    model.train()
    for data, target in loader:
        optimizer.zero_grad()
        functional.nll_loss(model(data), target).backward()
        optimizer.step()


def test(model, loader):
    model.eval()
    with torch.no_grad():
        return sum(model(data).argmax(1).eq(target).sum().item() for data, target in loader) / len(loader.dataset)


def main(epochs=5):
    digits = load_digits()
    images = torch.from_numpy(digits.images).float().unsqueeze(1) / 16
    dataset = TensorDataset(images, torch.from_numpy(digits.target))
    train_set, test_set = random_split(dataset, [1400, 397], torch.Generator().manual_seed(0))
    sampler = DistributedSampler(train_set, MPI.COMM_WORLD.size, MPI.COMM_WORLD.rank)
    train_loader, test_loader = DataLoader(train_set, 16, sampler=sampler), DataLoader(test_set, 397)
    model = Net()
    mpicomp.torch.broadcast_parameters(model)
    optimizer = mpicomp.torch.LocalMuon(model, lr=0.02, adamw_lr=3e-3)
    scheduler = StepLR(optimizer, step_size=1, gamma=0.5)
    for epoch in range(1, epochs + 1):
        sampler.set_epoch(epoch)
        train(model, train_loader, optimizer)
        print(f"Epoch {epoch}: accuracy {test(model, test_loader):.4f}")
        scheduler.step()
    optimizer.synchronize()
    return model, 1 - test(model, test_loader)


if __name__ == "__main__":
    main()
