"""Moments inside a step that are not as its boundary is: frozen, perturbed, cloned, or one optimizer alone."""

from __future__ import annotations

import copy
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.zoo.harness import Script, loop, stack

KIND = "moments inside a step"

mlp = partial(stack, partial(nn.LeakyReLU, 0.2))


def misfit(model: nn.Module, x: Tensor) -> Tensor:
    return (model(x) - x.sum(1, keepdim=True)).square().mean()


@loop(KIND, "pytorch/examples dcgan main.py", long=True)
def dcgan(script: Script) -> None:
    """Two optimizers by turns; BatchNorm; weights set by hand before."""
    netG = nn.Sequential(nn.Linear(4, 16), nn.BatchNorm1d(16), nn.ReLU(True), nn.Linear(16, 8), nn.Tanh())
    netD = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.LeakyReLU(0.2, True), nn.Linear(16, 1), nn.Sigmoid())
    for net in (netG, netD):
        for module in net:
            if isinstance(module, nn.BatchNorm1d):
                nn.init.normal_(module.weight, 1.0, 0.02)
                nn.init.zeros_(module.bias)
    criterion = nn.BCELoss()
    optimizerD = torch.optim.Adam(netD.parameters(), lr=2e-3, betas=(0.5, 0.999))
    optimizerG = torch.optim.Adam(netG.parameters(), lr=2e-3, betas=(0.5, 0.999))
    with script.join(nn.ModuleDict({"G": netG, "D": netD}), [optimizerD, optimizerG]) as peer:
        while not peer.done:
            netD.zero_grad()
            real = script.randn(16, 8).tanh()
            label = torch.full((16,), 1.0)
            criterion(netD(real).view(-1), label).backward()
            fake = netG(script.randn(16, 4))
            label.fill_(0.0)
            criterion(netD(fake.detach()).view(-1), label).backward()
            optimizerD.step()
            netG.zero_grad()
            label.fill_(1.0)
            criterion(netD(fake).view(-1), label).backward()
            optimizerG.step()


@loop(KIND, "phillipi/pix2pix as CycleGAN's repository writes it")
def pix2pix(script: Script) -> None:
    """The critic steps first and is frozen at the end of the loop's body: there, and at every boundary."""
    nets = nn.ModuleDict({"G": mlp(4, 8, 4), "D": mlp(8, 8, 1)})
    optimizer_G = torch.optim.Adam(nets["G"].parameters(), lr=2e-4, betas=(0.5, 0.999))
    optimizer_D = torch.optim.Adam(nets["D"].parameters(), lr=2e-4, betas=(0.5, 0.999))
    with script.join(nets, [optimizer_D, optimizer_G]) as peer:
        while not peer.done:
            real_A = script.randn(8, 4)
            real_B = real_A.flip(1)
            fake_B = nets["G"](real_A)
            nets["D"].requires_grad_(True)
            optimizer_D.zero_grad()
            false, true = nets["D"](torch.cat([real_A, fake_B.detach()], 1)), nets["D"](torch.cat([real_A, real_B], 1))
            (F.softplus(false).mean() + F.softplus(-true).mean()).backward()
            optimizer_D.step()
            nets["D"].requires_grad_(False)
            optimizer_G.zero_grad()
            (F.softplus(-nets["D"](torch.cat([real_A, fake_B], 1))).mean() + 10 * F.l1_loss(fake_B, real_B)).backward()
            optimizer_G.step()


@loop(KIND, "martinarjovsky/WassersteinGAN main.py", long=True)
def wgan(script: Script) -> None:
    """A hundred critic steps before each of the first generator's; weights are clamped by ``.data``."""
    netG, netD = mlp(4, 16, 8), mlp(8, 16, 1)
    optimizerD = torch.optim.RMSprop(netD.parameters(), lr=5e-5)
    optimizerG = torch.optim.RMSprop(netG.parameters(), lr=5e-5)
    with script.join(nn.ModuleDict({"G": netG, "D": netD}), [optimizerD, optimizerG]) as peer:
        gen_iterations = 0
        while not peer.done:
            for p in netD.parameters():
                p.requires_grad = True
            for _ in range(110 if gen_iterations < 2 else 5):
                for p in netD.parameters():
                    p.data.clamp_(-0.01, 0.01)
                netD.zero_grad()
                errD_real = netD(script.randn(16, 8)).mean()
                errD_real.backward()
                errD_fake = netD(netG(script.randn(16, 4)).detach()).mean()
                errD_fake.backward(torch.tensor(-1.0))
                optimizerD.step()
            for p in netD.parameters():
                p.requires_grad = False
            netG.zero_grad()
            netD(netG(script.randn(16, 4))).mean().backward()
            optimizerG.step()
            gen_iterations += 1


