"""Loops of one optimizer, as most people write them."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.zoo.harness import Script, loop

KIND = "ordinary"


class Attention(nn.Module):
    def __init__(self, width: int, context: int) -> None:
        super().__init__()
        self.c_attn, self.c_proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.register_buffer("bias", torch.tril(torch.ones(context, context)).view(1, 1, context, context))

    def forward(self, x: Tensor) -> Tensor:
        batch, time, width = x.shape
        q, k, v = (one.view(batch, time, 2, width // 2).transpose(1, 2) for one in self.c_attn(x).split(width, dim=2))
        found = (q @ k.transpose(-2, -1)) / math.sqrt(width // 2)
        found = found.masked_fill(self.bias[:, :, :time, :time] == 0, float("-inf")).softmax(-1)
        return self.c_proj((found @ v).transpose(1, 2).reshape(batch, time, width))


class Block(nn.Module):
    def __init__(self, width: int, context: int) -> None:
        super().__init__()
        self.ln_1, self.attn, self.ln_2 = nn.LayerNorm(width), Attention(width, context), nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    """Head and embedding are one tensor, as in GPT-2."""

    def __init__(self, vocab: int = 16, width: int = 8, context: int = 8) -> None:
        super().__init__()
        self.transformer = nn.ModuleDict(
            {
                "wte": nn.Embedding(vocab, width),
                "wpe": nn.Embedding(context, width),
                "h": nn.ModuleList([Block(width, context) for _ in range(2)]),
                "ln_f": nn.LayerNorm(width),
            }
        )
        self.lm_head = nn.Linear(width, vocab, bias=False)
        self.transformer.wte.weight = self.lm_head.weight

    def forward(self, idx: Tensor, targets: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        x = self.transformer.wte(idx) + self.transformer.wpe(torch.arange(idx.shape[1]))
        for block in self.transformer.h:
            x = block(x)
        logits = self.lm_head(self.transformer.ln_f(x))
        loss = None if targets is None else F.cross_entropy(logits.view(-1, logits.shape[-1]), targets.reshape(-1))
        return logits, loss


def counting(script: Script, batch: int = 8, time: int = 8, vocab: int = 16) -> tuple[Tensor, Tensor]:
    """Text that counts on: what comes next follows from what is there."""
    line = (script.randint(vocab, batch, 1) + torch.arange(time + 1)) % vocab
    return line[:, :-1], line[:, 1:]


@loop(KIND, "karpathy/nanoGPT train.py", learns=True)
def nanogpt(script: Script) -> None:
    learning_rate, min_lr, warmup_iters, lr_decay_iters = 2e-2, 2e-3, 2, 12
    gradient_accumulation_steps, grad_clip = 2, 1.0

    def get_lr(it: int) -> float:
        if it < warmup_iters:
            return learning_rate * (it + 1) / (warmup_iters + 1)
        if it > lr_decay_iters:
            return min_lr
        ratio = (it - warmup_iters) / (lr_decay_iters - warmup_iters)
        return min_lr + 0.5 * (1.0 + math.cos(math.pi * ratio)) * (learning_rate - min_lr)

    model = GPT()
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    decay = [p for p in model.parameters() if p.dim() >= 2]
    nodecay = [p for p in model.parameters() if p.dim() < 2]
    groups = [{"params": decay, "weight_decay": 0.1}, {"params": nodecay, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=learning_rate, betas=(0.9, 0.95))
    with script.join(model, optimizer) as peer:
        iter_num = 0
        X, Y = counting(script)
        while not peer.done:
            for group in optimizer.param_groups:
                group["lr"] = get_lr(iter_num)
            for _ in range(gradient_accumulation_steps):
                with torch.autocast("cpu", dtype=torch.bfloat16):
                    _, loss = model(X, Y)
                    loss = loss / gradient_accumulation_steps
                X, Y = counting(script)
                scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), grad_clip)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad(set_to_none=True)
            script.losses.append(loss.item() * gradient_accumulation_steps)
            iter_num += 1


@loop(KIND, "karpathy/minGPT trainer.py", learns=True)
def mingpt(script: Script) -> None:
    """A Trainer with callbacks, which ends by ``max_iters``."""

    class Trainer:
        def __init__(self, model: nn.Module, max_iters: int) -> None:
            self.model, self.max_iters, self.callbacks = model, max_iters, list[Callable[[Trainer], None]]()
            self.optimizer = torch.optim.AdamW(model.parameters(), lr=2e-2, betas=(0.9, 0.95))

        def run(self) -> None:
            self.iter_num = 0
            while self.iter_num < self.max_iters:
                x, y = counting(script)
                _, self.loss = self.model(x, y)
                self.model.zero_grad(set_to_none=True)
                self.loss.backward()
                torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
                self.optimizer.step()
                for callback in self.callbacks:
                    callback(self)
                self.iter_num += 1

    trainer = Trainer(GPT(), max_iters=12)
    with script.join(trainer.model, trainer.optimizer) as peer:
        trainer.callbacks.append(lambda t: script.losses.append(t.loss.item()))
        if not peer.done:
            trainer.run()


@loop(KIND, "huggingface/transformers run_clm_no_trainer.py", learns=True)
def run_clm_no_trainer(script: Script) -> None:
    """accelerate prepares all; epochs over a loader; its scheduler; ``accumulate``."""
    from accelerate import Accelerator
    from transformers import GPT2Config, GPT2LMHeadModel, get_scheduler

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    config = GPT2Config(vocab_size=16, n_positions=8, n_embd=8, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=0)
    model = GPT2LMHeadModel(config)
    lines = torch.cat([counting(script)[0] for _ in range(8)])
    loader = torch.utils.data.DataLoader([{"input_ids": line, "labels": line} for line in lines], batch_size=8)
    no_decay = ["bias", "ln_1.weight", "ln_2.weight", "ln_f.weight"]
    named = list(model.named_parameters())
    groups = [
        {"params": [p for n, p in named if not any(nd in n for nd in no_decay)], "weight_decay": 0.1},
        {"params": [p for n, p in named if any(nd in n for nd in no_decay)], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=2e-2)
    lr_scheduler = get_scheduler("linear", optimizer, num_warmup_steps=0, num_training_steps=100)
    model, optimizer, loader, lr_scheduler = accelerator.prepare(model, optimizer, loader, lr_scheduler)
    with script.join(model, optimizer, accelerator=accelerator, scheduler=lr_scheduler) as peer:
        completed_steps = 0
        for _ in range(100):
            if peer.done:
                break
            model.train()
            for batch in loader:
                with accelerator.accumulate(model):
                    loss = model(**batch).loss
                    accelerator.backward(loss)
                    optimizer.step()
                    lr_scheduler.step()
                    optimizer.zero_grad()
                script.losses.append(loss.item())
                if accelerator.sync_gradients:
                    completed_steps += 1
                if peer.done:
                    break


class BasicBlock(nn.Module):
    def __init__(self, planes: int, out: int) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(planes, out, 3, 2, 1, bias=False), nn.BatchNorm2d(out)
        self.conv2, self.bn2 = nn.Conv2d(out, out, 3, 1, 1, bias=False), nn.BatchNorm2d(out)
        self.shortcut = nn.Sequential(nn.Conv2d(planes, out, 1, 2, bias=False), nn.BatchNorm2d(out))

    def forward(self, x: Tensor) -> Tensor:
        found = self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x)))))
        return F.relu(found + self.shortcut(x))


@loop(KIND, "kuangliu/pytorch-cifar main.py", learns=True)
def cifar_resnet(script: Script) -> None:
    """Train and test by turns, BatchNorm in both modes, SGD with momentum, cosine by epoch."""
    net = nn.Sequential(BasicBlock(3, 4), BasicBlock(4, 8), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9, weight_decay=5e-4)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=200)
    means = torch.randn(4, 3, 1, 1, generator=torch.Generator().manual_seed(0))

    def images() -> tuple[Tensor, Tensor]:
        targets = script.randint(4, 16)
        return script.randn(16, 3, 8, 8) * 0.3 + means[targets], targets

    with script.join(net, optimizer, scheduler=scheduler) as peer:
        for _ in range(200):
            if peer.done:
                break
            net.train()
            for _ in range(3):
                inputs, targets = images()
                optimizer.zero_grad()
                loss = F.cross_entropy(net(inputs), targets)
                loss.backward()
                optimizer.step()
                script.losses.append(loss.item())
                if peer.done:
                    break
            net.eval()
            with torch.no_grad():
                inputs, targets = images()
                F.cross_entropy(net(inputs), targets).item()
            scheduler.step()


class UNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down1, self.down2, self.up1 = self.double(1, 4), self.double(4, 8), self.double(8, 4)
        self.up, self.outc = nn.ConvTranspose2d(8, 4, 2, 2), nn.Conv2d(4, 1, 1)

    @staticmethod
    def double(of: int, to: int) -> nn.Sequential:
        return nn.Sequential(nn.Conv2d(of, to, 3, padding=1, bias=False), nn.BatchNorm2d(to), nn.ReLU(inplace=True))

    def forward(self, x: Tensor) -> Tensor:
        first = self.down1(x)
        return self.outc(self.up1(torch.cat([first, self.up(self.down2(F.max_pool2d(first, 2)))], 1)))


@loop(KIND, "milesial/Pytorch-UNet train.py", learns=True)
def unet(script: Script) -> None:
    """RMSprop with momentum, a GradScaler, clipping, and a rate that falls with the Dice score."""
    model = UNet()
    optimizer = torch.optim.RMSprop(model.parameters(), lr=1e-3, weight_decay=1e-8, momentum=0.9, foreach=True)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, "max", patience=5)
    grad_scaler = torch.amp.GradScaler("cpu", enabled=True)
    with script.join(model, optimizer, scheduler=scheduler) as peer:
        step = 0
        while not peer.done:
            model.train()
            images = script.randn(4, 1, 8, 8)
            true_masks = (images > 0).float()
            with torch.autocast("cpu", enabled=True):
                masks_pred = model(images)
                loss = F.binary_cross_entropy_with_logits(masks_pred, true_masks)
            optimizer.zero_grad(set_to_none=True)
            grad_scaler.scale(loss).backward()
            grad_scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            grad_scaler.step(optimizer)
            grad_scaler.update()
            script.losses.append(loss.item())
            step += 1
            if step % 3 == 0:
                model.eval()
                with torch.no_grad():
                    scheduler.step(1 - loss.item())


@loop(KIND, "pytorch/examples word_language_model main.py", refused="optimizer")
def word_language_model(script: Script) -> None:
    """No optimizer at all: the rate is the script's, and each parameter is moved by hand."""
    model = nn.ModuleDict({"encoder": nn.Embedding(16, 8), "rnn": nn.LSTM(8, 8), "decoder": nn.Linear(8, 16)})
    lr, hidden = 1.0, (torch.zeros(1, 8, 8), torch.zeros(1, 8, 8))
    with script.join(model, None) as peer:
        while not peer.done:
            data, targets = (one.t() for one in counting(script))
            model.zero_grad()
            hidden = tuple(h.detach() for h in hidden)
            output, hidden = model["rnn"](model["encoder"](data), hidden)
            F.cross_entropy(model["decoder"](output).view(-1, 16), targets.reshape(-1)).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.25)
            for p in model.parameters():
                p.data.add_(p.grad, alpha=-lr)


