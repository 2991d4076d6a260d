"""Reinforcement learning: the training thread plays games on the CPU, then learns from them. The games are the bottleneck.

No DataLoader. Playing is `host`; the policy's forward passes while playing are `forward`.
"""

import os
import sys

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), ".."))

import random

import job
import stamps
import torch
from torch import nn

KNOWN = {"verdict": "host", "absent": ["DataLoading", "NcclCollective"]}


class Cart:
    """A small simulated game in plain Python."""

    def __init__(self):
        self.state = [random.uniform(-0.1, 0.1) for _ in range(8)]

    def move(self, action):
        push = 0.1 if action else -0.1
        for _ in range(40):
            self.state = [0.97 * value + 0.03 * push * index for index, value in enumerate(self.state)]
        return -sum(value * value for value in self.state)


def play(policy, carts, moves, device):
    """The log-probabilities and rewards of some moves of all carts.

    Validation is off: it would read a result back from the GPU inside `forward`.
    """
    chances, rewards = [], []
    for _ in range(moves):
        with stamps.host:
            states = torch.tensor([cart.state for cart in carts])
        (states,) = stamps.to_device([states], device)
        with stamps.forward:
            choice = torch.distributions.Categorical(logits=policy(states), validate_args=False)
            actions = choice.sample()
            chances.append(choice.log_prob(actions))
        with stamps.gpu if device.type == "cuda" else stamps.host:
            actions = actions.tolist()
        with stamps.host:
            rewards.append(torch.tensor([cart.move(action) for cart, action in zip(carts, actions)]))
    return torch.stack(chances), torch.stack(rewards)


def main():
    run = job.Job(job.arguments(__doc__).parse_args(), KNOWN)
    policy = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 2)).to(run.device)
    optimizer = torch.optim.Adam(policy.parameters(), lr=1e-3)
    carts = [Cart() for _ in range(16)]
    run.begin()
    count = 0
    while run.running():
        with stamps.step:
            chances, rewards = play(policy, carts, 16, run.device)
            (rewards,) = stamps.to_device([rewards], run.device)
            with stamps.forward:
                returns = rewards.flip(0).cumsum(0).flip(0)
                loss = -(chances * (returns - returns.mean())).mean()
            with stamps.optimizer:
                optimizer.zero_grad()
            stamps.backward(loss)
            with stamps.optimizer:
                optimizer.step()
        count += 1
    run.done(count)


if __name__ == "__main__":
    main()
