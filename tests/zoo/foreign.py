"""Optimizers, gradients and modules of other packages and of less usual kinds."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.zoo.harness import Script, loop, mlp, regression

KIND = "foreign param_groups, gradients, modules"


@loop(KIND, "huggingface/transformers Adafactor with relative_step", learns=True, long=True)
def adafactor(script: Script) -> None:
    """Its rate is None in its groups, and AdafactorSchedule reads it off."""
    from transformers.optimization import Adafactor, AdafactorSchedule

    model = mlp(8, 16, 1)
    optimizer = Adafactor(model.parameters(), scale_parameter=True, relative_step=True, warmup_init=False, lr=None)
    regression(script, model, optimizer, scheduler=AdafactorSchedule(optimizer))


@loop(KIND, "huggingface/transformers Adafactor with warmup_init, no schedule")
def adafactor_without_a_rate(script: Script) -> None:
    """Its rate stays None."""
    from transformers.optimization import Adafactor

    model = mlp(8, 16, 1)
    regression(script, model, Adafactor(model.parameters(), lr=None, relative_step=True, warmup_init=True))


class LARS(torch.optim.Optimizer):
    """As Barlow Twins' main.py: functions among a group's settings say which parameters are adapted."""

    def __init__(self, params, lr: float, weight_decay: float, **filters: object) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay, "momentum": 0.9, "eta": 0.02, **filters})

    @torch.no_grad()
    def step(self, closure=None) -> None:
        for g in self.param_groups:
            for p in g["params"]:
                dp = p.grad
                if not g["weight_decay_filter"](p):
                    dp = dp.add(p, alpha=g["weight_decay"])
                if not g["lars_adaptation_filter"](p):
                    dp = dp.mul(g["eta"] * p.norm() / (dp.norm() + 1e-8))
                mu = self.state[p].setdefault("mu", torch.zeros_like(p))
                mu.mul_(g["momentum"]).add_(dp)
                p.add_(mu, alpha=-g["lr"])


@loop(KIND, "facebookresearch/barlowtwins and vicreg, LARS", learns=True, long=True)
def barlow_lars(script: Script) -> None:
    def exclude_bias_and_norm(p: Tensor) -> bool:
        return p.ndim == 1

    model = mlp(8, 16, 1)
    optimizer = LARS(
        model.parameters(),
        0.1,
        1e-6,
        weight_decay_filter=exclude_bias_and_norm,
        lars_adaptation_filter=exclude_bias_and_norm,
    )
    regression(script, model, optimizer)


@loop(KIND, "facebookresearch/dlrm dlrm_s_pytorch.py", learns=True)
def dlrm(script: Script) -> None:
    """EmbeddingBags with sparse gradients beside dense MLPs, one SGD for all."""
    emb_l = nn.ModuleList([nn.EmbeddingBag(20, 4, mode="sum", sparse=True) for _ in range(3)])
    dlrm = nn.ModuleDict({"emb_l": emb_l, "bot_l": mlp(4, 8, 4), "top_l": mlp(10, 8, 1)})
    parameters = [
        {"params": [p for emb in emb_l for p in emb.parameters()], "lr": 0.5},
        {"params": dlrm["bot_l"].parameters(), "lr": 0.5},
        {"params": dlrm["top_l"].parameters(), "lr": 0.5},
    ]
    optimizer = torch.optim.SGD(parameters, lr=0.5)

    def loss() -> Tensor:
        dense_x, lS_i = script.randn(32, 4), [script.randint(20, 32) for _ in range(3)]
        T = ((lS_i[0] > 9) ^ (dense_x[:, 0] > 0)).float()
        x = dlrm["bot_l"](dense_x)
        ly = [emb(i, torch.arange(32)) for emb, i in zip(emb_l, lS_i, strict=True)]
        stacked = torch.stack([x, *ly], 1)
        at = torch.tril_indices(4, 4, -1)
        R = torch.cat([x, torch.bmm(stacked, stacked.transpose(1, 2))[:, at[0], at[1]]], 1)
        return F.binary_cross_entropy_with_logits(dlrm["top_l"](R).view(-1), T)

    script.train(dlrm, optimizer, loss)


@loop(KIND, "Andras7/word2vec-pytorch trainer.py", learns=True)
def skip_gram(script: Script) -> None:
    """Nothing but sparse embeddings, stepped by SparseAdam; the rate falls with a cosine."""

    class SkipGram(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.u_embeddings, self.v_embeddings = (nn.Embedding(30, 8, sparse=True) for _ in range(2))
            nn.init.uniform_(self.u_embeddings.weight.data, -0.5 / 8, 0.5 / 8)
            nn.init.constant_(self.v_embeddings.weight.data, 0)

        def forward(self, u: Tensor, v: Tensor, neg: Tensor) -> Tensor:
            emb_u, emb_v = self.u_embeddings(u), self.v_embeddings(v)
            score = -F.logsigmoid((emb_u * emb_v).sum(1).clamp(-10, 10))
            neg_score = torch.bmm(self.v_embeddings(neg), emb_u.unsqueeze(2)).squeeze().clamp(-10, 10)
            return (score - F.logsigmoid(-neg_score).sum(1)).mean()

    model = SkipGram()
    optimizer = torch.optim.SparseAdam(list(model.parameters()), lr=5e-2)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 100)

    def loss() -> Tensor:
        pos_u = script.randint(30, 32)
        return model(pos_u, (pos_u + 1) % 30, script.randint(30, 32, 3))

    script.train(model, optimizer, loss, scheduler=scheduler, begins=lambda step: scheduler.step())


loop(
    KIND,
    "the same, by a method that changes gradients",
    name="skip_gram_by_scaffold",
    refused="u_embeddings",
    outer={"preset": "scaffold"},
)(skip_gram)


@loop(KIND, "huggingface/peft LoRA on a frozen base", learns=True, long=True)
def peft_lora(script: Script) -> None:
    from peft import LoraConfig, get_peft_model
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(vocab_size=16, n_positions=8, n_embd=8, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=0)
    lora = LoraConfig(r=2, lora_alpha=16, target_modules=["c_attn"], lora_dropout=0.0, fan_in_fan_out=True)
    model = get_peft_model(GPT2LMHeadModel(config), lora)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-2)

    def loss() -> Tensor:
        ids = (script.randint(16, 8, 1) + torch.arange(8)) % 16
        return model(input_ids=ids, labels=ids).loss

    script.train(model, optimizer, loss)


@loop(KIND, "torch.compile of the model, by the eager backend", learns=True, long=True)
def compiled(script: Script) -> None:
    model = torch.compile(mlp(8, 16, 1), backend="eager")
    regression(script, model, torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True))


@loop(KIND, "lazy modules after their first batch", learns=True)
def lazy_modules(script: Script) -> None:
    model = nn.Sequential(nn.LazyLinear(16), nn.LazyBatchNorm1d(), nn.ReLU(), nn.LazyLinear(1))
    model(script.randn(4, 8))
    regression(script, model, torch.optim.Adam(model.parameters(), lr=1e-2))


@loop(KIND, "lazy modules before their first batch", refused="0.weight")
def lazy_modules_too_early(script: Script) -> None:
    model = nn.Sequential(nn.LazyLinear(16), nn.ReLU(), nn.LazyLinear(1))
    regression(script, model, torch.optim.Adam(model.parameters(), lr=1e-2))


@loop(KIND, "accelerate's init_empty_weights, left on the meta device", refused="meta")
def meta_device(script: Script) -> None:
    with torch.device("meta"):
        model = mlp(8, 16, 1)
    regression(script, model, torch.optim.Adam(model.parameters(), lr=1e-2))


@loop(KIND, "pytorch/examples imagenet with DataParallel", learns=True)
def data_parallel(script: Script) -> None:
    """The second one only has the GPUs for it, so only its names begin with ``module.``."""
    model: nn.Module = mlp(8, 16, 1)
    if script.number:
        model = nn.DataParallel(model)
    regression(script, model, torch.optim.SGD(model.parameters(), 0.02, momentum=0.9))


@loop(KIND, "neuraloperator/neuraloperator: complex weights of a Fourier layer", refused="complex")
def fourier_operator(script: Script) -> None:
    class Spectral(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weights1 = nn.Parameter(torch.rand(1, 1, 4, dtype=torch.cfloat))

        def forward(self, x: Tensor) -> Tensor:
            found = torch.fft.rfft(x[:, None])[:, :, :4]
            return torch.fft.irfft(torch.einsum("bix,iox->box", found, self.weights1), n=8)[:, 0, :1]

    model = Spectral()
    regression(script, model, torch.optim.Adam(model.parameters(), lr=1e-2))


@loop(KIND, "pytorch tutorial on model ensembling with vmap", learns=True, long=True)
def deep_ensemble(script: Script) -> None:
    """The members' parameters are stacked and in no module; join has them in a ParameterDict."""
    from torch.func import functional_call, stack_module_state

    members = [mlp(8, 16, 1) for _ in range(3)]
    stacked, _ = stack_module_state(members)
    params = nn.ParameterDict({name.replace(".", "_"): p for name, p in stacked.items()})
    optimizer = torch.optim.Adam(params.values(), lr=1e-2)

    def call(held: dict[str, Tensor], x: Tensor) -> Tensor:
        return functional_call(members[0], held, (x,))

    def loss() -> Tensor:
        x = script.randn(32, 8)
        held = {name: params[name.replace(".", "_")] for name in stacked}
        return (torch.vmap(call, in_dims=(0, None))(held, x) - x.sum(1, keepdim=True)).square().mean()

    script.train(params, optimizer, loss)


