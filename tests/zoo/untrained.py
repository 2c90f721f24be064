"""State that no gradient trains: teachers, target networks, averages of weights, codebooks."""

from __future__ import annotations

import copy
import random

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.zoo.harness import Script, loop, mlp

KIND = "state that no gradient trains"


@loop(KIND, "lucidrains/byol-pytorch", learns=True)
def byol(script: Script) -> None:
    """The target is made of the online encoder, lies in the learner, and its parameters are in the optimizer, too."""

    class BYOL(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.online_encoder, self.online_predictor = mlp(8, 16, 8), mlp(8, 16, 8)
            self.target_encoder = copy.deepcopy(self.online_encoder)
            for p in self.target_encoder.parameters():
                p.requires_grad = False

        def update_moving_average(self, beta: float = 0.9) -> None:
            for now, ma in zip(self.online_encoder.parameters(), self.target_encoder.parameters(), strict=True):
                ma.data = ma.data * beta + (1 - beta) * now.data

        def forward(self, one: Tensor, two: Tensor) -> Tensor:
            with torch.no_grad():
                targets = self.target_encoder(one).detach(), self.target_encoder(two).detach()
            found = [self.online_predictor(self.online_encoder(x)) for x in (two, one)]
            return sum(2 - 2 * F.cosine_similarity(f, t).mean() for f, t in zip(found, targets, strict=True))

    learner = BYOL()
    opt = torch.optim.Adam(learner.parameters(), lr=3e-3)

    def loss() -> Tensor:
        images = script.randn(16, 8)
        return learner(images + 0.1 * script.randn(16, 8), images + 0.1 * script.randn(16, 8))

    script.train(learner, opt, loss, ends=lambda step: learner.update_moving_average())


class Replay:
    def __init__(self) -> None:
        self.rows: list[tuple[Tensor, Tensor, Tensor, Tensor]] = []

    def put(self, script: Script, count: int) -> None:
        obs, action = script.randn(count, 4), script.randint(2, count)
        reward = (action == (obs[:, 0] > 0)).float()
        self.rows += zip(obs, action, reward, obs + 0.1, strict=True)

    def sample(self, count: int) -> list[Tensor]:
        return [torch.stack(column) for column in zip(*random.sample(self.rows, count), strict=True)]


@loop(KIND, "vwxyzjn/cleanrl dqn.py", learns=True, long=True)
def dqn(script: Script) -> None:
    """The target network lies beside what is joined; it is loaded every few steps; not every step trains."""
    q_network, target_network = mlp(4, 16, 2), mlp(4, 16, 2)
    optimizer = torch.optim.Adam(q_network.parameters(), lr=1e-2)
    target_network.load_state_dict(q_network.state_dict())
    rb = Replay()
    with script.join(q_network, optimizer) as peer:
        for global_step in range(10_000):
            if peer.done:
                break
            rb.put(script, 1)
            if global_step <= 20:
                continue
            if global_step % 2 == 0:
                obs, action, reward, after = rb.sample(16)
                with torch.no_grad():
                    td_target = reward + 0.5 * target_network(after).max(dim=1)[0]
                loss = F.mse_loss(td_target, q_network(obs).gather(1, action[:, None]).squeeze())
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                script.losses.append(loss.item())
            if global_step % 6 == 0:
                for target_param, param in zip(target_network.parameters(), q_network.parameters(), strict=True):
                    target_param.data.copy_(param.data)


@loop(KIND, "vwxyzjn/cleanrl dqn.py with the target inside")
def dqn_with_target(script: Script) -> None:
    """A target whose parameters still want gradients, and which is in no optimizer."""
    agent = nn.ModuleDict({"q": mlp(4, 16, 2), "target": mlp(4, 16, 2)})
    agent["target"].load_state_dict(agent["q"].state_dict())
    optimizer = torch.optim.Adam(agent["q"].parameters(), lr=1e-2)

    def loss() -> Tensor:
        x = script.randn(16, 4)
        return F.mse_loss(agent["q"](x), 0.9 * agent["target"](x).detach() + 1)

    script.train(agent, optimizer, loss)


def denoising(script: Script, model: nn.Module) -> Tensor:
    t, noise = script.rand(32, 1), script.randn(32, 4)
    x = (1 - t).sqrt() * (script.randn(32, 4) * 0.1 + 1) + t.sqrt() * noise
    return F.mse_loss(model(torch.cat([x, t], 1)), noise)


@loop(KIND, "CompVis/latent-diffusion LitEma", learns=True)
def ddpm_with_litema(script: Script) -> None:
    """Averages are buffers with a counter of whole numbers; swapped in for evaluation, and out again."""

    class LitEma(nn.Module):
        def __init__(self, model: nn.Module, decay: float = 0.99) -> None:
            super().__init__()
            self.names = {name: name.replace(".", "") for name, p in model.named_parameters()}
            self.register_buffer("decay", torch.tensor(decay, dtype=torch.float32))
            self.register_buffer("num_updates", torch.tensor(0, dtype=torch.int))
            for name, p in model.named_parameters():
                self.register_buffer(self.names[name], p.clone().detach().data)

        def forward(self, model: nn.Module) -> None:
            self.num_updates += 1
            decay = min(self.decay, (1 + self.num_updates) / (10 + self.num_updates))
            with torch.no_grad():
                shadow = dict(self.named_buffers())
                for name, p in model.named_parameters():
                    shadow[self.names[name]].sub_((1.0 - decay) * (shadow[self.names[name]] - p))

        def store(self, parameters: list[Tensor]) -> None:
            self.collected = [p.clone() for p in parameters]

        def copy_to(self, model: nn.Module) -> None:
            shadow = dict(self.named_buffers())
            for name, p in model.named_parameters():
                p.data.copy_(shadow[self.names[name]].data)

        def restore(self, parameters: list[Tensor]) -> None:
            for c, p in zip(self.collected, parameters, strict=True):
                p.data.copy_(c.data)

    module = nn.Module()
    module.model = mlp(5, 32, 4)
    module.model_ema = LitEma(module.model)
    opt = torch.optim.AdamW(module.model.parameters(), lr=1e-2)

    def average(step: int) -> None:
        module.model_ema(module.model)
        if step % 3 == 2:
            module.model_ema.store(list(module.model.parameters()))
            module.model_ema.copy_to(module.model)
            with torch.no_grad():
                denoising(script, module.model)
            module.model_ema.restore(list(module.model.parameters()))

    script.train(module, opt, lambda: denoising(script, module.model), ends=average)


@loop(KIND, "openai/guided-diffusion train_util.py, the average inside the model", learns=True, long=True)
def ddpm_with_ema_inside(script: Script) -> None:
    class Diffusion(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = mlp(5, 32, 4)
            self.ema = copy.deepcopy(self.net).requires_grad_(False)

    model = Diffusion()
    opt = torch.optim.AdamW(model.net.parameters(), lr=1e-2, weight_decay=0.0)

    def average(step: int) -> None:
        for targ, src in zip(model.ema.parameters(), model.net.parameters(), strict=True):
            targ.detach().mul_(0.9).add_(src, alpha=0.1)

    script.train(model, opt, lambda: denoising(script, model.net), ends=average)


@loop(KIND, "rosinality/vq-vae-2-pytorch vqvae.py", learns=True, long=True)
def vqvae(script: Script) -> None:
    """A codebook that no gradient trains: buffers, moved inside the forward pass."""

    class Quantize(nn.Module):
        def __init__(self, dim: int, n_embed: int) -> None:
            super().__init__()
            embed = torch.randn(dim, n_embed)
            self.register_buffer("embed", embed)
            self.register_buffer("cluster_size", torch.zeros(n_embed))
            self.register_buffer("embed_avg", embed.clone())

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            dist = x.pow(2).sum(1, keepdim=True) - 2 * x @ self.embed + self.embed.pow(2).sum(0, keepdim=True)
            ind = dist.argmin(1)
            onehot = F.one_hot(ind, self.embed.shape[1]).type(x.dtype)
            quantize = F.embedding(ind, self.embed.transpose(0, 1))
            if self.training:
                self.cluster_size.data.mul_(0.9).add_(onehot.sum(0), alpha=0.1)
                self.embed_avg.data.mul_(0.9).add_(x.detach().transpose(0, 1) @ onehot, alpha=0.1)
                n = self.cluster_size.sum()
                size = (self.cluster_size + 1e-5) / (n + self.embed.shape[1] * 1e-5) * n
                self.embed.data.copy_(self.embed_avg / size.unsqueeze(0))
            diff = (quantize.detach() - x).pow(2).mean()
            return x + (quantize - x).detach(), diff

    model = nn.ModuleDict({"enc": nn.Linear(8, 4), "quantize": Quantize(4, 8), "dec": nn.Linear(4, 8)})
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)

    def loss() -> Tensor:
        img = script.randn(32, 2) @ torch.ones(2, 8)
        quant, latent_loss = model["quantize"](model["enc"](img))
        return F.mse_loss(model["dec"](quant), img) + 0.25 * latent_loss

    script.train(model, optimizer, loss)


@loop(KIND, "Guitaricet/relora", refused='moved=["base"]', as_told={"moved": ["base"]})
def relora(script: Script) -> None:
    """Every fifth step adapters are merged into the frozen base, drawn anew, and their moments put to zero."""

    class ReLoRa(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.base = nn.Linear(8, 8).requires_grad_(False)
            self.lora_A, self.lora_B = nn.Parameter(torch.randn(2, 8) * 0.3), nn.Parameter(torch.zeros(8, 2))

        def forward(self, x: Tensor) -> Tensor:
            return self.base(x) + x @ self.lora_A.t() @ self.lora_B.t()

        @torch.no_grad()
        def merge_and_reinit(self) -> None:
            self.base.weight.data += self.lora_B @ self.lora_A
            nn.init.kaiming_uniform_(self.lora_A, a=5**0.5)
            nn.init.zeros_(self.lora_B)

    model = ReLoRa()
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=2e-2)

    def loss() -> Tensor:
        x = script.randn(32, 8)
        return F.mse_loss(model(x), x)

    def merge(step: int) -> None:
        if step % 5 == 4:
            model.merge_and_reinit()
            for state in optimizer.state.values():
                state["exp_avg"].zero_()
                state["exp_avg_sq"].zero_()

    script.train(model, optimizer, loss, ends=merge)
