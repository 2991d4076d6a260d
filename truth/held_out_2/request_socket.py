"""Inference on request: a client process asks over a socket, now and then; each request is answered with a sampled image.

The server is idle between requests: waiting for one is `sleep`. An answer takes ten passes of a small conv net.
"""

import os
import sys

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), ".."))

import socket
import struct
import subprocess

import job
import stamps
import torch
from torch import nn

KNOWN = {"verdict": "inference", "absent": ["DataLoading", "NcclCollective", "OptimizerStep"]}
PASSES = 10
# Asks, waits for the answer, pauses. Ends with the server.
CLIENT = """
import random, socket, struct, sys, time
server = socket.socket(fileno=int(sys.argv[1]))
while True:
    server.sendall(struct.pack("q", random.getrandbits(32)))
    left = struct.unpack("q", server.recv(8, socket.MSG_WAITALL))[0]
    while left:
        got = len(server.recv(min(left, 65536)))
        if not got:
            sys.exit()
        left -= got
    time.sleep(random.expovariate(1 / 0.04))
"""


class Painter(nn.Module):
    def __init__(self, width, depth):
        super().__init__()
        self.first, self.last = nn.Conv2d(3, width, 3, padding=1), nn.Conv2d(width, 3, 3, padding=1)
        self.layers = nn.ModuleList(nn.Conv2d(width, width, 3, padding=1) for _ in range(depth))

    def forward(self, image):
        hidden = self.first(image)
        for layer in self.layers:
            hidden = hidden + nn.functional.mish(layer(hidden))
        return self.last(hidden)


def next_request(connection):
    """The seed of the next request, or None if there was none for a while."""
    with stamps.sleep:
        try:
            request = connection.recv(8, socket.MSG_WAITALL)
        except TimeoutError:
            return None
    return struct.unpack("q", request)[0]


def main():
    run = job.Job(job.arguments(__doc__).parse_args(), KNOWN)
    size = run.pick(64, 8)
    model = Painter(run.pick(128, 8), run.pick(12, 2)).to(run.device).eval()
    connection, other = socket.socketpair()
    connection.settimeout(0.2)
    with torch.inference_mode():
        model(torch.randn(1, 3, size, size, device=run.device))
    client = subprocess.Popen([sys.executable, "-c", CLIENT, str(other.fileno())], pass_fds=[other.fileno()],
                              stderr=subprocess.DEVNULL)
    other.close()
    run.begin()
    count = 0
    with torch.inference_mode():
        while run.running():
            with stamps.step:
                seed = next_request(connection)
                if seed is None:
                    continue
                with stamps.host:
                    image = torch.randn(1, 3, size, size, generator=torch.Generator().manual_seed(seed))
                (image,) = stamps.to_device([image], run.device)
                for _ in range(PASSES):
                    with stamps.forward:
                        image = image - 0.1 * model(image)
                with stamps.gpu if run.device.type == "cuda" else stamps.host:
                    image = image.cpu()
                with stamps.host:
                    answer = image.clamp(-1, 1).add(1).mul(127).to(torch.uint8).numpy().tobytes()
                    connection.sendall(struct.pack("q", len(answer)) + answer)
            count += 1
    run.done(count)
    connection.close()
    client.wait(5)


if __name__ == "__main__":
    main()
