"""Learning from rewards, with the environments in six processes behind pipes. Their simulation in Python is the bottleneck.

For each move the training thread sends actions to all processes and waits for what they saw: that is `data`, as it is what the
next pass needs and nobody but the processes can make it. The processes stamp `feed` and `feed_idle`. A step is 32 moves of all
environments and eight updates.
"""

import os
import sys

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), ".."))

import math
import multiprocessing
import random

import job
import stamps
import torch
from torch import nn

KNOWN = {"verdict": "input", "absent": ["NcclCollective"]}
PROCESSES, LINKS, FORCES = 6, 12, 3
UPDATES = 8


class Chain:
    """A hanging chain whose upper end is pushed; it is rewarded for a high lower end."""

    def __init__(self, seed, substeps):
        self.draw, self.substeps = random.Random(seed), substeps
        self.reset()

    def reset(self):
        self.angles = [self.draw.uniform(-0.3, 0.3) for _ in range(LINKS)]
        self.speeds = [0.0] * LINKS
        self.moves = 0

    def seen(self):
        return [math.sin(angle) for angle in self.angles] + self.speeds

    def move(self, forces):
        """Simulate a moment. Returns what is seen then, the reward, and whether the game is over."""
        angles, speeds, interval = self.angles, self.speeds, 0.05 / self.substeps
        for _ in range(self.substeps):
            for link in range(LINKS):
                above = angles[link - 1] if link else forces[0]
                below = angles[link + 1] if link + 1 < LINKS else angles[link] + 0.1 * forces[1]
                pull = 40.0 * (above - 2 * angles[link] + below) - 9.8 * math.sin(angles[link]) - 0.3 * speeds[link]
                speeds[link] = max(-20.0, min(20.0, speeds[link] + interval * (pull + forces[2])))
            for link in range(LINKS):
                angles[link] += interval * speeds[link]
        self.moves += 1
        reward = -math.cos(angles[-1]) - 0.01 * sum(force * force for force in forces)
        over = self.moves == 200 or abs(angles[-1]) > 10
        if over:
            self.reset()
        return self.seen(), reward, over


def play(pipe, variant, count, substeps, seed):
    """Main function of a process with some environments."""
    chains = [Chain(seed + index, substeps) for index in range(count)]
    pipe.recv()
    stamps.begin_loader(variant, KNOWN)
    stamps.stamp("+feed_idle")
    pipe.send([chain.seen() for chain in chains])
    while (actions := pipe.recv()) is not None:
        with stamps.feed:
            pipe.send([chain.move(forces) for chain, forces in zip(chains, actions)])


class Environments:
    """All environments, seen from the training process."""

    def __init__(self, run, count, substeps):
        context = multiprocessing.get_context("spawn")
        self.count, self.pipes, self.processes = count, [], []
        for number in range(PROCESSES):
            mine, theirs = context.Pipe()
            settings = (theirs, run.variant, count, substeps, 100 * number)
            self.processes.append(context.Process(target=play, args=settings, daemon=True))
            self.processes[-1].start()
            theirs.close()
            self.pipes.append(mine)

    def start(self):
        """What the environments see first."""
        for pipe in self.pipes:
            pipe.send("start")
        return torch.tensor([seen for pipe in self.pipes for seen in pipe.recv()])

    def move(self, actions):
        """Move all environments at once."""
        actions = actions.tolist()
        for number, pipe in enumerate(self.pipes):
            pipe.send(actions[number * self.count:(number + 1) * self.count])
        answers = [answer for pipe in self.pipes for answer in pipe.recv()]
        seen, rewards, over = zip(*answers)
        return torch.tensor(seen), torch.tensor(rewards), torch.tensor(over)

    def end(self):
        for pipe in self.pipes:
            pipe.send(None)
        for process in self.processes:
            process.join(5)


class Player(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(2 * LINKS, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh())
        self.action, self.worth = nn.Linear(width, FORCES), nn.Linear(width, 1)
        self.spread = nn.Parameter(torch.zeros(FORCES))

    def forward(self, seen):
        hidden = self.body(seen)
        return self.action(hidden), self.worth(hidden).squeeze(-1)

    def likelihood(self, mean, action):
        """The logarithm of an action's probability, up to a constant."""
        return -((action - mean) / self.spread.exp()).square().sum(-1) / 2 - self.spread.sum()


def look_back(rewards, over, worths, last):
    """How much better each move was than expected."""
    better, running = torch.zeros_like(rewards), torch.zeros(rewards.shape[1])
    for move in reversed(range(len(rewards))):
        going = 1.0 - over[move].float()
        after = worths[move + 1] if move + 1 < len(rewards) else last
        running = rewards[move] + 0.99 * going * after - worths[move] + 0.94 * going * running
        better[move] = running
    return better


def read(tensors):
    with stamps.gpu if tensors[0].is_cuda else stamps.host:
        return [tensor.cpu() for tensor in tensors]


@torch.no_grad()
def roll_out(run, player, environments, seen, moves):
    """Play some moves. Returns what was seen, done and gained, one row per move, and what is seen now."""
    rows = []
    for _ in range(moves):
        (here,) = stamps.to_device([seen], run.device)
        with stamps.forward:
            mean, worth = player(here)
            action = mean + torch.randn_like(mean) * player.spread.exp()
            likelihood = player.likelihood(mean, action)
        action, worth, likelihood = read([action, worth, likelihood])
        with stamps.data:
            after, reward, over = environments.move(action.clamp(-1, 1))
        rows.append((seen, action, likelihood, worth, reward, over))
        seen = after
    return [torch.stack(column) for column in zip(*rows)], seen


def main():
    run = job.Job(job.arguments(__doc__).parse_args(), KNOWN)
    moves = run.pick(32, 4)
    player = Player(run.pick(256, 8)).to(run.device)
    optimizer = torch.optim.Adam(player.parameters(), lr=3e-4, eps=1e-5)
    environments = Environments(run, run.pick(6, 1), run.pick(240, 20))
    ready = environments.start()
    run.begin()
    count, seen = 0, ready
    while run.running():
        with stamps.step:
            columns, seen = roll_out(run, player, environments, seen, moves)
            places, actions, likelihoods, worths, rewards, over = columns
            with stamps.forward, torch.no_grad():
                (here,) = stamps.to_device([seen], run.device)
                last = player(here)[1]
            (last,) = read([last])
            better = look_back(rewards, over, worths, last)
            batch = [tensor.flatten(0, 1) for tensor in (places, actions, likelihoods, better, better + worths)]
            batch = stamps.to_device(batch, run.device)
            for _ in range(UPDATES):
                picked = torch.randperm(len(batch[0]), device=run.device)[:len(batch[0]) // 4]
                place, action, before, gain, wanted = (tensor[picked] for tensor in batch)
                with stamps.forward:
                    mean, worth = player(place)
                    ratio = (player.likelihood(mean, action) - before).exp()
                    gain = (gain - gain.mean()) / (gain.std() + 1e-8)
                    loss = -torch.minimum(ratio * gain, ratio.clamp(0.8, 1.2) * gain).mean()
                    loss = loss + 0.5 * nn.functional.mse_loss(worth, wanted)
                with stamps.optimizer:
                    optimizer.zero_grad()
                stamps.backward(loss)
                with stamps.optimizer:
                    nn.utils.clip_grad_norm_(player.parameters(), 0.5)
                    optimizer.step()
            stamps.item(loss.detach())
        count += 1
    run.done(count)
    environments.end()


if __name__ == "__main__":
    main()
