"""Small models, one for each feature in which a graph must match eager. Each maps (4, 6, 8) to any shape."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm, weight_norm
from torch.utils.checkpoint import checkpoint

BATCH, TIME, WIDTH = 4, 6, 8
MODELS: dict[str, Callable[[], nn.Module]] = {}


class Fn(nn.Module):
    """Wrap a plain function `body(self, x)` and its named parts in a module that deepcopy can copy."""

    def __init__(self, body: Callable[..., Any], **parts: Any) -> None:
        super().__init__()
        self.body = body
        for name, part in parts.items():
            if isinstance(part, Tensor) and not isinstance(part, nn.Parameter):
                self.register_buffer(name, part)
            else:
                setattr(self, name, part)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.body(self, *args, **kwargs)


def linear(out: int = WIDTH) -> nn.Linear:
    return nn.Linear(WIDTH, out)


def mlp() -> nn.Sequential:
    return nn.Sequential(linear(16), nn.GELU(), nn.Linear(16, WIDTH))


def dropping() -> nn.Sequential:
    return nn.Sequential(linear(), nn.Dropout(0.5), nn.Tanh(), nn.Dropout(0.2))


def model(make: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    MODELS[make.__name__.strip("_")] = make
    return make


def body(**parts: Callable[[], Any]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register `Fn(function, **parts)` under the function's name."""

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        MODELS[function.__name__.strip("_")] = lambda: Fn(function, **{name: part() for name, part in parts.items()})
        return function

    return register


def parameter(*shape: int) -> Callable[[], nn.Parameter]:
    return lambda: nn.Parameter(torch.randn(*shape))


model(mlp)
MODELS |= {
    "dropout": dropping,
    "layer_norm": lambda: nn.Sequential(linear(), nn.LayerNorm(WIDTH), linear()),
    "rms_norm": lambda: nn.Sequential(linear(), nn.RMSNorm(WIDTH), linear()),
    "group_norm": lambda: nn.Sequential(nn.GroupNorm(3, TIME), linear()),
    "batch_norm": lambda: nn.Sequential(nn.BatchNorm1d(TIME), linear(), nn.ReLU(), nn.BatchNorm1d(TIME)),
    "instance_norm_stats": lambda: nn.InstanceNorm1d(TIME, affine=True, track_running_stats=True),
    "conv1d": lambda: nn.Sequential(nn.Conv1d(TIME, 4, 3, padding=1), nn.ReLU(inplace=True), nn.Conv1d(4, 2, 3)),
    "transformer_layer": lambda: nn.TransformerEncoderLayer(WIDTH, 2, 16, dropout=0.1, batch_first=True),
    "weight_norm": lambda: weight_norm(linear()),
    "spectral_norm": lambda: spectral_norm(linear()),
    "frozen": lambda: nn.Sequential(linear().requires_grad_(False), nn.Tanh(), linear()),
}


@body(qkv=lambda: linear(3 * WIDTH), out=linear)
def sdpa(m: Any, x: Tensor) -> Tensor:
    q, k, v = m.qkv(x).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4).unbind(0)
    y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    return m.out(y.transpose(1, 2).flatten(2)) + x


@body(qkv=lambda: linear(3 * WIDTH), out=linear)
def manual_attention(m: Any, x: Tensor) -> Tensor:
    q, k, v = m.qkv(x).chunk(3, -1)
    scores = (q @ k.transpose(1, 2)) / WIDTH**0.5
    mask = torch.ones(TIME, TIME, dtype=torch.bool).triu(1)
    return m.out(F.dropout(scores.masked_fill(mask, float("-inf")).softmax(-1), 0.1) @ v)


@body(table=lambda: nn.Embedding(11, WIDTH, padding_idx=3), head=linear)
def embedding(m: Any, x: Tensor) -> Tensor:
    ids = (x.detach() * 5).long().remainder(11)
    logits = F.linear(m.table(ids.flip(0)[:, 0]), m.table.weight)
    return m.head(m.table(ids)).mean(2) + logits.logsumexp(-1).mean() + x


@body(table=lambda: nn.EmbeddingBag(11, WIDTH, mode="sum"))
def embedding_bag(m: Any, x: Tensor) -> Tensor:
    return m.table((x.detach() * 5).long().remainder(11).flatten(1)) + x.mean(1)


@body(inner=linear, bias=parameter(WIDTH))
def in_place(m: Any, x: Tensor) -> Tensor:
    y = m.inner(x).relu_() * 1
    y.add_(m.bias).mul_(0.5)
    y.masked_fill_(y > 0.4, 0.1)
    y[:, 1] = x[:, 0] * 2
    y[..., ::2] += 1
    y.index_add_(1, torch.arange(3).mul_(2).clamp_(max=2), x[:, :3])
    z = torch.zeros_like(y).scatter_(2, y.argsort(-1), y)
    z.scatter_add_(1, torch.zeros(BATCH, 1, WIDTH, dtype=torch.long), y[:, :1])
    z[:, 2].copy_(m.bias)
    z.transpose(0, 1)[0].sub_(1).clamp_(-3, 3)
    z.unsqueeze_(0).squeeze_(0).transpose_(0, 1)
    return z.clone().zero_().add_(z)


