"""State that no gradient trains: teachers, target networks, averages of weights, codebooks."""

from __future__ import annotations

import copy
import random

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.zoo.harness import Script, loop, mlp

KIND = "state that no gradient trains"


@loop(
    KIND,
    "lucidrains/byol-pytorch",
    learns=True,
)
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
    with script.join(learner, opt) as peer:
        while not peer.done:
            images = script.randn(16, 8)
            loss = learner(images + 0.1 * script.randn(16, 8), images + 0.1 * script.randn(16, 8))
            opt.zero_grad()
            loss.backward()
            opt.step()
            learner.update_moving_average()
            script.losses.append(loss.item())


@loop(KIND, "facebookresearch/dino main_dino.py")
def dino(script: Script) -> None:
    """Rate, decay and momentum are read off by iteration; the centre is a buffer of the loss."""

    class DINOLoss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("center", torch.zeros(1, 8))

        def forward(self, student: Tensor, teacher: Tensor) -> Tensor:
            wanted = F.softmax((teacher - self.center) / 0.04, dim=-1).detach()
            loss = -(wanted * F.log_softmax(student / 0.1, dim=-1)).sum(-1).mean()
            self.center = self.center * 0.9 + teacher.mean(0, keepdim=True).detach() * 0.1
            return loss

    student, teacher, dino_loss = mlp(8, 16, 8), mlp(8, 16, 8), DINOLoss()
    teacher.load_state_dict(student.state_dict())
    for p in teacher.parameters():
        p.requires_grad = False
    optimizer = torch.optim.AdamW(student.parameters(), lr=1.0)
    lr_schedule = torch.linspace(1e-2, 1e-3, 1000).tolist()
    wd_schedule, momentum_schedule = torch.linspace(0.04, 0.4, 1000).tolist(), torch.linspace(0.9, 1, 1000).tolist()
    with script.join(nn.ModuleDict({"student": student, "teacher": teacher, "loss": dino_loss}), optimizer) as peer:
        it = 0
        while not peer.done:
            for param_group in optimizer.param_groups:
                param_group["lr"], param_group["weight_decay"] = lr_schedule[it], wd_schedule[it]
            images = script.randn(16, 8)
            with torch.no_grad():
                teacher_output = teacher(images)
            loss = dino_loss(student(images + 0.1 * script.randn(16, 8)), teacher_output)
            optimizer.zero_grad()
            loss.backward()
            for p in student.parameters():
                p.grad.data.mul_(min(1.0, 3.0 / (float(p.grad.data.norm(2)) + 1e-6)))
            optimizer.step()
            with torch.no_grad():
                m = momentum_schedule[it]
                for param_q, param_k in zip(student.parameters(), teacher.parameters(), strict=True):
                    param_k.data.mul_(m).add_((1 - m) * param_q.detach().data)
            script.losses.append(loss.item())
            it += 1


@loop(KIND, "CuriousAI/mean-teacher main.py", refused='moved=["ema"]', as_told={"moved": ["ema"]}, learns=True)
def mean_teacher(script: Script) -> None:
    """The average's decay rises with ``global_step``, and consistency's weight with it."""
    model, ema_model = mlp(8, 16, 4), mlp(8, 16, 4)
    for param in ema_model.parameters():
        param.detach_()
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9, weight_decay=1e-4, nesterov=True)
    with script.join(nn.ModuleDict({"model": model, "ema": ema_model}), optimizer) as peer:
        global_step = 0
        while not peer.done:
            inputs = script.randn(32, 8)
            target = inputs[:, :4].argmax(1)
            with torch.no_grad():
                ema_logit = ema_model(inputs + 0.1 * script.randn(32, 8))
            logit = model(inputs)
            class_loss = F.cross_entropy(logit[:8], target[:8])
            loss = class_loss + min(1.0, global_step / 10) * F.mse_loss(logit.softmax(1), ema_logit.softmax(1))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            global_step += 1
            alpha = min(1 - 1 / (global_step + 1), 0.99)
            for ema_param, param in zip(ema_model.parameters(), model.parameters(), strict=True):
                ema_param.data.mul_(alpha).add_(param.data, alpha=1 - alpha)
            script.losses.append(class_loss.item())


