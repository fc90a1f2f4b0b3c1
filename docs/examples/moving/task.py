"""What all of these scripts train: a small regression on samples that all ranks make alike."""

import torch


class Data(torch.utils.data.TensorDataset):
    def __init__(self, samples=512):
        generator = torch.Generator().manual_seed(0)
        inputs = torch.randn(samples, 10, generator=generator)
        super().__init__(inputs, inputs @ torch.randn(10, 5, generator=generator))


def make_model():
    return torch.nn.Sequential(torch.nn.Linear(10, 32), torch.nn.ReLU(), torch.nn.Linear(32, 5))
