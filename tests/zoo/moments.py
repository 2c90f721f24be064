"""Moments inside a step that are not as its boundary is: frozen, perturbed, cloned, or one optimizer alone."""

from __future__ import annotations

import copy
import random
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.zoo.harness import Script, loop, stack

KIND = "moments inside a step"

mlp = partial(stack, partial(nn.LeakyReLU, 0.2))


def misfit(model: nn.Module, x: Tensor) -> Tensor:
    return (model(x) - x.sum(1, keepdim=True)).square().mean()


@loop(KIND, "pytorch/examples dcgan main.py")
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


@loop(KIND, "junyanz/pytorch-CycleGAN-and-pix2pix cycle_gan_model.py")
def cyclegan(script: Script) -> None:
    """Two generators of one optimizer, two critics of another, frozen for a moment; a pool of older pictures."""

    class ImagePool:
        def __init__(self) -> None:
            self.images: list[Tensor] = []

        def query(self, images: Tensor) -> Tensor:
            found = []
            for image in images:
                if len(self.images) < 20:
                    self.images.append(image)
                    found.append(image)
                elif random.random() > 0.5:
                    at = random.randrange(20)
                    found.append(self.images[at])
                    self.images[at] = image
                else:
                    found.append(image)
            return torch.stack(found)

    nets = nn.ModuleDict({name: mlp(4, 8, 4) for name in ("G_A", "G_B")} | {n: mlp(4, 8, 1) for n in ("D_A", "D_B")})
    generators = [*nets["G_A"].parameters(), *nets["G_B"].parameters()]
    critics = [*nets["D_A"].parameters(), *nets["D_B"].parameters()]
    optimizer_G = torch.optim.Adam(generators, lr=2e-4, betas=(0.5, 0.999))
    optimizer_D = torch.optim.Adam(critics, lr=2e-4, betas=(0.5, 0.999))
    pools = {"A": ImagePool(), "B": ImagePool()}

    def set_requires_grad(names: tuple[str, ...], requires_grad: bool) -> None:
        for name in names:
            for param in nets[name].parameters():
                param.requires_grad = requires_grad

    def gan(prediction: Tensor, real: bool) -> Tensor:
        return F.mse_loss(prediction, torch.full_like(prediction, float(real)))

    with script.join(nets, [optimizer_G, optimizer_D]) as peer:
        while not peer.done:
            real_A, real_B = script.randn(4, 4), script.randn(4, 4) + 2
            fake_B, fake_A = nets["G_A"](real_A), nets["G_B"](real_B)
            set_requires_grad(("D_A", "D_B"), False)
            optimizer_G.zero_grad()
            loss_G = gan(nets["D_A"](fake_B), True) + gan(nets["D_B"](fake_A), True)
            loss_G = loss_G + 10 * (F.l1_loss(nets["G_B"](fake_B), real_A) + F.l1_loss(nets["G_A"](fake_A), real_B))
            loss_G.backward()
            optimizer_G.step()
            set_requires_grad(("D_A", "D_B"), True)
            optimizer_D.zero_grad()
            for name, real, fake, pool in (("D_A", real_B, fake_B, "B"), ("D_B", real_A, fake_A, "A")):
                pooled = pools[pool].query(fake.detach())
                ((gan(nets[name](real), True) + gan(nets[name](pooled), False)) * 0.5).backward()
            optimizer_D.step()


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


@loop(KIND, "caogang/wgan-gp gan_mnist.py")
def wgan_gp(script: Script) -> None:
    """Five critic steps for each of the generator's, gradients of gradients, and the critic frozen meanwhile."""
    netG, netD = mlp(4, 16, 8), mlp(8, 16, 1)
    optimizerD = torch.optim.Adam(netD.parameters(), lr=1e-4, betas=(0.5, 0.9))
    optimizerG = torch.optim.Adam(netG.parameters(), lr=1e-4, betas=(0.5, 0.9))
    with script.join(nn.ModuleDict({"G": netG, "D": netD}), [optimizerD, optimizerG]) as peer:
        while not peer.done:
            for p in netD.parameters():
                p.requires_grad = True
            for _ in range(5):
                real = script.randn(16, 8)
                netD.zero_grad()
                fake = netG(script.randn(16, 4)).detach()
                alpha = script.rand(16, 1)
                mixed = (alpha * real + (1 - alpha) * fake).requires_grad_(True)
                (grad,) = torch.autograd.grad(netD(mixed).sum(), mixed, create_graph=True)
                penalty = ((grad.norm(2, dim=1) - 1) ** 2).mean() * 10
                (netD(fake).mean() - netD(real).mean() + penalty).backward()
                optimizerD.step()
            for p in netD.parameters():
                p.requires_grad = False
            netG.zero_grad()
            (-netD(netG(script.randn(16, 4))).mean()).backward()
            optimizerG.step()