class Replay:
    def __init__(self) -> None:
        self.rows: list[tuple[Tensor, Tensor, Tensor, Tensor]] = []

    def put(self, script: Script, count: int) -> None:
        obs, action = script.randn(count, 4), script.randint(2, count)
        reward = (action == (obs[:, 0] > 0)).float()
        self.rows += zip(obs, action, reward, obs + 0.1, strict=True)

    def sample(self, count: int) -> list[Tensor]:
        return [torch.stack(column) for column in zip(*random.sample(self.rows, count), strict=True)]


@loop(KIND, "vwxyzjn/cleanrl dqn.py", learns=True)
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
    with script.join(agent, optimizer) as peer:
        while not peer.done:
            x = script.randn(16, 4)
            loss = F.mse_loss(agent["q"](x), 0.9 * agent["target"](x).detach() + 1)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()


@loop(KIND, "openai/spinningup sac.py (PyTorch)")
def sac(script: Script) -> None:
    """Three optimizers, twin critics, a temperature; critics are frozen while the actor steps; targets by Polyak."""

    class ActorCritic(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.pi, self.q1, self.q2 = mlp(4, 16, 2), mlp(5, 16, 1), mlp(5, 16, 1)
            self.log_alpha = nn.Parameter(torch.zeros(1))

        def act(self, obs: Tensor) -> tuple[Tensor, Tensor]:
            mean, log_std = self.pi(obs).chunk(2, -1)
            drawn = torch.distributions.Normal(mean, log_std.clamp(-5, 2).exp())
            action = drawn.rsample()
            return action, drawn.log_prob(action)

    ac = ActorCritic()
    ac.targ = nn.ModuleList([copy.deepcopy(ac.q1), copy.deepcopy(ac.q2)])
    for p in ac.targ.parameters():
        p.requires_grad = False
    q_params = [*ac.q1.parameters(), *ac.q2.parameters()]
    pi_optimizer, q_optimizer = torch.optim.Adam(ac.pi.parameters(), 1e-3), torch.optim.Adam(q_params, 1e-3)
    a_optimizer = torch.optim.Adam([ac.log_alpha], 1e-3)
    with script.join(ac, [q_optimizer, pi_optimizer, a_optimizer]) as peer:
        while not peer.done:
            o = script.randn(16, 4)
            a = script.randn(16, 1)
            with torch.no_grad():
                a2, logp_a2 = ac.act(o + 0.1)
                q_pi_targ = torch.min(*(q(torch.cat([o + 0.1, a2], 1)) for q in ac.targ))
                backup = -(a - o[:, :1]).square() + 0.9 * (q_pi_targ - ac.log_alpha.exp() * logp_a2)
            q_optimizer.zero_grad()
            loss_q = sum((q(torch.cat([o, a], 1)) - backup).square().mean() for q in (ac.q1, ac.q2))
            loss_q.backward()
            q_optimizer.step()
            for p in q_params:
                p.requires_grad = False
            pi_optimizer.zero_grad()
            pi, logp_pi = ac.act(o)
            q_pi = torch.min(*(q(torch.cat([o, pi], 1)) for q in (ac.q1, ac.q2)))
            (ac.log_alpha.exp().detach() * logp_pi - q_pi).mean().backward()
            pi_optimizer.step()
            for p in q_params:
                p.requires_grad = True
            a_optimizer.zero_grad()
            (-ac.log_alpha * (logp_pi + 1).mean().detach()).sum().backward()
            a_optimizer.step()
            with torch.no_grad():
                for p, p_targ in zip(q_params, ac.targ.parameters(), strict=True):
                    p_targ.data.mul_(0.995)
                    p_targ.data.add_((1 - 0.995) * p.data)


def noised(script: Script, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    t, noise = script.rand(len(x), 1), script.randn(*x.shape)
    return (1 - t).sqrt() * x + t.sqrt() * noise, t, noise


@loop(KIND, "lucidrains/denoising-diffusion-pytorch Trainer, the average outside", learns=True)
def ddpm_with_ema_outside(script: Script) -> None:
    model = mlp(5, 32, 4)
    ema_model = copy.deepcopy(model)
    opt = torch.optim.Adam(model.parameters(), lr=1e-2, betas=(0.9, 0.99))
    with script.join(model, opt) as peer:
        step = 0
        while not peer.done:
            total_loss = 0.0
            for _ in range(2):
                x, t, noise = noised(script, script.randn(32, 4) * 0.1 + 1)
                loss = F.mse_loss(model(torch.cat([x, t], 1)), noise) / 2
                total_loss += loss.item()
                loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            opt.step()
            opt.zero_grad()
            step += 1
            if step % 2 == 0:
                for ma, now in zip(ema_model.parameters(), model.parameters(), strict=True):
                    ma.data.lerp_(now.data, 1 - 0.995)
            script.losses.append(total_loss)


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
    with script.join(module, opt) as peer:
        step = 0
        while not peer.done:
            x, t, noise = noised(script, script.randn(32, 4) * 0.1 + 1)
            loss = F.mse_loss(module.model(torch.cat([x, t], 1)), noise)
            opt.zero_grad()
            loss.backward()
            opt.step()
            step += 1
            module.model_ema(module.model)
            if step % 3 == 0:
                module.model_ema.store(list(module.model.parameters()))
                module.model_ema.copy_to(module.model)
                with torch.no_grad():
                    module.model(torch.cat([x, t], 1))
                module.model_ema.restore(list(module.model.parameters()))
            script.losses.append(loss.item())


@loop(
    KIND,
    "openai/guided-diffusion train_util.py, the average inside the model",
    learns=True,
)
def ddpm_with_ema_inside(script: Script) -> None:
    class Diffusion(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = mlp(5, 32, 4)
            self.ema = copy.deepcopy(self.net).requires_grad_(False)

    model = Diffusion()
    opt = torch.optim.AdamW(model.net.parameters(), lr=1e-2, weight_decay=0.0)
    with script.join(model, opt) as peer:
        while not peer.done:
            for param in model.net.parameters():
                if param.grad is not None:
                    param.grad.detach_()
                    param.grad.zero_()
            x, t, noise = noised(script, script.randn(32, 4) * 0.1 + 1)
            loss = F.mse_loss(model.net(torch.cat([x, t], 1)), noise)
            loss.backward()
            opt.step()
            for targ, src in zip(model.ema.parameters(), model.net.parameters(), strict=True):
                targ.detach().mul_(0.9).add_(src, alpha=0.1)
            script.losses.append(loss.item())


@loop(KIND, "rosinality/vq-vae-2-pytorch vqvae.py", learns=True)
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
    with script.join(model, optimizer) as peer:
        while not peer.done:
            model.zero_grad()
            img = script.randn(32, 2) @ torch.ones(2, 8)
            quant, latent_loss = model["quantize"](model["enc"](img))
            recon_loss = F.mse_loss(model["dec"](quant), img)
            (recon_loss + 0.25 * latent_loss).backward()
            optimizer.step()
            script.losses.append(recon_loss.item())


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
    with script.join(model, optimizer) as peer:
        update_step = 0
        while not peer.done:
            x = script.randn(32, 8)
            F.mse_loss(model(x), x).backward()
            optimizer.step()
            optimizer.zero_grad()
            update_step += 1
            if update_step % 5 == 0:
                model.merge_and_reinit()
                for state in optimizer.state.values():
                    state["exp_avg"].zero_()
                    state["exp_avg_sq"].zero_()
