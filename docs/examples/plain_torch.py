"""A training script as PyTorch's tutorials have it: one process, one model, one optimizer."""

import torch


class ToyModel(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first = torch.nn.Linear(10, 10)
        self.last = torch.nn.Linear(10, 5)

    def forward(self, inputs):
        return self.last(torch.relu(self.first(inputs)))


def main(steps=20):
    model = ToyModel()
    loss_of = torch.nn.MSELoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    for _ in range(steps):
        optimizer.zero_grad()
        loss = loss_of(model(torch.randn(20, 10)), torch.randn(20, 5))
        loss.backward()
        optimizer.step()
    return model


if __name__ == "__main__":
    main()
