"""A trainer described by the eight methods of ``ft.Binding``: a regression with a hand-written optimizer.

Use it as a pattern if your model or optimizer is not torch's; otherwise ``ft.TorchBinding`` (``small.py``) suffices::

    moevement launch --trainer torch --nproc 2 --spares 1 examples/plain_torch/own_binding.py --run-dir runs/own
"""

import argparse
from pathlib import Path

import torch
import torch.distributed as dist

import moevement_core as ft

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--iterations", type=int, default=60)
parser.add_argument("--run-dir", type=Path)
ft.add_session_flags(parser)
args = parser.parse_args()
WIDTH, LAYERS, BATCH = 16, 4, 32


class Regression(ft.Binding):
    """Network of tanh layers, trained by gradient descent with momentum."""

    def __init__(self) -> None:
        draws = torch.Generator().manual_seed(1)  # All ranks begin with the same weights.
        self.weights = [torch.randn(WIDTH, WIDTH, generator=draws) / 4 for _ in range(LAYERS)]
        self.momenta = [torch.zeros_like(weight) for weight in self.weights]
        self.gradients: list[torch.Tensor | None] = [None] * LAYERS

    def place(self) -> ft.Place:
        """Return this rank's position. It says here that all ranks hold the same state as rank 0."""
        return ft.Place(same_state=0)

    def operators(self) -> list[ft.Operator]:
        """Return the units that snapshots save: here, the layers."""
        number = self.weights[0].nbytes
        sizes = ft.StateBytes(compute=number, master=number, optimizer=number, gradient=0)
        return [ft.Operator(ft.layer_name(layer), ft.OperatorKind.LAYER, sizes) for layer in range(LAYERS)]

    def states(self) -> dict[str, ft.OperatorState]:
        """Return flat views of the live tensors of each operator."""
        states = {}
        for layer, (weight, momentum) in enumerate(zip(self.weights, self.momenta, strict=True)):
            name = ft.layer_name(layer)
            compute = ft.StateTensor(name, ft.Saved.COMPUTE, "weight", weight.view(-1))
            master = ft.StateTensor(name, ft.Saved.FULL, "weight", weight.view(-1))
            states[name] = ft.OperatorState(
                (compute,), (master, ft.StateTensor(name, ft.Saved.FULL, "momentum", momentum.view(-1))), ()
            )
        return states

    def boundary(self) -> dict[str, object]:
        """Return everything else that an iteration changes: here, only the iteration's number."""
        return {"progress": {"iteration": self.iteration}}

    def put_boundary(self, boundary: dict[str, dict[str, int]]) -> None:
        """Restore the values of ``boundary``."""
        self.put_progress(boundary["progress"])

    def run(self, iteration: int, frozen: frozenset[str] = frozenset()) -> None:
        """Compute the gradients of this rank's share of a batch that depends only on the iteration."""
        for layer, weight in enumerate(self.weights):
            weight.grad = None
            weight.requires_grad_(ft.layer_name(layer) not in frozen)
        batch = torch.randn(BATCH, WIDTH, generator=torch.Generator().manual_seed(iteration))
        own = batch[dist.get_rank() :: dist.get_world_size()]
        x = own.clone().requires_grad_()
        for weight in self.weights:
            x = torch.tanh(x @ weight)
        loss = (x - own.flip(1)).square().mean()
        loss.backward()
        self.gradients = [weight.grad for weight in self.weights]
        self.losses[iteration] = {"loss": loss.detach()}

    def reduce(self) -> dict[str, float]:
        """Average gradients over the ranks. All ranks make the same calls, also for frozen operators."""
        for gradient in self.gradients:
            dist.all_reduce(torch.zeros(WIDTH, WIDTH) if gradient is None else gradient)
        return {"scale": 1 / dist.get_world_size()}

    def update(self, outcome: dict[str, float]) -> None:
        """Update weights that have a gradient, without communication."""
        with torch.no_grad():
            for weight, momentum, gradient in zip(self.weights, self.momenta, self.gradients, strict=True):
                if gradient is not None:
                    momentum.mul_(0.9).add_(gradient, alpha=outcome["scale"])
                    weight.sub_(momentum, alpha=0.05)


def loop(session: ft.Session) -> None:
    """Train to the end. After a failure the function is called again, and goes on where the ranks agreed."""
    for iteration in ft.iterations(session, until=args.iterations):
        session.binding.run(iteration)
        session.step()


config = ft.SessionConfig.from_args(args, has_experts=False)
ft.train(Regression, config, loop, "gloo", run_dir=args.run_dir, flags=vars(args))
