import horovod.torch as hvd
import torch
from task import Data, make_model
from torch.utils.data import DataLoader, DistributedSampler


def main(epochs=4):
    hvd.init()
    torch.manual_seed(hvd.rank())
    data = Data()
    sampler = DistributedSampler(data, num_replicas=hvd.size(), rank=hvd.rank())
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    optimizer = hvd.DistributedOptimizer(
        optimizer, named_parameters=model.named_parameters(), compression=hvd.Compression.fp16
    )
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        for inputs, targets in DataLoader(data, 16, sampler=sampler):
            optimizer.zero_grad()
            loss = torch.nn.functional.mse_loss(model(inputs), targets)
            loss.backward()
            optimizer.synchronize()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 10.0)
            with optimizer.skip_synchronize():
                optimizer.step()
        mean = hvd.allreduce(loss.detach(), name="loss").item()
        if hvd.rank() == 0:
            print(f"epoch {epoch}: {mean:.4f}")
    return model, mean


if __name__ == "__main__":
    main()