@loop(KIND, "salesforce/awd-lstm-lm main.py", learns=True)
def awd_lstm(script: Script) -> None:
    """A hidden state that goes on, a rate scaled by the length of each piece, and put back after the step."""
    model = nn.ModuleDict({"encoder": nn.Embedding(16, 8), "rnn": nn.LSTM(8, 8), "decoder": nn.Linear(8, 16)})
    model["decoder"].weight = model["encoder"].weight
    optimizer = torch.optim.SGD(model.parameters(), lr=2.0, weight_decay=1.2e-6)
    with script.join(model, optimizer) as peer:
        hidden = (torch.zeros(1, 8, 8), torch.zeros(1, 8, 8))
        while not peer.done:
            seq_len = 4 + int(script.randint(5, 1))
            lr2 = optimizer.param_groups[0]["lr"]
            optimizer.param_groups[0]["lr"] = lr2 * seq_len / 8
            data, targets = (one.t() for one in counting(script, time=seq_len))
            hidden = tuple(h.detach() for h in hidden)
            optimizer.zero_grad()
            output, hidden = model["rnn"](model["encoder"](data), hidden)
            raw_loss = F.cross_entropy(model["decoder"](output).view(-1, 16), targets.reshape(-1))
            loss = raw_loss + 1e-3 * output.pow(2).mean()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.25)
            optimizer.step()
            optimizer.param_groups[0]["lr"] = lr2
            script.losses.append(raw_loss.item())