@loop(KIND, "FGM and PGD for text, as in Chinese NLP contests", learns=True)
def pgd_on_embeddings(script: Script) -> None:
    """Embeddings are attacked three times between backward passes, and restored by name before the step."""
    model = nn.ModuleDict({"embedding": nn.Embedding(16, 8), "head": nn.Linear(8, 2)})
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-2)

    def loss_of(ids: Tensor) -> Tensor:
        return F.cross_entropy(model["head"](model["embedding"](ids).mean(1)), (ids[:, 0] > 7).long())

    with script.join(model, optimizer) as peer:
        while not peer.done:
            ids = script.randint(16, 16, 1).expand(-1, 4)
            loss = loss_of(ids)
            loss.backward()
            grads = {name: p.grad.clone() for name, p in model.named_parameters()}
            backup = {n: p.data.clone() for n, p in model.named_parameters() if "embedding" in n}
            for t in range(3):
                for name, param in model.named_parameters():
                    if name in backup:
                        param.data.add_(0.3 * param.grad / (param.grad.norm() + 1e-9))
                        r = param.data - backup[name]
                        param.data = backup[name] + r * min(1.0, 1.0 / float(r.norm() + 1e-9))
                if t != 2:
                    model.zero_grad()
                else:
                    for name, p in model.named_parameters():
                        p.grad = grads[name]
                loss_of(ids).backward()
            for name, param in model.named_parameters():
                if name in backup:
                    param.data = backup[name]
            optimizer.step()
            model.zero_grad()
            script.losses.append(loss.item())


class SAM(torch.optim.Optimizer):
    """As davda54/sam writes it."""

    def __init__(self, params, base_optimizer, rho: float = 0.05, **kwargs) -> None:
        super().__init__(params, {"rho": rho, **kwargs})
        self.base_optimizer = base_optimizer(self.param_groups, **kwargs)
        self.param_groups = self.base_optimizer.param_groups
        self.defaults.update(self.base_optimizer.defaults)

    @torch.no_grad()
    def first_step(self) -> None:
        held = [p for group in self.param_groups for p in group["params"]]
        norm = torch.stack([p.grad.norm(p=2) for p in held]).norm(p=2)
        for p in held:
            self.state[p]["old_p"] = p.data.clone()
            p.add_(p.grad * (0.05 / (norm + 1e-12)))
        self.zero_grad()

    @torch.no_grad()
    def second_step(self) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                p.data = self.state[p]["old_p"]
        self.base_optimizer.step()
        self.zero_grad()

    @torch.no_grad()
    def step(self, closure=None) -> None:
        closure = torch.enable_grad()(closure)
        self.first_step()
        closure()
        self.second_step()


@loop(KIND, "davda54/sam README, step(closure)", learns=True)
def sam_with_closure(script: Script) -> None:
    model = mlp(8, 16, 1)
    optimizer = SAM(model.parameters(), torch.optim.SGD, lr=0.02, momentum=0.9)
    with script.join(model, optimizer) as peer:
        while not peer.done:
            x = script.randn(16, 8)

            def closure(x: Tensor = x) -> Tensor:
                loss = misfit(model, x)
                loss.backward()
                return loss

            loss = misfit(model, x)
            loss.backward()
            optimizer.step(closure)
            optimizer.zero_grad()
            script.losses.append(loss.item())


@loop(KIND, "davda54/sam example/train.py, first_step and second_step", refused="does not step")
def sam_in_two_steps(script: Script) -> None:
    """Neither of the two is ``step``, so no step is ever seen of what join was given."""
    model = mlp(8, 16, 1)
    optimizer = SAM(model.parameters(), torch.optim.SGD, lr=0.02, momentum=0.9)
    with script.join(model, optimizer) as peer:
        while not peer.done:
            x = script.randn(16, 8)
            misfit(model, x).backward()
            optimizer.first_step()
            misfit(model, x).backward()
            optimizer.second_step()


@loop(KIND, "the same, join being given optimizer.base_optimizer", learns=True, long=True)
def sam_by_its_base(script: Script) -> None:
    model = mlp(8, 16, 1)
    optimizer = SAM(model.parameters(), torch.optim.SGD, lr=0.02, momentum=0.9)
    with script.join(model, optimizer.base_optimizer) as peer:
        while not peer.done:
            x = script.randn(16, 8)
            loss = misfit(model, x)
            loss.backward()
            optimizer.first_step()
            misfit(model, x).backward()
            optimizer.second_step()
            script.losses.append(loss.item())


@loop(KIND, "gabrielhuang/reptile-pytorch train_omniglot.py", learns=True, long=True)
def reptile(script: Script) -> None:
    """A clone learns the task; how far it went is the gradient of the one that is joined."""
    meta_net = mlp(1, 16, 1)
    meta_optimizer = torch.optim.SGD(meta_net.parameters(), lr=0.5)
    with script.join(meta_net, meta_optimizer) as peer:
        while not peer.done:
            net = copy.deepcopy(meta_net)
            optimizer = torch.optim.Adam(net.parameters(), lr=1e-2, betas=(0.0, 0.999))
            slope = script.rand(1) + 1
            for _ in range(5):
                x = script.randn(10, 1)
                loss = F.mse_loss(net(x), slope * x)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
            for p, target_p in zip(meta_net.parameters(), net.parameters(), strict=True):
                if p.grad is None:
                    p.grad = torch.zeros_like(p)
                p.grad.data.zero_()
                p.grad.data.add_(p.data - target_p.data)
            meta_optimizer.step()
            script.losses.append(loss.item())


@loop(KIND, "pytorch/examples time_sequence_prediction train.py", learns=True)
def lbfgs(script: Script) -> None:
    """The closure is evaluated at one trial point after the other, inside the step."""
    model = mlp(4, 8, 1)
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.2, max_iter=4)
    with script.join(model, optimizer) as peer:
        x = script.randn(64, 4)
        while not peer.done:

            def closure() -> Tensor:
                optimizer.zero_grad()
                loss = misfit(model, x)
                loss.backward()
                return loss

            script.losses.append(float(optimizer.step(closure)))
            script.rand(1)