@body(inner=linear, scale=parameter(1, WIDTH))
def views(m: Any, x: Tensor) -> Tensor:
    y = m.inner(x)
    a, b = y.chunk(2, -1)
    first, *_, last = y.unbind(1)
    window = y.as_strided((BATCH, 3, 4), (TIME * WIDTH, 7, 2), 1)
    y = y + m.scale.expand(BATCH, TIME, WIDTH) * y.permute(2, 1, 0).reshape(BATCH, TIME, WIDTH)
    y = torch.cat([y, y.diagonal(dim1=1, dim2=2).unsqueeze(1).expand(-1, -1, TIME)[..., :1].expand(-1, -1, WIDTH)], 1)
    parts = (a * b, first - last, window, y.unfold(1, 3, 2), y.narrow(1, 1, 2).movedim(0, -1), y.view(-1)[5:9])
    return torch.cat([p.flatten() for p in parts])


@model
def tied() -> nn.Module:
    m = Fn(_tied, one=linear(), two=linear())
    m.two.weight = m.one.weight
    return m


def _tied(m: Any, x: Tensor) -> Tensor:
    return m.two(m.one(x).tanh()) @ m.one.weight


@body(inner=mlp)
def checkpointed(m: Any, x: Tensor) -> Tensor:
    return checkpoint(m.inner, x, use_reentrant=False) + x


@body(inner=dropping, outer=dropping)
def checkpointed_dropout(m: Any, x: Tensor) -> Tensor:
    x = checkpoint(m.inner, m.outer(x), use_reentrant=False)
    return m.outer(checkpoint(m.outer, x, use_reentrant=False))


@body(inner=dropping, outer=mlp)
def nested_checkpoint(m: Any, x: Tensor) -> Tensor:
    def region(x: Tensor) -> Tensor:
        return F.dropout(m.outer(checkpoint(m.inner, x, use_reentrant=False)), 0.3) * 2

    return checkpoint(region, checkpoint(region, x, use_reentrant=False), use_reentrant=False)


@body(inner=dropping)
def checkpoint_without_rng(m: Any, x: Tensor) -> Tensor:
    """The recomputation draws a new mask, so the gradients are wrong in eager, and a graph must match them."""
    return checkpoint(m.inner, x, use_reentrant=False, preserve_rng_state=False)


class Swish(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, beta: float, weight: Tensor) -> tuple[Tensor, Tensor]:
        gate = torch.sigmoid(beta * x)
        ctx.save_for_backward(x, gate, weight)
        ctx.beta = beta
        ctx.mark_non_differentiable(gate)
        return x * gate * weight, gate

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Any) -> tuple[Tensor, None, Tensor]:
        x, gate, weight = ctx.saved_tensors
        slope = gate + ctx.beta * x * gate * (1 - gate)
        return grad * slope * weight, None, (grad * x * gate).sum_to_size(weight.shape)


@body(inner=linear, weight=parameter(WIDTH))
def custom_function(m: Any, x: Tensor) -> Tensor:
    y, gate = Swish.apply(m.inner(x), 1.5, m.weight)
    return y + gate


@body(stem=lambda: nn.Conv2d(1, 4, 3, padding=1), norm=lambda: nn.BatchNorm2d(4), down=lambda: nn.Conv2d(4, 2, 3, 2))
def conv2d(m: Any, x: Tensor) -> Tensor:
    return m.down(F.max_pool2d(F.dropout2d(m.norm(m.stem(x.unsqueeze(1))).relu_(), 0.2), 2, 1))


@body(rnn=lambda: nn.LSTM(WIDTH, 5, 2, batch_first=True, dropout=0.2), head=lambda: nn.Linear(5, 3))
def lstm(m: Any, x: Tensor) -> Tensor:
    y, (h, c) = m.rnn(x)
    return torch.cat([m.head(y).flatten(), h.flatten(), c.flatten()])


@body(cell=lambda: nn.GRUCell(WIDTH, WIDTH), lstm=lambda: nn.LSTMCell(WIDTH, WIDTH))
def cells(m: Any, x: Tensor) -> Tensor:
    h, state = x[:, 0], None
    for t in range(TIME):
        h = m.cell(x[:, t], h)
        state = m.lstm(h, state)
    return state[0] + state[1] + h