@loop(KIND, "SeanNaren/deepspeech.pytorch", learns=True)
def speech_with_ctc(script: Script) -> None:
    """CTC over lines of unequal length; a batch whose loss is not finite is left out."""
    model = nn.ModuleDict({"rnn": nn.GRU(8, 8, batch_first=True, bidirectional=True), "fc": nn.Linear(16, 5)})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True)
    criterion = nn.CTCLoss(zero_infinity=True)
    with script.join(model, optimizer) as peer:
        step = 0
        while not peer.done:
            step += 1
            inputs, targets = script.randn(4, 12, 8), script.randint(4, 4, 3) + 1
            input_sizes, target_sizes = torch.full((4,), 12), torch.tensor([3, 2, 3, 1])
            out = model["fc"](model["rnn"](inputs)[0]).log_softmax(-1).transpose(0, 1)
            loss = criterion(out, targets, input_sizes, target_sizes)
            if step == 3:
                loss = loss * float("inf")
            if not torch.isfinite(loss):
                continue
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 400)
            optimizer.step()
            script.losses.append(loss.item())


@loop(KIND, "sthalles/SimCLR simclr.py", learns=True)
def simclr(script: Script) -> None:
    """Two views of each picture; GradScaler; cosine after a warm-up."""
    model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 8))
    optimizer = torch.optim.Adam(model.parameters(), 3e-3, weight_decay=1e-4)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=12, eta_min=0, last_epoch=-1)
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    with script.join(model, optimizer, scheduler=scheduler) as peer:
        n_iter = 0
        while not peer.done:
            image = script.randn(16, 8)
            features = F.normalize(model(torch.cat([image + 0.1 * script.randn(16, 8) for _ in range(2)])), dim=1)
            labels = torch.cat([torch.arange(16)] * 2)
            same = torch.eye(32, dtype=torch.bool)
            wanted = (labels[None] == labels[:, None])[~same].view(32, -1)
            similarity = (features @ features.T)[~same].view(32, -1)
            logits = torch.cat([similarity[wanted].view(32, -1), similarity[~wanted].view(32, -1)], 1) / 0.07
            loss = F.cross_entropy(logits, torch.zeros(32, dtype=torch.long))
            optimizer.zero_grad()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            if n_iter >= 10:
                scheduler.step()
            script.losses.append(loss.item())
            n_iter += 1


