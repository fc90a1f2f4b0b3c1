import os

import torch
from task import Data, make_model
from torch.utils.data import DataLoader, DistributedSampler
from torchft import Manager, ProcessGroupGloo
from torchft.local_sgd import DiLoCo


def main(epochs=4):
    rank, size = int(os.environ["REPLICA_GROUP_ID"]), int(os.environ["NUM_REPLICA_GROUPS"])
    data = Data()
    sampler = DistributedSampler(data, num_replicas=size, rank=rank)
    model = make_model()
    inner = torch.optim.AdamW(model.parameters(), lr=0.01)
    outer = torch.optim.SGD(model.parameters(), lr=0.7, momentum=0.9, nesterov=True)
    manager = Manager(
        pg=ProcessGroupGloo(),
        load_state_dict=lambda state: (model.load_state_dict(state["model"]), inner.load_state_dict(state["inner"])),
        state_dict=lambda: {"model": model.state_dict(), "inner": inner.state_dict()},
        min_replica_size=size,
        use_async_quorum=False,
        init_sync=False,
    )
    with DiLoCo(manager, [model], inner, outer, sync_every=8):
        for epoch in range(epochs):
            sampler.set_epoch(epoch)
            for inputs, targets in DataLoader(data, 16, sampler=sampler):
                inner.zero_grad()
                loss = torch.nn.functional.mse_loss(model(inputs), targets)
                loss.backward()
                inner.step()
            if rank == 0:
                print(f"epoch {epoch}: {loss:.4f}")
    manager.shutdown()
    return model, float(loss)


if __name__ == "__main__":
    main()
