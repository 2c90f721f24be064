"""Parameters that are replaced, resized, thawed or added after the join."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from tests.zoo.harness import Script, loop

KIND = "parameters replaced or resized"


@loop(KIND, "fastai gradual unfreezing", refused="was not trained")
def gradual_unfreezing(script: Script) -> None:
    """Only the head is trained at first; freeze_to(-2) thaws the body after an epoch."""
    learn = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
    learn[0].requires_grad_(False)
    opt = torch.optim.AdamW(learn.parameters(), lr=1e-3)
    with script.join(learn, opt) as peer:
        step = 0
        while not peer.done:
            if step == 5:
                learn[0].requires_grad_(True)
            x = script.randn(16, 8)
            F.mse_loss(learn(x), x.sum(1, keepdim=True)).backward()
            opt.step()
            opt.zero_grad()
            step += 1


@loop(KIND, "huggingface/peft freeze of a layer in the midst of training", refused="is frozen now")
def frozen_after_warmup(script: Script) -> None:
    """Embeddings are frozen for good after the warm-up."""
    model = nn.ModuleDict({"embed": nn.Embedding(16, 8), "head": nn.Linear(8, 16)})
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with script.join(model, optimizer) as peer:
        step = 0
        while not peer.done:
            if step == 5:
                model["embed"].requires_grad_(False)
            ids = script.randint(16, 16)
            F.cross_entropy(model["head"](model["embed"](ids)), ids).backward()
            optimizer.step()
            optimizer.zero_grad()
            step += 1


@loop(KIND, "akanimax/pro_gan_pytorch", refused="blocks.1")
def progressive_growing(script: Script) -> None:
    """A block is added for the next resolution, and the optimizer told of it by add_param_group."""
    gen = nn.ModuleDict({"initial": nn.Linear(4, 8), "blocks": nn.ModuleList([nn.Linear(8, 8)])})
    optimizer = torch.optim.Adam(gen.parameters(), lr=1e-3, betas=(0.0, 0.99))
    with script.join(gen, optimizer) as peer:
        step = 0
        while not peer.done:
            if step == 5:
                gen["blocks"].append(nn.Linear(8, 8))
                optimizer.add_param_group({"params": gen["blocks"][-1].parameters()})
            x = gen["initial"](script.randn(16, 4))
            for block in gen["blocks"]:
                x = block(F.leaky_relu(x, 0.2))
            optimizer.zero_grad()
            (x - 1).square().mean().backward()
            optimizer.step()
            step += 1


@loop(KIND, "huggingface/transformers resize_token_embeddings", refused="embed.weight")
def resized_embeddings(script: Script) -> None:
    """Tokens are added: a longer embedding takes the first one's place, and a new optimizer is made."""
    model = nn.ModuleDict({"embed": nn.Embedding(16, 8), "head": nn.Linear(8, 20)})
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with script.join(model, optimizer) as peer:
        step, vocab = 0, 16
        while not peer.done:
            if step == 5:
                old, vocab = model["embed"], 20
                model["embed"] = nn.Embedding(vocab, 8)
                model["embed"].weight.data[:16] = old.weight.data
                optimizer.param_groups[0]["params"] = list(model.parameters())
            ids = script.randint(vocab, 16)
            F.cross_entropy(model["head"](model["embed"](ids)), ids).backward()
            optimizer.step()
            optimizer.zero_grad()
            step += 1


@loop(KIND, "pytorch/vision fine-tuning tutorial, model.fc = nn.Linear(...) after the join", refused="2.weight")
def new_head(script: Script) -> None:
    """The head is a new one of the same shape: what join holds is trained by nobody any more."""
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    with script.join(model, optimizer) as peer:
        model[2] = nn.Linear(16, 1)
        optimizer.param_groups[0]["params"] = list(model.parameters())
        while not peer.done:
            x = script.randn(16, 8)
            F.mse_loss(model(x), x.sum(1, keepdim=True)).backward()
            optimizer.step()
            optimizer.zero_grad()


@loop(KIND, "rahulvigneswaran/Lottery-Ticket-Hypothesis-in-Pytorch with torch.nn.utils.prune", refused="weight_orig")
def pruned(script: Script) -> None:
    """Pruning renames the weight in the midst of the run, and puts a mask beside it."""
    from torch.nn.utils import prune

    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    with script.join(model, optimizer) as peer:
        step = 0
        while not peer.done:
            if step == 5:
                prune.l1_unstructured(model[0], "weight", amount=0.3)
            x = script.randn(16, 8)
            F.mse_loss(model(x), x.sum(1, keepdim=True)).backward()
            optimizer.step()
            optimizer.zero_grad()
            step += 1


@loop(KIND, "other storage for the same parameter: p.data = ..., as RAdam of LiyuanLucasLiu writes", learns=True)
def other_storage(script: Script) -> None:
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    with script.join(model, optimizer) as peer:
        while not peer.done:
            x = script.randn(16, 8)
            loss = F.mse_loss(model(x), x.sum(1, keepdim=True))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            for p in model.parameters():
                p.data = p.data.clone().clamp(-2, 2)
            script.losses.append(loss.item())
