"""Train a transformer that writes text, with a strategy whose ranks push now and then.

    mpiexec -n 4 python examples/torch_text.py local-steps

It learns the help texts of Python, character by character. At the end it shows how many
bits it needs for a character that it has not seen, and how it continues a line.
"""

import argparse
import math
import time
from pydoc_data.topics import topics

import torch
from mpi4py import MPI

import hpcaccum.torch as hpt

PERIOD, BATCH, LENGTH, RATE = 50, 8, 64, 3e-3

comm = MPI.COMM_WORLD
rank, size = comm.rank, comm.size
torch.set_num_threads(1)  # ranks share the cores
torch.manual_seed(rank)

ALPHABET = "\n" + "".join(map(chr, range(32, 127)))
texts = [each for _, each in sorted(topics.items())]
codes = torch.tensor([ALPHABET.find(each) for each in "".join(texts)])
codes = codes[codes >= 0]
unseen, train = codes[: LENGTH * 512], codes[LENGTH * 512 :]


class Transformer(torch.nn.Module):
    """Predicts each character of a text from those before."""

    def __init__(self, width=96, heads=4, layers=2):
        super().__init__()
        characters = len(ALPHABET)
        self.characters = torch.nn.Embedding(characters, width)
        self.places = torch.nn.Embedding(LENGTH, width)
        layer = torch.nn.TransformerEncoderLayer(
            width, heads, 4 * width, dropout=0.0, batch_first=True, norm_first=True
        )
        self.layers = torch.nn.TransformerEncoder(
            layer, layers, enable_nested_tensor=False
        )
        self.last = torch.nn.Linear(width, characters)

    def forward(self, x):
        """Return the logits of the next characters, for lines of characters."""
        n = x.shape[1]
        mask = torch.nn.Transformer.generate_square_subsequent_mask(n)
        x = self.characters(x) + self.places.weight[:n]
        return self.last(self.layers(x, mask, is_causal=True))


def loss_of(model, lines):
    """Return the mean loss of a character, in nats."""
    return torch.nn.functional.cross_entropy(
        model(lines[:, :-1]).flatten(0, 1), lines[:, 1:].flatten()
    )


def outer(params):
    """Return the outer rule of DiLoCo."""
    return torch.optim.SGD(params, 0.7, momentum=0.9, nesterov=True)


STRATEGIES = {
    "cross-shard": (hpt.CrossShard, {}),
    "agn": (hpt.AGN, {"communication_period": PERIOD}),
    "local-steps": (hpt.LocalSteps, {"outer": outer, "period": PERIOD, "quorum": size}),
}

parser = argparse.ArgumentParser(description="Train a transformer that writes text.")
parser.add_argument("strategy", choices=STRATEGIES)
parser.add_argument("--steps", type=int, default=400, help="steps of each rank (400)")
for name, kind in ("fragments", int), ("overlap", int), ("wire_dtype", str):
    parser.add_argument(f"--{name}".replace("_", "-"), type=kind, help="of local steps")
args = parser.parse_args()
model = Transformer()
inner = torch.optim.AdamW(model.parameters(), RATE)
strategy, options = STRATEGIES[args.strategy]
for name in "fragments", "overlap", "wire_dtype":
    if vars(args)[name] is not None:
        options[name] = vars(args)[name]
begun = time.perf_counter()
with strategy(inner, module=model, **options) as opt:
    for _ in range(args.steps):
        starts = torch.randint(len(train) - LENGTH, (BATCH,))
        lines = torch.stack([train[i : i + LENGTH + 1] for i in starts.tolist()])
        loss_of(model, lines).backward()
        opt.step()
        opt.zero_grad()
    comm.Barrier()
    seconds = time.perf_counter() - begun

# All ranks have the parameters of the last update.
if rank == 0:
    with torch.no_grad():
        lines = unseen.unfold(0, LENGTH + 1, LENGTH)
        bits = loss_of(model, lines).item() / math.log(2)
        line = codes.new_tensor([ALPHABET.index(each) for each in "The value of "])
        while len(line) < LENGTH:
            line = torch.cat([line, model(line[None])[0, -1:].argmax(1)])
    print(f"{args.strategy}: {bits:.2f} bits a character after {seconds:.1f} s")
    print(*(ALPHABET[each] for each in line.tolist()), sep="")
