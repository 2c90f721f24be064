"""Loops of one optimizer, as most people write them."""

from __future__ import annotations

import math

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


@loop(KIND, "huggingface/transformers run_clm_no_trainer.py", learns=True, long=True)
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


@loop(KIND, "kuangliu/pytorch-cifar main.py", learns=True, long=True)
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


@loop(KIND, "salesforce/awd-lstm-lm main.py", learns=True, long=True)
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


@loop(KIND, "rtqichen/torchdiffeq ode_demo.py", learns=True, long=True)
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

    def loss() -> Tensor:
        batch_y0 = script.randn(16, 2)
        pred_y = Adjoint.apply(func, batch_y0, *func.parameters())
        return (pred_y - 0.5 * batch_y0.flip(1)).abs().mean()

    script.train(func, optimizer, loss)
