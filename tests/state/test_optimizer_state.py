import copy
import json
import random

import numpy
import pytest
import torch

from decentral.errors import ConfigError
from decentral.state.checkpoint import flatten, load_newest, random_state, save, set_random_state, unflatten


def equal(left, right):
    if isinstance(left, torch.Tensor):
        return left.dtype == right.dtype and torch.equal(left, right)
    if isinstance(left, numpy.ndarray):
        return left.dtype == right.dtype and numpy.array_equal(left, right)
    if isinstance(left, dict):
        return list(left) == list(right) and all(equal(left[k], right[k]) for k in left)
    if isinstance(left, list | tuple):
        pairs = zip(left, right, strict=False)
        return type(left) is type(right) and len(left) == len(right) and all(equal(a, b) for a, b in pairs)
    return type(left) is type(right) and (left == right or left != left)


def through_json(tree):
    tensors, document = flatten(tree, "x")
    return unflatten(json.loads(json.dumps(document, allow_nan=False)), tensors)


def make(optimizer_class, **options):
    generator = torch.Generator().manual_seed(0)
    model = torch.nn.Linear(4, 3)
    options = copy.deepcopy(options)  # a learning rate that is a tensor is changed in place
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(generator=generator)
    optimizer = optimizer_class(model.parameters(), **options)
    return model, optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (step + 1))


def train(model, optimizer, schedule, steps):
    for step in steps:
        data = torch.randn(2, 4, generator=torch.Generator().manual_seed(step))
        model(data).square().sum().backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()


@pytest.mark.parametrize(
    ("optimizer_class", "options"),
    [
        (torch.optim.AdamW, {"lr": 1e-2, "weight_decay": 0.1}),
        (torch.optim.AdamW, {"lr": torch.tensor(1e-2), "amsgrad": True}),
        (torch.optim.SGD, {"lr": 1e-2, "momentum": 0.9, "nesterov": True}),
        (torch.optim.RMSprop, {"lr": 1e-3, "centered": True}),
        (torch.optim.Adagrad, {"lr": 1e-2}),
    ],
)
def test_resumed_training_takes_the_same_steps_bit_for_bit(tmp_path, optimizer_class, options):
    straight, resumed = make(optimizer_class, **options), make(optimizer_class, **options)
    train(*straight, range(10))
    train(*resumed, range(6))
    state = [part.state_dict() for part in resumed]
    tensors, document = flatten(state, "inner")
    save(tmp_path, "round-1", tensors, document)

    model, optimizer, schedule = make(optimizer_class, **options)
    found = load_newest(tmp_path)
    for part, stored in zip((model, optimizer, schedule), unflatten(found.meta, found.tensors), strict=True):
        part.load_state_dict(stored)
    train(model, optimizer, schedule, range(6, 10))
    for one, other in zip(straight[0].parameters(), model.parameters(), strict=True):
        assert torch.equal(one, other)
    assert equal(straight[1].state_dict(), optimizer.state_dict())
    assert equal(straight[2].state_dict(), schedule.state_dict())


SCHEDULES = [
    lambda o: torch.optim.lr_scheduler.MultiStepLR(o, [2, 2, 5]),
    lambda o: torch.optim.lr_scheduler.OneCycleLR(o, max_lr=0.1, total_steps=20),
    lambda o: torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(o, 4),
    lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda step: 1 / (step + 1)),
    lambda o: torch.optim.lr_scheduler.SequentialLR(
        o,
        [torch.optim.lr_scheduler.ConstantLR(o, 0.1), torch.optim.lr_scheduler.ExponentialLR(o, 0.9)],
        milestones=[2],
    ),
]


@pytest.mark.parametrize("make_schedule", SCHEDULES)
def test_every_kind_of_schedule_resumes(make_schedule):
    def start():
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1, momentum=0.9)
        return optimizer, make_schedule(optimizer)

    def step(optimizer, schedule, count):
        rates = []
        for _ in range(count):
            optimizer.step()
            schedule.step()
            rates.append(schedule.get_last_lr())
        return rates

    straight, resumed = start(), start()
    step(*straight, 3)
    for part, source in zip(resumed, straight, strict=True):
        part.load_state_dict(through_json(source.state_dict()))
    assert step(*straight, 5) == step(*resumed, 5)


@pytest.mark.parametrize(
    "tree",
    [
        {0: "integer key", "0": "text key", (1, 2): "tuple key", None: 1, True: 2},
        [float("inf"), -float("inf"), float("nan"), -0.0, 5e-324, 0.1],
        (1, [2, (3,)], {"a": ()}),
        {"tensor": {"float": ["the words of the format"]}},
        torch.tensor(3.5, dtype=torch.float64),
        {"a": torch.arange(3, dtype=torch.uint8), "b": numpy.arange(3, dtype=numpy.uint32)},
        2**70,
    ],
)
def test_every_kind_of_value_survives_json(tree):
    assert equal(through_json(tree), tree)


def test_numpy_scalars_become_plain_numbers():
    assert through_json({"lr": numpy.float64(0.5)}) == {"lr": 0.5}


def test_flatten_copies_so_training_may_go_on():
    live = torch.zeros(3)
    tensors, document = flatten({"exp_avg": live}, "x")
    live += 1
    restored = unflatten(document, tensors)["exp_avg"]
    assert torch.equal(restored, torch.zeros(3))
    restored += 1
    assert torch.equal(tensors["x/0"], torch.zeros(3))


def test_a_value_without_a_plain_form_is_named_by_its_place():
    with pytest.raises(ConfigError, match=r"inner\['groups'\]\[1\] is a object: only numbers"):
        flatten({"groups": [1, object()]}, "inner")


def test_a_state_that_contains_itself_is_refused():
    loop = []
    loop.append(loop)
    with pytest.raises(ConfigError, match="nested deeper"):
        flatten(loop, "inner")


@pytest.mark.parametrize(
    "document", [{"tensor": "gone"}, {"what": 1}, {}, {"dict": 3}, {"float": "abc"}, {"a": 1, "b": 2}]
)
def test_a_foreign_document_is_a_config_error(document):
    with pytest.raises(ConfigError, match="stored state does not decode"):
        unflatten(document, {})


def test_the_random_generators_go_on_where_they_were():
    before = random_state()
    try:
        state = through_json(random_state())
        drawn = [torch.rand(3).tolist(), random.random(), numpy.random.rand()]
        set_random_state(state)
        assert [torch.rand(3).tolist(), random.random(), numpy.random.rand()] == drawn
    finally:
        set_random_state(before)
