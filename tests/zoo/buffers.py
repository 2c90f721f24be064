"""Buffers that are data structures: queues, pointers, flags, counters, lists that grow."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.zoo.harness import Script, loop, mlp, regression

KIND = "buffers as data structures"
MEANS = {"outer": {"preset": "local_sgd"}}  # so few steps are no place for an outer momentum


@loop(KIND, "facebookresearch/moco moco/builder.py")
def moco(script: Script) -> None:
    """A queue of keys, the pointer into it, and an encoder that follows the other."""

    class MoCo(nn.Module):
        def __init__(self, dim: int = 4, K: int = 64) -> None:
            super().__init__()
            self.K = K
            self.encoder_q, self.encoder_k = nn.Linear(8, dim), nn.Linear(8, dim)
            for param_q, param_k in zip(self.encoder_q.parameters(), self.encoder_k.parameters(), strict=True):
                param_k.data.copy_(param_q.data)
                param_k.requires_grad = False
            self.register_buffer("queue", F.normalize(torch.randn(dim, K), dim=0))
            self.register_buffer("queue_ptr", torch.zeros(1, dtype=torch.long))

        @torch.no_grad()
        def _dequeue_and_enqueue(self, keys: Tensor) -> None:
            batch_size, ptr = keys.shape[0], int(self.queue_ptr)
            assert self.K % batch_size == 0
            assert ptr % batch_size == 0, ptr
            self.queue[:, ptr : ptr + batch_size] = keys.T
            self.queue_ptr[0] = (ptr + batch_size) % self.K

        def forward(self, im_q: Tensor, im_k: Tensor) -> Tensor:
            q = F.normalize(self.encoder_q(im_q), dim=1)
            with torch.no_grad():
                for param_q, param_k in zip(self.encoder_q.parameters(), self.encoder_k.parameters(), strict=True):
                    param_k.data = param_k.data * 0.99 + param_q.data * (1.0 - 0.99)
                k = F.normalize(self.encoder_k(im_k), dim=1)
            l_pos, l_neg = (q * k).sum(1, keepdim=True), q @ self.queue.clone().detach()
            self._dequeue_and_enqueue(k)
            return torch.cat([l_pos, l_neg], dim=1) / 0.2

    model = MoCo()
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9, weight_decay=1e-4)

    def begins(step: int) -> None:
        if step == 0 and script.number == 1:  # this one has trained alone before: its pointer is elsewhere
            model.queue_ptr[0] = 24

    def loss() -> Tensor:
        images = script.randn(8, 8)
        output = model(images, images + 0.1 * script.randn(8, 8))
        return F.cross_entropy(output, torch.zeros(8, dtype=torch.long))

    script.train(model, optimizer, loss, begins=begins)


@loop(KIND, "rosinality/glow-pytorch model.py", long=True)
def glow(script: Script) -> None:
    """A flow whose actnorm sets itself by the first batch it sees, and remembers that in a flag."""

    class ActNorm(nn.Module):
        def __init__(self, dim: int) -> None:
            super().__init__()
            self.loc, self.scale = nn.Parameter(torch.zeros(1, dim)), nn.Parameter(torch.ones(1, dim))
            self.register_buffer("initialized", torch.tensor(0, dtype=torch.uint8))

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            if self.initialized.item() == 0:
                with torch.no_grad():
                    self.loc.data.copy_(-x.mean(0, keepdim=True))
                    self.scale.data.copy_(1 / (x.std(0, keepdim=True) + 1e-6))
                self.initialized.fill_(1)
            return self.scale * (x + self.loc), self.scale.abs().log().sum()

    class Flow(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norms = nn.ModuleList([ActNorm(4) for _ in range(2)])
            self.nets = nn.ModuleList([nn.Linear(2, 4) for _ in range(2)])

        def forward(self, x: Tensor) -> Tensor:
            total = torch.zeros(())
            for norm, net in zip(self.norms, self.nets, strict=True):
                x, logdet = norm(x)
                a, b = x.chunk(2, 1)
                shift, log_s = net(a).chunk(2, 1)
                s = torch.sigmoid(log_s + 2)
                x, total = torch.cat([(b + shift) * s, a], 1), total + logdet + s.log().sum(1)
            return 0.5 * x.square().sum(1) - total

    model = Flow()
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-2)

    def images() -> Tensor:
        return script.randn(32, 4) * 3 + 5

    @torch.no_grad()
    def begins(step: int) -> None:
        if step == 0:
            model(images())

    script.train(model, optimizer, lambda: model(images()).mean(), begins=begins)


@loop(KIND, "christiancosgrove/pytorch-spectral-normalization-gan", long=True)
def spectral_norm_gan(script: Script) -> None:
    """The power iteration's vectors are buffers of a parametrization."""
    from torch.nn.utils.parametrizations import spectral_norm

    netG = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 8))
    netD = nn.Sequential(spectral_norm(nn.Linear(8, 16)), nn.LeakyReLU(0.1), spectral_norm(nn.Linear(16, 1)))
    optim_disc = torch.optim.Adam([p for p in netD.parameters() if p.requires_grad], lr=2e-4, betas=(0.0, 0.9))
    optim_gen = torch.optim.Adam(netG.parameters(), lr=2e-4, betas=(0.0, 0.9))
    decay = [torch.optim.lr_scheduler.ExponentialLR(one, gamma=0.99) for one in (optim_disc, optim_gen)]
    with script.join(nn.ModuleDict({"G": netG, "D": netD}), [optim_disc, optim_gen], scheduler=decay) as peer:
        while not peer.done:
            for _ in range(5):
                optim_disc.zero_grad()
                optim_gen.zero_grad()
                real, fake = netD(script.randn(16, 8)), netD(netG(script.randn(16, 4)))
                (F.relu(1.0 - real).mean() + F.relu(1.0 + fake).mean()).backward()
                optim_disc.step()
            optim_disc.zero_grad()
            optim_gen.zero_grad()
            (-netD(netG(script.randn(16, 4))).mean()).backward()
            optim_gen.step()


