"""Muon: momentum whose singular values are all made equal, for the kernels of convolutions.

    B = m * B + (1 - m) * g,   u = m * B + (1 - m) * g,   m = 0.95 (Nesterov's momentum)
    w -= lr * 0.2 * sqrt(max(rows, columns)) * polar(u)

after Keller Jordan, https://kellerjordan.github.io/posts/muon; polar(u) = U V' of the singular
value decomposition U S V'. A kernel (out, in, h, w) is a matrix of `out` rows. The factor gives a
step the root mean square that AdamW's steps have (arXiv:2502.16982, section 2.2), so both go with
the same learning rate and decay. torch.optim.Muon takes matrices only, and rounds to bfloat16.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.adamw import adamw

# Keller Jordan's quintic: five times takes singular values of 0.003 to 1 to about 0.7 to 1.2.
_A, _B, _C = 3.4445, -4.7750, 2.0315
_ITERATIONS = 5
_MOMENTUM = 0.95
_RMS = 0.2
_EPS = 1e-8
_LEAST_NORM = 1e-7  # as in torch.optim.Muon; the square of a norm of 1e-23 is 0 in float32


def muon_names(model: nn.Module) -> set[str]:
    """The weights that Muon is for: kernels that map all channels to all, but those to classes."""
    return {
        f"{path}.weight"
        for path, layer in model.named_modules()
        if isinstance(layer, nn.Conv2d | nn.Linear)
        and getattr(layer, "groups", 1) == 1
        and "classifier" not in path
    }


class Muon(torch.optim.Optimizer):
    """Muon for groups with `muon: True`, AdamW for the others.

    groups: of parameters, with `weight_decay`, which is decoupled. betas: of AdamW.
    lr: a tensor () is not read by the host. fused: as torch's AdamW has it.
    """

    def __init__(
        self,
        groups: list[dict[str, Any]],
        lr: float | Tensor,
        *,
        betas: tuple[float, float] = (0.9, 0.999),
        fused: bool | None = None,
    ) -> None:
        defaults = {"lr": lr, "betas": betas, "weight_decay": 0.0, "muon": False, "fused": fused}
        super().__init__(groups, defaults)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        """One update by the gradients."""
        # TF32 would leave eigenvalues below 0 in `orthogonalized`, which grow: steps twice as long.
        matmul = torch.backends.cuda.matmul
        before, matmul.allow_tf32 = matmul.allow_tf32, False
        try:
            for group in self.param_groups:
                weights = [weight for weight in group["params"] if weight.grad is not None]
                (self._muon if group["muon"] else self._adamw)(group, weights)
        finally:
            matmul.allow_tf32 = before

    def _muon(self, group: dict[str, Any], weights: list[Tensor]) -> None:
        by_size: dict[int, list[Tensor]] = {}
        for weight in weights:
            if not self.state[weight]:
                self.state[weight]["momentum_buffer"] = torch.zeros_like(weight)
            by_size.setdefault(min(weight.flatten(1).shape), []).append(weight)
        # Matrices of one smaller side go through the iterations together.
        for alike in by_size.values():
            velocities = [self.state[weight]["momentum_buffer"] for weight in alike]
            grads = [weight.grad for weight in alike]
            torch._foreach_lerp_(velocities, grads, 1 - _MOMENTUM)
            ahead = torch._foreach_lerp(grads, velocities, _MOMENTUM)
            steps = orthogonalized([u.flatten(1) for u in ahead])
            # A rate on the device is multiplied apart: the host does not read it.
            if isinstance(group["lr"], Tensor):
                torch._foreach_mul_(steps, [-_RMS * math.sqrt(max(s.shape)) for s in steps])
                torch._foreach_mul_(steps, group["lr"])
            else:
                scales = [-group["lr"] * _RMS * math.sqrt(max(s.shape)) for s in steps]
                torch._foreach_mul_(steps, scales)
            torch._foreach_mul_(alike, 1 - group["lr"] * group["weight_decay"])
            torch._foreach_add_(alike, [s.view(w.shape) for s, w in zip(steps, alike, strict=True)])

    def _adamw(self, group: dict[str, Any], weights: list[Tensor]) -> None:
        for weight in weights:
            if not self.state[weight]:
                moments = {key: torch.zeros_like(weight) for key in ("exp_avg", "exp_avg_sq")}
                place = weight.device if group["fused"] else None  # where torch keeps it
                self.state[weight] = {"step": torch.zeros((), device=place), **moments}
        states = [self.state[weight] for weight in weights]
        adamw(
            weights,
            [weight.grad for weight in weights],
            [state["exp_avg"] for state in states],
            [state["exp_avg_sq"] for state in states],
            [],
            [state["step"] for state in states],
            fused=group["fused"],
            amsgrad=False,
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=_EPS,
            maximize=False,
        )


def orthogonalized(matrices: Sequence[Tensor]) -> list[Tensor]:
    """About U V' of the singular value decomposition U S V' of each of `matrices`.

    matrices: alike in their smaller side. They go together: a GPU is faster than a host that starts
        30 kernels for each.

    Singular values of 0.68 to 1.21, but for those below 0.3 % of the root of the sum of squares,
    and for matrices whose root is below 1e-7, as where no gradient has come for long.
    The Newton-Schulz iterations x = (a + b x x' + c (x x')^2) x are done on x x', which is small:
    kernels of 3x3 have nine times as many columns as rows.
    """
    norms = torch.stack(torch._foreach_norm(matrices)).clamp(min=_LEAST_NORM)
    xs = [matrix / norm for matrix, norm in zip(matrices, norms, strict=True)]
    # Lying, so that x x' has the smaller side.
    xs = [x.T if x.shape[0] > x.shape[1] else x for x in xs]
    # (n, rows, rows), symmetric; all factors commute
    gram, product = torch.stack([x @ x.T for x in xs]), None
    for left in reversed(range(_ITERATIONS)):
        factor = torch.baddbmm(gram, gram, gram, beta=_B, alpha=_C)
        factor.diagonal(dim1=1, dim2=2).add_(_A)
        product = factor if product is None else factor @ product
        gram = factor @ gram @ factor if left else None
    steps = [matrix @ x for matrix, x in zip(product, xs, strict=True)]
    return [
        s if s.shape == matrix.shape else s.T for s, matrix in zip(steps, matrices, strict=True)
    ]