@loop(KIND, "artidoro/qlora: adapters on a base of bytes", learns=True)
def quantised_base(script: Script) -> None:
    """The base is int8 with scales, parameters that want no gradient."""

    class Int8Linear(nn.Module):
        def __init__(self, of: int, to: int) -> None:
            super().__init__()
            weight = torch.randn(to, of) / math.sqrt(of)
            scale = weight.abs().amax(1, keepdim=True) / 127
            self.weight = nn.Parameter((weight / scale).round().to(torch.int8), requires_grad=False)
            self.scale = nn.Parameter(scale, requires_grad=False)
            self.lora_A, self.lora_B = nn.Parameter(torch.randn(2, of) * 0.3), nn.Parameter(torch.zeros(to, 2))

        def forward(self, x: Tensor) -> Tensor:
            return x @ (self.weight.float() * self.scale).t() + x @ self.lora_A.t() @ self.lora_B.t()

    model = nn.Sequential(Int8Linear(8, 16), nn.ReLU(), Int8Linear(16, 1))
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=2e-2)
    regression(script, model, optimizer)


class DPOptimizer(torch.optim.Optimizer):
    """As pytorch/opacus has it: around another one, without a call of the base class's ``__init__``."""

    def __init__(self, optimizer: torch.optim.Optimizer, noise_multiplier: float, max_grad_norm: float) -> None:
        self.original_optimizer = optimizer
        self.noise_multiplier, self.max_grad_norm = noise_multiplier, max_grad_norm

    @property
    def param_groups(self) -> list[dict[str, object]]:
        return self.original_optimizer.param_groups

    @property
    def state(self) -> object:
        return self.original_optimizer.state

    @property
    def defaults(self) -> object:
        return self.original_optimizer.defaults

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.original_optimizer.zero_grad(set_to_none)

    def state_dict(self) -> dict[str, object]:
        return self.original_optimizer.state_dict()

    def load_state_dict(self, state_dict: dict[str, object]) -> None:
        self.original_optimizer.load_state_dict(state_dict)

    def step(self, closure=None) -> object:
        for group in self.param_groups:
            for p in group["params"]:
                p.grad.mul_(min(1.0, self.max_grad_norm / float(p.grad.norm() + 1e-6)))
                p.grad.add_(torch.randn_like(p.grad), alpha=self.noise_multiplier * 1e-3)
        return self.original_optimizer.step()