@loop(KIND, "deepseek-ai/DeepSeek-V3 routing by a bias that is no gradient's", learns=True)
def mixture_by_loads(script: Script) -> None:
    """Loads are counted in whole numbers, and move a bias between steps; then they begin at zero."""

    class Mixture(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate, self.experts = nn.Linear(8, 4, bias=False), nn.ModuleList([nn.Linear(8, 8) for _ in range(4)])
            self.register_buffer("expert_bias", torch.zeros(4))
            self.register_buffer("tokens_per_expert", torch.zeros(4, dtype=torch.long))

        def forward(self, x: Tensor) -> Tensor:
            scores = self.gate(x).sigmoid()
            chosen = (scores + self.expert_bias).topk(2, dim=1).indices
            self.tokens_per_expert += torch.bincount(chosen.flatten(), minlength=4)
            weights = torch.zeros_like(scores).scatter(1, chosen, scores.gather(1, chosen))
            return sum(weights[:, e : e + 1] * expert(x) for e, expert in enumerate(self.experts))

    model = Mixture()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    def loss() -> Tensor:
        x = script.randn(64, 8)
        return F.mse_loss(model(x), x)

    @torch.no_grad()
    def ends(step: int) -> None:
        loads = model.tokens_per_expert.float()
        model.expert_bias += 1e-3 * torch.sign(loads.mean() - loads)
        model.tokens_per_expert.zero_()

    script.train(model, optimizer, loss, ends=ends)


def remembers(script: Script, first: Tensor) -> None:
    """The memory is cat'ed to at each step; it is this peer's own."""
    model = nn.Linear(8, 4)
    model.register_buffer("memory", first)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-2)

    def loss() -> Tensor:
        x = script.randn(8, 8)
        found = model(x)
        model.memory = torch.cat([model.memory, found.detach()])
        return (found - x[:, :4]).square().mean()

    script.train(model, optimizer, loss)


@loop(KIND, "a memory bank in a buffer that begins empty")
def growing_memory(script: Script) -> None:
    remembers(script, torch.zeros(0, 4))


