"""A small transformer, sharded by PyTorch inside of hosts and replicated by mpicomp between them: five lines more."""

import torch.distributed.fsdp

import mpicomp.torch  # 1


class Block(torch.nn.Module):
    def __init__(self, width=32, heads=4):
        super().__init__()
        self.attention = torch.nn.MultiheadAttention(width, heads, batch_first=True)
        self.feed = torch.nn.Sequential(
            torch.nn.Linear(width, 4 * width), torch.nn.GELU(), torch.nn.Linear(4 * width, width)
        )
        self.norms = torch.nn.ModuleList([torch.nn.LayerNorm(width) for _ in range(2)])

    def forward(self, hidden):
        inputs = self.norms[0](hidden)
        hidden = hidden + self.attention(inputs, inputs, inputs, need_weights=False)[0]
        return hidden + self.feed(self.norms[1](hidden))


class Transformer(torch.nn.Module):
    def __init__(self, tokens=64, width=32, blocks=2):
        super().__init__()
        self.embedding = torch.nn.Embedding(tokens, width)
        self.blocks = torch.nn.ModuleList([Block(width) for _ in range(blocks)])
        self.head = torch.nn.Linear(width, tokens)

    def forward(self, tokens):
        hidden = self.embedding(tokens)
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(hidden.flatten(0, 1))


def main(steps=20, shards=None):
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    model = Transformer().to(device)
    mesh = mpicomp.torch.shard_mesh(shards, device)  # 2
    for layer in (*model.blocks, model):  # 3
        torch.distributed.fsdp.fully_shard(layer, mesh=mesh)  # 4
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    optimizer = mpicomp.torch.DistributedOptimizer(optimizer, model, comm=mpicomp.torch.replicas(model))  # 5

    torch.manual_seed(torch.distributed.get_rank())  # each rank draws batches of its own
    for _ in range(steps):
        tokens = (torch.randint(64, (8, 1), device=device) + torch.arange(17, device=device)) % 64  # to count on
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(tokens[:, :-1]), tokens[:, 1:].flatten())
        loss.backward()
        mpicomp.torch.clip_grad_norm_(optimizer, 1.0)
        optimizer.step()
    return model, loss.item()


if __name__ == "__main__":
    main()