@loop(KIND, "pytorch/opacus DPOptimizer", learns=True)
def private_sgd(script: Script) -> None:
    model = mlp(8, 16, 1)
    optimizer = DPOptimizer(torch.optim.SGD(model.parameters(), lr=0.05), noise_multiplier=1.0, max_grad_norm=1.0)
    regression(script, model, optimizer)


class SophiaG(torch.optim.Optimizer):
    """As Liuhong99/Sophia has it: the curvature is told beside the steps."""

    def __init__(self, params, lr: float = 1e-2, betas: tuple[float, float] = (0.9, 0.9), rho: float = 0.04) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "rho": rho, "weight_decay": 0.0})

    def _state(self, p: Tensor) -> dict[str, Tensor]:
        if not self.state[p]:
            self.state[p].update(step=torch.zeros(()), exp_avg=torch.zeros_like(p), hessian=torch.zeros_like(p))
        return self.state[p]

    @torch.no_grad()
    def update_hessian(self) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                self._state(p)["hessian"].mul_(group["betas"][1]).addcmul_(p.grad, p.grad, value=1 - group["betas"][1])

    @torch.no_grad()
    def step(self, closure=None, bs: int = 32) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                state = self._state(p)
                state["step"] += 1
                state["exp_avg"].lerp_(p.grad, 1 - group["betas"][0])
                ratio = (state["exp_avg"].abs() / (group["rho"] * bs * state["hessian"] + 1e-15)).clamp(None, 1)
                p.addcmul_(state["exp_avg"].sign(), ratio, value=-group["lr"])


@loop(KIND, "Liuhong99/Sophia train_sophiag.py", learns=True, long=True)
def sophia(script: Script) -> None:
    """``step(bs=...)``, and every k-th time a backward pass of drawn labels that no step follows."""
    model = mlp(8, 16, 4)
    optimizer = SophiaG(model.parameters(), lr=2e-2)
    with script.join(model, optimizer) as peer:
        iter_num = 0
        while not peer.done:
            x = script.randn(32, 8)
            loss = F.cross_entropy(model(x), x[:, :4].argmax(1))
            loss.backward()
            optimizer.step(bs=32)
            optimizer.zero_grad(set_to_none=True)
            iter_num += 1
            if iter_num % 2 == 1:
                logits = model(x)
                drawn = torch.distributions.Categorical(logits=logits).sample()
                F.cross_entropy(logits, drawn).backward()
                optimizer.update_hessian()
                optimizer.zero_grad(set_to_none=True)
            script.losses.append(loss.item())


@loop(KIND, "pytorch/torchtune optimizer_in_bwd", learns=True)
def optimizer_in_backward(script: Script) -> None:
    """One optimizer for each parameter, stepped by a hook as soon as its gradient is there."""
    model = mlp(8, 16, 1)
    optim_dict = {p: torch.optim.AdamW([p], lr=1e-2) for p in model.parameters()}

    def optim_step(param: Tensor) -> None:
        optim_dict[param].step()
        optim_dict[param].zero_grad()

    with script.join(model, list(optim_dict.values())) as peer:
        for p in model.parameters():
            p.register_post_accumulate_grad_hook(optim_step)
        while not peer.done:
            x = script.randn(32, 8)
            loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
            loss.backward()
            script.losses.append(loss.item())