@loop(KIND, "tkipf/pygcn train.py", learns=True)
def gcn(script: Script) -> None:
    """One graph, all of it at every step; the adjacency is a sparse tensor outside the model."""
    model = nn.ModuleDict({"gc1": nn.Linear(8, 16), "gc2": nn.Linear(16, 3)})
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2, weight_decay=5e-4)
    features, edges = script.randn(20, 8), script.randint(20, 2, 60)
    adj = torch.sparse_coo_tensor(edges, torch.full((60,), 1 / 3), (20, 20)).coalesce()
    labels, idx_train = features[:, :3].argmax(1), torch.arange(12)
    with script.join(model, optimizer) as peer:
        while not peer.done:
            model.train()
            optimizer.zero_grad()
            hidden = F.dropout(F.relu(torch.spmm(adj, model["gc1"](features)) + model["gc1"](features)), 0.1)
            output = F.log_softmax(torch.spmm(adj, model["gc2"](hidden)) + model["gc2"](hidden), dim=1)
            loss_train = F.nll_loss(output[idx_train], labels[idx_train])
            loss_train.backward()
            optimizer.step()
            script.losses.append(loss_train.item())


@loop(KIND, "vwxyzjn/cleanrl ppo.py")
def ppo(script: Script) -> None:
    """Roll-outs without gradients, minibatches over some epochs, a rate annealed by update, an early stop by KL."""
    agent = nn.ModuleDict(
        {
            "critic": nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)),
            "actor": nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2)),
        }
    )
    optimizer = torch.optim.Adam(agent.parameters(), lr=1e-3, eps=1e-5)
    with script.join(agent, optimizer) as peer:
        for update in range(1, 100):
            if peer.done:
                break
            optimizer.param_groups[0]["lr"] = (1.0 - (update - 1.0) / 100) * 1e-3
            b_obs = script.randn(16, 4)
            with torch.no_grad():
                before = torch.distributions.Categorical(logits=agent["actor"](b_obs))
                b_actions = before.sample()
                b_logprobs, b_values = before.log_prob(b_actions), agent["critic"](b_obs).view(-1)
            b_returns = (b_actions == (b_obs[:, 0] > 0)).float()
            b_advantages = b_returns - b_values
            for _ in range(2):
                for mb_inds in torch.randperm(16).split(8):
                    now = torch.distributions.Categorical(logits=agent["actor"](b_obs[mb_inds]))
                    logratio = now.log_prob(b_actions[mb_inds]) - b_logprobs[mb_inds]
                    ratio, advantage = logratio.exp(), b_advantages[mb_inds]
                    pg_loss = torch.max(-advantage * ratio, -advantage * ratio.clamp(0.8, 1.2)).mean()
                    v_loss = 0.5 * (agent["critic"](b_obs[mb_inds]).view(-1) - b_returns[mb_inds]).square().mean()
                    loss = pg_loss - 0.01 * now.entropy().mean() + 0.5 * v_loss
                    optimizer.zero_grad()
                    loss.backward()
                    nn.utils.clip_grad_norm_(agent.parameters(), 0.5)
                    optimizer.step()
                    if peer.done:
                        return
                if float(((ratio - 1) - logratio).mean()) > 0.5:
                    break


