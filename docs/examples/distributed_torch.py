"""The same script on as many processes as `mpiexec` starts: three lines more."""

import torch

import mpicomp.torch  # 1


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
    mpicomp.torch.broadcast_parameters(model)  # 2
    optimizer = mpicomp.torch.DistributedOptimizer(optimizer, model.named_parameters())  # 3

    for _ in range(steps):
        optimizer.zero_grad()
        loss = loss_of(model(torch.randn(20, 10)), torch.randn(20, 5))
        loss.backward()
        optimizer.step()
    return model


if __name__ == "__main__":
    main()