@loop(KIND, "martinarjovsky/WassersteinGAN main.py")
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


@loop(KIND, "csxmli2016/AWP trades_awp: perturbed weights", learns=True)
def adversarial_weights(script: Script) -> None:
    """A proxy finds the perturbation; the model is moved there, makes its gradients, and is moved back to step."""
    model = mlp(8, 16, 1)
    proxy = copy.deepcopy(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    proxy_optim = torch.optim.SGD(proxy.parameters(), lr=0.01)
    with script.join(model, optimizer) as peer:
        while not peer.done:
            x = script.randn(16, 8)
            proxy.load_state_dict(model.state_dict())
            proxy_optim.zero_grad()
            (-misfit(proxy, x)).backward()
            proxy_optim.step()
            diff = [(q - p).detach() for p, q in zip(model.parameters(), proxy.parameters(), strict=True)]
            with torch.no_grad():
                for p, d in zip(model.parameters(), diff, strict=True):
                    p.add_(d)
            loss = misfit(model, x)
            optimizer.zero_grad()
            loss.backward()
            with torch.no_grad():
                for p, d in zip(model.parameters(), diff, strict=True):
                    p.sub_(d)
            optimizer.step()
            script.losses.append(loss.item())


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


@loop(KIND, "the same, join being given optimizer.base_optimizer", learns=True)
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


@loop(KIND, "cbfinn/maml in PyTorch, with torch.func", learns=True)
def maml(script: Script) -> None:
    """The inner loop steps what is no parameter; gradients go through it."""
    model = mlp(1, 16, 1)
    meta_optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    with script.join(model, meta_optimizer) as peer:
        while not peer.done:
            meta_loss = torch.zeros(())
            for _ in range(4):
                slope = script.rand(1) + 1
                x, query = script.randn(10, 1), script.randn(10, 1)
                fast = dict(model.named_parameters())
                inner = F.mse_loss(torch.func.functional_call(model, fast, (x,)), slope * x)
                grads = torch.autograd.grad(inner, list(fast.values()), create_graph=True)
                fast = {name: p - 0.05 * g for (name, p), g in zip(fast.items(), grads, strict=True)}
                meta_loss = meta_loss + F.mse_loss(torch.func.functional_call(model, fast, (query,)), slope * query)
            meta_optimizer.zero_grad()
            (meta_loss / 4).backward()
            meta_optimizer.step()
            script.losses.append(meta_loss.item())


@loop(KIND, "gabrielhuang/reptile-pytorch train_omniglot.py", learns=True)
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


@loop(KIND, "facebookresearch/swav main_swav.py", learns=True)
def swav(script: Script) -> None:
    """Prototypes are put back to length one before each forward pass, and their first gradients thrown away."""
    model = nn.ModuleDict({"body": mlp(8, 16, 8), "prototypes": nn.Linear(8, 6, bias=False)})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9, weight_decay=1e-6)
    with script.join(model, optimizer) as peer:
        iteration = 0
        while not peer.done:
            with torch.no_grad():
                w = model["prototypes"].weight.data.clone()
                model["prototypes"].weight.copy_(F.normalize(w, dim=1, p=2))
            image = script.randn(24, 8)
            one, two = (
                model["prototypes"](F.normalize(model["body"](image + 0.1 * script.randn(24, 8)), dim=1, p=2))
                for _ in range(2)
            )
            with torch.no_grad():
                q = torch.exp(one / 0.05).t()
                for _ in range(3):
                    q /= q.sum(1, keepdim=True)
                    q /= q.sum(0, keepdim=True)
            loss = -(q.t() * F.log_softmax(two / 0.1, dim=1)).sum(1).mean()
            optimizer.zero_grad()
            loss.backward()
            if iteration < 2:
                for name, p in model.named_parameters():
                    if "prototypes" in name:
                        p.grad = None
            optimizer.step()
            script.losses.append(loss.item())
            iteration += 1


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