@loop(KIND, "yenchenlin/nerf-pytorch run_nerf.py", learns=True)
def nerf(script: Script) -> None:
    """A coarse and a fine network of one optimizer; the rate decays by hand, with ``global_step``."""
    model, model_fine = (nn.Sequential(nn.Linear(18, 16), nn.ReLU(), nn.Linear(16, 4)) for _ in range(2))
    grad_vars = list(model.parameters()) + list(model_fine.parameters())
    optimizer = torch.optim.Adam(params=grad_vars, lr=5e-3, betas=(0.9, 0.999))

    def embed(x: Tensor) -> Tensor:
        return torch.cat([f(x * 2.0**k) for k in range(3) for f in (torch.sin, torch.cos)], -1)

    with script.join(nn.ModuleList([model, model_fine]), optimizer) as peer:
        global_step = 0
        while not peer.done:
            rays = script.rand(32, 3)
            target_s = torch.sin(rays.sum(1, keepdim=True)).expand(-1, 3)
            optimizer.zero_grad()
            loss = sum(
                (torch.sigmoid(net(embed(rays))[:, :3]) - target_s).square().mean() for net in (model, model_fine)
            )
            loss.backward()
            optimizer.step()
            new_lrate = 5e-3 * (0.1 ** (global_step / 250_000))
            for param_group in optimizer.param_groups:
                param_group["lr"] = new_lrate
            script.losses.append(loss.item())
            global_step += 1


