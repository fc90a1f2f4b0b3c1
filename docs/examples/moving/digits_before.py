import torch
from sklearn.datasets import load_digits
from torch import distributed, nn, optim
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset, random_split


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
    distributed.init_process_group("gloo")
    sampler = DistributedSampler(train_set, distributed.get_world_size(), distributed.get_rank())
    train_loader, test_loader = DataLoader(train_set, 16, sampler=sampler), DataLoader(test_set, 397)
    model = DistributedDataParallel(Net())
    optimizer = optim.AdamW(model.parameters(), lr=3e-3)
    scheduler = StepLR(optimizer, step_size=1, gamma=0.5)
    for epoch in range(1, epochs + 1):
        sampler.set_epoch(epoch)
        train(model, train_loader, optimizer)
        print(f"Epoch {epoch}: accuracy {test(model, test_loader):.4f}")
        scheduler.step()
    distributed.destroy_process_group()
    return model, 1 - test(model, test_loader)


if __name__ == "__main__":
    main()