@body(inner=linear)
def reductions(m: Any, x: Tensor) -> Tensor:
    y = m.inner(x)
    values, indices = y.topk(3, -1)
    z = y.cumsum(1).gather(-1, indices) + values.logsumexp(-1, keepdim=True)
    z = torch.where(z > 0, z, z * 0.1) + torch.einsum("btd,bsd->bts", y, y).sort(-1).values[..., :3]
    # CUDA's median is not deterministic.
    middle = y.amax(-1, keepdim=True) if y.is_cuda else y.median(-1, keepdim=True).values
    product = y.cumprod(-1)[..., :3]
    if not y.is_cuda and torch.__version__ < "2.13":  # cumprod's backward uses another formula under a dispatch mode
        product = product.detach()
    return z + y.var(-1, keepdim=True) + middle + product + y.norm()


@body(one=linear, two=linear)
def autocast(m: Any, x: Tensor) -> Tensor:
    with torch.autocast(x.device.type, torch.bfloat16):
        return F.layer_norm(m.two(m.one(x).relu()), (WIDTH,)) + m.one.weight.sum()


@body(one=linear)
def autocast_tied(m: Any, x: Tensor) -> Tensor:
    """Eager casts the weight once and adds its three gradients in bf16."""
    with torch.autocast(x.device.type, torch.bfloat16):
        return m.one(m.one(m.one(x)))


@body(one=linear, inner=dropping)
def autocast_checkpoint(m: Any, x: Tensor) -> Tensor:
    with torch.autocast(x.device.type, torch.bfloat16):
        return checkpoint(m.inner, m.one(x), use_reentrant=False)


@body(one=linear, spare=linear)
def unused(m: Any, x: Tensor) -> Tensor:
    return m.one(x)


@body(one=lambda: linear().bfloat16())
def bf16(m: Any, x: Tensor) -> Tensor:
    return m.one(x.bfloat16()).tanh()


@body(inner=linear, weights=lambda: nn.ParameterList([torch.randn(WIDTH) for _ in range(3)]))
def tensor_lists(m: Any, x: Tensor) -> Tensor:
    rows = [m.inner(x[:, t]) * m.weights[t % 3] for t in range(TIME)]
    stacked = torch.stack(rows, 1)
    scales = torch._foreach_mul(list(m.weights), 2.0)
    noise = torch._foreach_add([w.detach() for w in m.weights], 1.0)
    torch._foreach_mul_(noise, 0.5)
    a, b = torch.cat([stacked, *(s.expand(BATCH, 1, WIDTH) for s in scales)], 1).split([2, TIME + 1], 1)
    return torch.cat(torch.meshgrid(a.sum((0, 2)), b.sum((0, 2)), indexing="ij"), 1) * torch.stack(noise).sum()


@body(inner=linear)
def constants(m: Any, x: Tensor) -> Tensor:
    count, table = torch.tensor(0.5), torch.tensor([1.0] * WIDTH)
    for _ in range(3):
        count += 0.25
        table.mul_(count)
    table[2:4] = torch.tensor([7.0, 8.0])
    state = torch.zeros(WIDTH)
    for t in range(TIME):
        state = state.add_(table * t)
    return m.inner(x) * table + state + torch.arange(WIDTH) * torch.full((), 0.5).add_(count)


@body(inner=linear)
def other_constants(m: Any, x: Tensor) -> Tensor:
    """No operation marks these constructors, but each replay must still start from their original values."""
    tensors = [torch.as_tensor([1.0] * WIDTH), torch.asarray([2.0] * WIDTH), x.new_tensor([3.0] * WIDTH)]
    for constant in tensors:
        constant.add_(x.detach()[0, 0])
    return m.inner(x) * torch.stack(tensors).sum(0)


@body(inner=linear, average=lambda: torch.zeros(WIDTH), calls=lambda: torch.zeros((), dtype=torch.long))
def moving_average(m: Any, x: Tensor) -> Tensor:
    y = m.inner(x)
    with torch.no_grad():
        m.average.lerp_(y.mean((0, 1)), 0.1)
        m.calls += 1
    return (y - m.average) / (1 + m.calls)


@body(inner=linear)
def inner_gradient(m: Any, x: Tensor) -> Tensor:
    """Take a gradient inside the forward, so that backward differentiates it a second time."""
    with torch.enable_grad():
        z = x if x.requires_grad else x.detach().requires_grad_()
        (g,) = torch.autograd.grad(m.inner(z).tanh().square().sum(), z, create_graph=True)
    return g.square().sum(-1) + x.sum(-1)


@body(inner=linear)
def randomness(m: Any, x: Tensor) -> Tensor:
    y = F.alpha_dropout(m.inner(x), 0.2, training=True) + torch.randn_like(x) * F.rrelu(x, training=True)
    noise = torch.empty(WIDTH).exponential_() + torch.normal(0.0, 1.0, (WIDTH,), device=x.device)
    noise = noise + torch.randperm(WIDTH)
    return F.gumbel_softmax(y, dim=-1) + noise * torch.bernoulli(torch.full((WIDTH,), 0.5)) + torch.randint(3, (WIDTH,))