@loop(KIND, "rtqichen/torchdiffeq ode_demo.py", learns=True)
def neural_ode(script: Script) -> None:
    """The adjoint method: gradients are made in a backward of its own, and added to the parameters'."""

    class Adjoint(torch.autograd.Function):
        @staticmethod
        def forward(ctx, func, y0, *params):
            with torch.no_grad():
                y = [y0]
                for _ in range(4):
                    y.append(y[-1] + 0.25 * func(y[-1]))
            ctx.func, ctx.y, ctx.params = func, y, params
            return y[-1]

        @staticmethod
        def backward(ctx, grad):
            total = [torch.zeros_like(p) for p in ctx.params]
            for y in reversed(ctx.y[:-1]):
                with torch.enable_grad():
                    y = y.detach().requires_grad_(True)
                    found = torch.autograd.grad(ctx.func(y), (y, *ctx.params), 0.25 * grad)
                grad = grad + found[0]
                total = [a + b for a, b in zip(total, found[1:], strict=True)]
            return None, grad, *total

    func = nn.Sequential(nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, 2))
    optimizer = torch.optim.RMSprop(func.parameters(), lr=1e-2)
    with script.join(func, optimizer) as peer:
        while not peer.done:
            optimizer.zero_grad()
            batch_y0 = script.randn(16, 2)
            pred_y = Adjoint.apply(func, batch_y0, *func.parameters())
            loss = (pred_y - 0.5 * batch_y0.flip(1)).abs().mean()
            loss.backward()
            optimizer.step()
            script.losses.append(loss.item())


@loop(KIND, "nitarshan/bayes-by-backprop", learns=True)
def bayes_by_backprop(script: Script) -> None:
    """Weights are drawn anew in every forward pass; mean and rho are what is trained."""

    class BayesianLinear(nn.Module):
        def __init__(self, of: int, to: int) -> None:
            super().__init__()
            self.weight_mu = nn.Parameter(torch.empty(to, of).uniform_(-0.2, 0.2))
            self.weight_rho = nn.Parameter(torch.empty(to, of).uniform_(-5, -4))

        def forward(self, x: Tensor) -> Tensor:
            sigma = torch.log1p(self.weight_rho.exp())
            weight = self.weight_mu + sigma * torch.randn_like(sigma)
            self.kl = (0.5 * (self.weight_mu.square() + sigma.square()) - sigma.log()).sum()
            return F.linear(x, weight)

    net = nn.Sequential(BayesianLinear(4, 8), nn.ReLU(), BayesianLinear(8, 1))
    optimizer = torch.optim.Adam(net.parameters(), lr=2e-2)
    with script.join(net, optimizer) as peer:
        while not peer.done:
            x = script.randn(32, 4)
            net.zero_grad()
            samples = torch.stack([net(x) for _ in range(2)])
            misfit = (samples.mean(0) - x.sum(1, keepdim=True)).square().mean()
            (misfit + 1e-4 * (net[0].kl + net[2].kl)).backward()
            optimizer.step()
            script.losses.append(misfit.item())


@loop(KIND, "yaringal/multi-task-learning-example", learns=True)
def uncertainty_weights(script: Script) -> None:
    """The weights of two losses are parameters of the model; torch.compile of the body, checkpointed."""
    from torch.utils.checkpoint import checkpoint

    class MultiTask(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.trunk, self.heads = nn.Linear(4, 8), nn.ModuleList([nn.Linear(8, 1) for _ in range(2)])
            self.log_vars = nn.Parameter(torch.zeros(2))

        def forward(self, x: Tensor) -> list[Tensor]:
            hidden = checkpoint(lambda inputs: torch.tanh(self.trunk(inputs)), x, use_reentrant=False)
            return [head(hidden) for head in self.heads]

    model = MultiTask()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-2)
    with script.join(model, optimizer) as peer:
        while not peer.done:
            x = script.randn(16, 4)
            first, second = model(x)
            losses = (first[:, 0] - x[:, 0]).square().mean(), (second[:, 0] - x[:, 1]).square().mean()
            loss = sum(torch.exp(-v) * one + v for v, one in zip(model.log_vars, losses, strict=True))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            script.losses.append(float(sum(losses)))
