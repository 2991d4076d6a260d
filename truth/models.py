"""Models and datasets of the tuning variants."""

import zlib

import torch
from torch import nn
from torch.utils.data import Dataset


class Mlp(nn.Module):
    def __init__(self, width, layers, outputs=10):
        super().__init__()
        blocks = [nn.Sequential(nn.Linear(width, width), nn.LayerNorm(width), nn.GELU()) for _ in range(layers)]
        self.body = nn.Sequential(*blocks)
        self.head = nn.Linear(width, outputs)

    def forward(self, inputs):
        return self.head(self.body(inputs))


class Transformer(nn.Module):
    """A causal language model."""

    def __init__(self, width, layers, heads, vocabulary=1024, length=256):
        super().__init__()
        self.token = nn.Embedding(vocabulary, width)
        self.position = nn.Parameter(torch.zeros(1, length, width))
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(width, heads, 4 * width, dropout=0.0, batch_first=True, norm_first=True)
            for _ in range(layers))
        self.head = nn.Linear(width, vocabulary)
        mask = torch.full((length, length), float("-inf")).triu(1)
        self.register_buffer("mask", mask, persistent=False)

    def forward(self, tokens):
        length = tokens.shape[1]
        hidden = self.token(tokens) + self.position[:, :length]
        mask = self.mask[:length, :length].to(hidden.dtype)
        for block in self.blocks:
            hidden = block(hidden, src_mask=mask)
        return self.head(hidden)


class ConvNet(nn.Module):
    """A residual network."""

    def __init__(self, width, blocks, outputs=100):
        super().__init__()
        self.stem = nn.Conv2d(3, width, 7, stride=4, padding=3)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Conv2d(width, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU(),
                          nn.Conv2d(width, width, 3, padding=1), nn.BatchNorm2d(width))
            for _ in range(blocks))
        self.head = nn.Linear(width, outputs)

    def forward(self, images):
        hidden = self.stem(images)
        for block in self.blocks:
            hidden = torch.relu(hidden + block(hidden))
        return self.head(hidden.mean((2, 3)))


class WordBags(nn.Module):
    """Many weights and little work: every step averages all gradients and uses a few of them."""

    def __init__(self, vocabulary, width, classes):
        super().__init__()
        self.words = nn.EmbeddingBag(vocabulary, width, mode="mean")
        self.head = nn.Linear(width, classes)

    def forward(self, words):
        return self.head(self.words(words))


class Vectors(Dataset):
    """Random vectors with classes, ready in memory."""

    def __init__(self, width, classes=10, samples=1 << 20):
        self.inputs = torch.randn(512, width)
        self.targets = torch.randint(classes, (512,))
        self.samples = samples

    def __len__(self):
        return self.samples

    def __getitem__(self, index):
        return self.inputs[index % 512], self.targets[index % 512]


class Tokens(Dataset):
    """Random token sequences and the same shifted by one."""

    def __init__(self, length, vocabulary=1024, samples=8192):
        self.tokens = torch.randint(vocabulary, (256, length + 1))
        self.samples = samples

    def __len__(self):
        return self.samples

    def __getitem__(self, index):
        row = self.tokens[index % 256]
        return row[:-1], row[1:]


class Images(Dataset):
    """Random images with classes, ready in memory."""

    def __init__(self, size, classes=100, samples=4096):
        self.images = torch.randn(64, 3, size, size)
        self.samples = samples
        self.classes = classes

    def __len__(self):
        return self.samples

    def __getitem__(self, index):
        return self.images[index % 64], index % self.classes


class CompressedVectors(Dataset):
    """Vectors that cost CPU time to decode: the same bytes are inflated `repeats` times per sample."""

    def __init__(self, width, repeats, samples=8192):
        pixels = torch.randint(0, 32, (64 * 1024,), dtype=torch.uint8)
        self.packed = zlib.compress(bytes(pixels.tolist()), 1)
        self.width, self.repeats, self.samples = width, repeats, samples

    def __len__(self):
        return self.samples

    def __getitem__(self, index):
        for _ in range(self.repeats):
            plain = zlib.decompress(self.packed)
        start = index % 1024
        values = torch.frombuffer(bytearray(plain[start:start + self.width]), dtype=torch.uint8)
        return values.float() / 32.0, index % 10