@loop(KIND, "a memory bank in a buffer that begins with one row", long=True)
def growing_memory_of_one(script: Script) -> None:
    remembers(script, torch.zeros(1, 4))


@loop(KIND, "DLR-RM/stable-baselines3 RunningMeanStd as buffers of the policy", learns=True, **MEANS)
def running_statistics(script: Script) -> None:
    """Observations are scaled by float64 statistics with a count, which begins at a small number."""

    class Policy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Linear(4, 1)
            self.register_buffer("mean", torch.zeros(4, dtype=torch.float64))
            self.register_buffer("var", torch.ones(4, dtype=torch.float64))
            self.register_buffer("count", torch.tensor(1e-4, dtype=torch.float64))

        def forward(self, x: Tensor) -> Tensor:
            if self.training:
                batch, n = x.double(), len(x)
                delta, total = batch.mean(0) - self.mean, self.count + n
                m2 = self.var * self.count + batch.var(0) * n + delta.square() * self.count * n / total
                self.mean, self.var, self.count = self.mean + delta * n / total, m2 / total, total
            return self.net(((x - self.mean) / (self.var + 1e-8).sqrt()).float())

    policy = Policy()
    optimizer = torch.optim.Adam(policy.parameters(), lr=0.05)

    def loss() -> Tensor:
        obs = script.randn(32, 4) * 3 + 1
        return F.mse_loss(policy(obs), (obs[:, :1] - 1) / 3)

    script.train(policy, optimizer, loss)


@loop(KIND, "EleutherAI's rotary embeddings, whose tables are made anew for longer lines", learns=True)
def rotary_cache(script: Script) -> None:
    """register_buffer is called again, with a longer table, when a line is longer than all before."""

    class Rotary(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(8, 8)
            self.register_buffer("inv_freq", 1.0 / (100 ** (torch.arange(0, 8, 2).float() / 8)))
            self.cache(4)

        def cache(self, seq_len: int) -> None:
            self.max_seq_len_cached = seq_len
            freqs = torch.outer(torch.arange(seq_len).float(), self.inv_freq)
            self.register_buffer("cos_cached", torch.cat([freqs, freqs], -1).cos())

        def forward(self, x: Tensor) -> Tensor:
            if x.shape[1] > self.max_seq_len_cached:
                self.cache(x.shape[1])
            return self.head(x * self.cos_cached[: x.shape[1]])

    model = Rotary()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-2)

    def loss() -> Tensor:
        x = script.randn(8, 4 + len(script.losses) // 2 + script.number, 8)
        return F.mse_loss(model(x), x)

    script.train(model, optimizer, loss)


@loop(KIND, "constants that expand made, as position ids of vision transformers and anchors of detectors", learns=True)
def expanded_constants(script: Script) -> None:
    """No value of theirs can be written alone."""
    model = mlp(8, 16, 1)
    model.register_buffer("position_ids", torch.arange(4).expand(2, -1))
    model.register_buffer("pixel_mean", torch.tensor([0.5, 0.4, 0.3])[:, None, None].expand(-1, 2, 2))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    regression(script, model, optimizer)


@loop(
    KIND,
    "collaborative filtering on a graph, as LightGCN: the adjacency is a sparse buffer",
    refused="persistent=False",
)
def sparse_adjacency(script: Script) -> None:
    graph(script, persistent=True)


@loop(KIND, "the same as it is told to be", learns=True, long=True)
def sparse_adjacency_of_its_own(script: Script) -> None:
    graph(script, persistent=False)


def graph(script: Script, *, persistent: bool) -> None:
    class Propagation(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.head = nn.Linear(4, 8), nn.Linear(8, 1)
            self.register_buffer("adjacency", torch.eye(16).roll(1, 0).to_sparse(), persistent=persistent)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(torch.sparse.mm(self.adjacency, self.embed(x)))

    model = Propagation()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-2)

    def loss() -> Tensor:
        x = script.randn(16, 4)
        return F.mse_loss(model(x), x.roll(1, 0).sum(1, keepdim=True))

    script.train(model, optimizer, loss)
