"""Learning from rewards off policy: forked actors play all the time and write their moves to a ring in shared memory. Host-bound.

The learner never waits for them: it draws old moves from the ring and updates two critics, the policy and its heat, each with an
optimizer of its own. All networks are small: tiny kernels. Every 25th step the policy's weights go to shared memory. The actors
take them from there and compute on the CPU. A move of an actor is `feed`.
"""

import os
import sys

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), ".."))

import copy
import math
import multiprocessing
import random
import time

import job
import stamps
import torch
from torch import nn

KNOWN = {"verdict": "host", "absent": ["NcclCollective"]}
ACTORS, SEEN, FORCES = 3, 6, 2
PUBLISH, LOG = 25, 50


class Boat:
    """A boat on a windy pond, which is rewarded for being near the buoy."""

    def __init__(self, seed):
        self.draw = random.Random(seed)
        self.reset()

    def reset(self):
        self.place = [self.draw.uniform(-3, 3), self.draw.uniform(-3, 3)]
        self.speed, self.wind, self.moves = [0.0, 0.0], [0.0, 0.0], 0

    def seen(self):
        return self.place + self.speed + self.wind

    def move(self, forces):
        for _ in range(20):
            for axis in (0, 1):
                self.wind[axis] += 0.02 * self.draw.gauss(0, 1) - 0.01 * self.wind[axis]
                drag = 0.4 * self.speed[axis] * math.hypot(*self.speed)
                self.speed[axis] += 0.01 * (forces[axis] + self.wind[axis] - drag)
                self.place[axis] += 0.01 * self.speed[axis]
        self.moves += 1
        reward = -math.hypot(*self.place) - 0.05 * math.hypot(*forces)
        over = self.moves == 300 or math.hypot(*self.place) > 8
        after = self.seen()
        if over:
            self.reset()
        return after, reward, over


class Ring:
    """The last moves of each actor, in shared memory: what was seen, forces, reward, whether it is over, what was seen then."""

    def __init__(self, length):
        self.rows = torch.zeros(ACTORS, length, 2 * SEEN + FORCES + 2).share_memory_()
        self.written = torch.zeros(ACTORS, dtype=torch.long).share_memory_()
        self.length = length

    def write(self, actor, row):
        place = int(self.written[actor])
        self.rows[actor, place % self.length] = torch.tensor(row)
        self.written[actor] = place + 1

    def draw(self, rows):
        there = int(self.written.min().clamp(max=self.length))
        picked = self.rows[torch.randint(ACTORS, (rows,)), torch.randint(there, (rows,))]
        return picked.split([SEEN, FORCES, 1, 1, SEEN], 1)


class Policy(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(SEEN, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU())
        self.mean, self.spread = nn.Linear(width, FORCES), nn.Linear(width, FORCES)

    def forward(self, seen):
        """Forces drawn at random, and the logarithm of their density."""
        hidden = self.body(seen)
        mean, spread = self.mean(hidden), self.spread(hidden).clamp(-5, 2)
        noise = torch.randn_like(mean)
        forces = mean + spread.exp() * noise
        density = -(noise.square() / 2 + spread + math.log(math.sqrt(2 * math.pi)))
        density = density - 2 * (math.log(2) - forces - nn.functional.softplus(-2 * forces))
        return forces.tanh(), density.sum(1, keepdim=True)


class Critic(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(SEEN + FORCES, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(),
                                  nn.Linear(width, 1))

    def forward(self, seen, forces):
        return self.body(torch.cat([seen, forces], 1))


def act(actor, ring, shared, policy, go, ended, variant):
    """Main function of an actor."""
    torch.set_num_threads(1)
    torch.manual_seed(100 + actor)
    boat = Boat(actor)
    go.wait()
    stamps.begin_loader(variant, KNOWN)
    weights, moves = list(policy.parameters()), 0
    with torch.no_grad():
        while not ended.is_set():
            with stamps.feed:
                if moves % 200 == 0:
                    for weight, part in zip(weights, shared.split([weight.numel() for weight in weights])):
                        weight.copy_(part.view_as(weight))
                seen = boat.seen()
                forces = policy(torch.tensor([seen]))[0][0].tolist()
                after, reward, over = boat.move(forces)
                ring.write(actor, [*seen, *forces, reward, float(over), *after])
            moves += 1


class Learner:
    def __init__(self, policy, width, device):
        self.device, self.policy = device, policy.to(device)
        self.critics = nn.ModuleList(Critic(width) for _ in range(2)).to(device)
        self.slow = copy.deepcopy(self.critics).requires_grad_(False)
        self.heat = torch.zeros((), device=device, requires_grad=True)
        self.by_policy = torch.optim.Adam(self.policy.parameters(), lr=3e-4)
        self.by_critics = torch.optim.Adam(self.critics.parameters(), lr=1e-3)
        self.by_heat = torch.optim.Adam([self.heat], lr=1e-3)

    def descend(self, optimizer, loss):
        with stamps.optimizer:
            optimizer.zero_grad()
        stamps.backward(loss)
        with stamps.optimizer:
            optimizer.step()

    def learn(self, seen, forces, reward, over, after):
        with stamps.forward:
            with torch.no_grad():
                then, density = self.policy(after)
                worth = torch.minimum(*[critic(after, then) for critic in self.slow]) - self.heat.exp() * density
                wanted = reward + 0.99 * (1 - over) * worth
            loss = sum(nn.functional.mse_loss(critic(seen, forces), wanted) for critic in self.critics)
        self.descend(self.by_critics, loss)
        with stamps.forward:
            now, density = self.policy(seen)
            self.critics.requires_grad_(False)
            worth = torch.minimum(*[critic(seen, now) for critic in self.critics])
            self.critics.requires_grad_(True)
            aim = (self.heat.detach().exp() * density - worth).mean()
        self.descend(self.by_policy, aim)
        with stamps.forward:
            heat = -(self.heat * (density.detach() - FORCES)).mean()
        self.descend(self.by_heat, heat)
        with torch.no_grad():
            for slow, fast in zip(self.slow.parameters(), self.critics.parameters()):
                slow.lerp_(fast, 0.005)
        return loss.detach()

    @torch.no_grad()
    def publish(self, shared):
        weights = torch.cat([weight.flatten() for weight in self.policy.parameters()])
        with stamps.gpu if weights.is_cuda else stamps.host:
            shared.copy_(weights)


def main():
    run = job.Job(job.arguments(__doc__).parse_args(), KNOWN)
    width = run.pick(256, 32)
    policy, ring = Policy(width), Ring(run.pick(20_000, 2000))
    shared = nn.utils.parameters_to_vector(policy.parameters()).detach().clone().share_memory_()
    context = multiprocessing.get_context("fork")
    go, ended = context.Event(), context.Event()
    # Forked before anything uses the device.
    actors = [context.Process(target=act, daemon=True, args=(actor, ring, shared, copy.deepcopy(policy), go, ended, run.variant))
              for actor in range(ACTORS)]
    for actor in actors:
        actor.start()
    learner = Learner(policy, width, run.device)
    go.set()
    while ring.written.min() < 200:
        time.sleep(0.05)
    run.begin()
    count = 0
    while run.running():
        with stamps.step:
            with stamps.data:
                batch = ring.draw(run.pick(256, 16))
            loss = learner.learn(*stamps.to_device(batch, run.device))
            if count % PUBLISH == 0:
                learner.publish(shared)
            if count % LOG == 0:
                stamps.item(loss)
        count += 1
    ended.set()
    run.done(count)
    for actor in actors:
        actor.join(5)


if __name__ == "__main__":
    main()
