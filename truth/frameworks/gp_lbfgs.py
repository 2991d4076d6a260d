"""Gaussian processes of GPyTorch fitted with L-BFGS: 96 points give short kernels, so the host is the bottleneck.

A step is the fit of one process. L-BFGS calls forward and backward as often as it likes, and reads many numbers back
from the GPU.
"""

import os
import sys

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), ".."))

import hooks
import job
import stamps
import torch

job.require("gpytorch")

import gpytorch

KNOWN = {"verdict": "host", "absent": ["DataLoading", "NcclCollective"]}


class Process(gpytorch.models.ExactGP):
    def __init__(self, places, values, likelihood):
        super().__init__(places, values, likelihood)
        self.mean_module = gpytorch.means.ConstantMean()
        self.covar_module = gpytorch.kernels.ScaleKernel(gpytorch.kernels.MaternKernel(nu=2.5, ard_num_dims=4))

    def forward(self, places):
        return gpytorch.distributions.MultivariateNormal(self.mean_module(places), self.covar_module(places))


def fit(places, values):
    """Find scales and noise for one series of measurements."""
    likelihood = gpytorch.likelihoods.GaussianLikelihood().to(places)
    model = Process(places, values, likelihood).to(places)
    evidence = gpytorch.mlls.ExactMarginalLogLikelihood(likelihood, model)
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=10, line_search_fn="strong_wolfe")

    def closure():
        optimizer.zero_grad()
        with stamps.forward:
            loss = -evidence(model(places), values)
        stamps.backward(loss)
        return loss

    model.train()
    with stamps.optimizer:
        return optimizer.step(closure)


def main():
    run = job.Job(job.arguments(__doc__).parse_args(), KNOWN)
    places = torch.rand(run.pick(96, 24), 4, device=run.device, dtype=torch.double)
    hooks.label_gpu_waits()
    # Linear algebra on the GPU is loaded on first use.
    fit(places, torch.sin(4 * places[:, 0]))
    run.begin()
    count = 0
    while run.running():
        with stamps.step:
            slope = torch.rand(4, dtype=torch.double).to(run.device)
            values = torch.sin(4 * places @ slope) + 0.1 * torch.randn_like(places[:, 0])
            stamps.item(fit(places, values).detach())
        count += 1
    run.done(count)


if __name__ == "__main__":
    main()
